"""The recipe of verifiable rewards against the real server and the real SmolLM2, in a few small steps."""

from __future__ import annotations

from pathlib import Path

import pytest
from e2e.conftest import SMOL

from openrl_recipes.local_server import Endpoint
from openrl_recipes.rlvr.train import Options, main
from openrl_recipes.shared.folder import read_lines

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(600)]


def test_rewards_alone_teach_the_form_of_an_answer(
    smol_server: Endpoint, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name, value in smol_server.environment().items():
        monkeypatch.setenv(name, value)
    summary = main(Options(model=SMOL, steps=5, groups=6, samples=6, lr=1e-3, eval_items=24, out=str(tmp_path)))
    assert summary.before <= 0.3
    assert summary.after > summary.before

    records = read_lines(tmp_path / "metrics.jsonl")
    steps = [r for r in records if r["stage"] == "grpo"]
    assert len(steps) == 5
    assert max(r["reward"] for r in steps[3:]) > steps[0]["reward"]
    updates = [r for r in steps if r["mixed_groups"]]
    assert all(r["kl_v2"] < 1e-2 for r in updates)
    assert [r["held_out"] for r in records if "held_out" in r] == [summary.before, summary.after]
    samples = read_lines(tmp_path / "samples.jsonl")
    before, after = ([s["prompt"] for s in samples if s["stage"] == stage] for stage in ("before", "after"))
    assert before == after
    assert len(after) == 24
    assert (tmp_path / "report.html").exists()

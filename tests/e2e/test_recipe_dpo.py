"""The DPO recipe against the real server and the real SmolLM2, in a few steps."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from e2e.conftest import SMOL

from openrl_recipes.dpo.train import Options, main
from openrl_recipes.local_server import Endpoint
from openrl_recipes.shared.folder import read_lines

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(600)]


def test_preferences_over_some_pairs_rank_others_right(
    smol_server: Endpoint, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name, value in smol_server.environment().items():
        monkeypatch.setenv(name, value)
    summary = main(Options(model=SMOL, steps=8, batch=6, eval_pairs=24, eval_every=8, out=str(tmp_path)))
    assert summary.accuracy >= 0.8

    records = read_lines(tmp_path / "metrics.jsonl")
    steps = [r for r in records if r["stage"] == "dpo"]
    assert len(steps) == 8
    assert steps[0]["loss"] > math.log(2)  # that of the pairs, since the policy still is the reference; and the other
    assert steps[-1]["loss"] < steps[0]["loss"]
    assert steps[-1]["reward_margin"] > 0
    assert [r["held_out"] for r in records if "held_out" in r] == [0.5, summary.accuracy]
    [distance] = [r["kl_reference"] for r in records if "kl_reference" in r]
    assert distance > 0
    assert next(r["kl_v2"] for r in records if "kl_v2" in r) < 1e-2
    assert (tmp_path / "report.html").exists()

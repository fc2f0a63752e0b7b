"""The pig latin recipe against the real server and the real SmolLM2, in a third of its steps."""

from __future__ import annotations

from pathlib import Path

import pytest
from e2e.conftest import SMOL

from openrl_recipes.local_server import Endpoint
from openrl_recipes.pig_latin.train import Options, main
from openrl_recipes.shared.folder import read_lines

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(600)]


def test_pig_latin_is_learnt_for_words_that_were_not_shown(
    smol_server: Endpoint, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name, value in smol_server.environment().items():
        monkeypatch.setenv(name, value)
    summary = main(Options(model=SMOL, steps=14, eval_words=24, out=str(tmp_path)))
    assert summary.before <= 0.05
    assert summary.after >= 0.4

    records = read_lines(tmp_path / "metrics.jsonl")
    losses = [r["loss"] for r in records if r["stage"] == "sft"]
    assert len(losses) == 14
    assert losses[-1] < losses[0] / 4
    assert [r["held_out"] for r in records if "held_out" in r] == [summary.before, summary.after]
    assert records[-1]["kl_v2"] < 5e-3
    samples = read_lines(tmp_path / "samples.jsonl")
    before, after = ({s["prompt"] for s in samples if s["stage"] == stage} for stage in ("before", "after"))
    assert before == after
    assert len(after) == 24
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert "ay" in (tmp_path / "report.html").read_text()

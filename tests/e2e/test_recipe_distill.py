"""The distillation recipe against the real server and the real SmolLM2: both ways, in few steps, from one teacher."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from e2e.conftest import SMOL

from openrl_recipes.distill.teacher import read_examples
from openrl_recipes.distill.train import Options, main
from openrl_recipes.local_server import Endpoint
from openrl_recipes.pig_latin import train as pig_latin
from openrl_recipes.pig_latin.words import split
from openrl_recipes.shared.client import service_with
from openrl_recipes.shared.folder import RunFolder, read_lines

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def teacher(smol_server: Endpoint, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The path of a teacher's weights, after a short training in pig latin."""
    options = pig_latin.Options(model=SMOL, steps=14)
    with pytest.MonkeyPatch.context() as patch:
        enter(smol_server, patch)
        with service_with(SMOL) as service:
            trainer = service.create_lora_training_client(SMOL, rank=16, seed=0).result()
            folder = RunFolder(tmp_path_factory.mktemp("teacher"), options)
            pig_latin.train(folder, trainer, trainer.get_tokenizer(), split(0, 16)[0][::2], options)
            return trainer.save_weights_for_sampler("teacher").result().path


@pytest.fixture(autouse=True)
def environment(smol_server: Endpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    enter(smol_server, monkeypatch)


def enter(server: Endpoint, patch: pytest.MonkeyPatch) -> None:
    for name, value in server.environment().items():
        patch.setenv(name, value)


def test_a_student_learns_from_soft_targets_and_again_from_their_file(teacher: str, tmp_path: Path) -> None:
    file = tmp_path / "teacher.jsonl"
    options = Options(SMOL, mode="soft_targets", soft_steps=8, batch=16, eval_words=16, out=str(tmp_path / "first"))
    summary = main(replace(options, teacher=teacher, make_teacher=str(file)))
    assert summary.before <= 0.1
    assert summary.teacher >= 0.4
    records = read_lines(tmp_path / "first" / "metrics.jsonl")
    steps = [r for r in records if r["stage"] == "distill"]
    assert steps[-1]["forward_kl"] < steps[0]["forward_kl"] / 3
    assert records[-1]["kl_v2"] < 5e-3
    assert records[-1]["reverse_kl"] < 4

    assert all(len(row) == options.top_k for example in read_examples(file) for row in example.top_tokens)
    main(replace(options, soft_steps=1, teacher_file=str(file), out=str(tmp_path / "again")))
    repeated = [r for r in read_lines(tmp_path / "again" / "metrics.jsonl") if r["stage"] == "distill"]
    assert repeated[0]["forward_kl"] == pytest.approx(steps[0]["forward_kl"], rel=0.02)


def test_a_student_that_writes_itself_comes_closer_still(teacher: str, tmp_path: Path) -> None:
    main(Options(SMOL, soft_steps=4, policy_steps=5, batch=16, eval_words=16, teacher=teacher, out=str(tmp_path)))
    records = read_lines(tmp_path / "metrics.jsonl")
    assert [r["step"] for r in records if r["stage"] == "distill"] == list(range(9))
    distances = [r["reverse_kl"] for r in records if "reverse_kl" in r]
    assert len(distances) == 6
    assert sum(distances[-2:]) / 2 < distances[0]
    assert (tmp_path / "report.html").exists()

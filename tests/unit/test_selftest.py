"""The self-test's own parts: verdicts, processes that end badly, and what is printed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from contract import table
from openrl.errors import BackendFault, BadRequest, ModelError, SettingsError
from openrl.selftest import hashing, measures, models, process
from openrl.selftest.case import Case, Figures, Outcome, State, run_case
from openrl.selftest.measures import Figure, apart, far, holds
from openrl.selftest.report import FamilyResult, Report, markdown, overview
from openrl.types import DeviceReport, ModelSpec
from openrl.workers.messages import WorkerSpec
from openrl_cli.main import app

WORKER = WorkerSpec(ModelSpec("x", "x"), Path("unused"), "cpu", "float32", 1, 64, 8, 1024)


def _case(name: str, *, optional: bool = False, figures: Sequence[Figure] = (), error: Exception | None = None) -> Case:
    def run(_subject: Any) -> Figures:
        yield from figures
        if error is not None:
            raise error

    return Case(name, f"about {name}", run, optional)


class Nothing:
    """A subject that cases need not look at."""

    cleared = 0

    def clear(self) -> None:
        self.cleared += 1


def verdict(case: Case) -> Outcome:
    subject: Any = Nothing()
    outcome = run_case(case, subject)
    assert subject.cleared == 1
    return outcome


# ---- verdicts ----


def test_a_case_holds_when_all_its_figures_do() -> None:
    good, near, bad = Figure("a", 1e-6, 1e-3), Figure("b", 9e-4, 1e-3), Figure("c", 2e-3, 1e-3)
    assert verdict(_case("x", figures=[good, near])).worst == near
    assert verdict(_case("x", figures=[good, holds("so", True)])).state is State.OK
    failed = verdict(_case("x", figures=[good, bad, holds("not so", False)]))
    assert (failed.state, failed.message) == (State.FAILED, "c: 0.002, at most 0.001; not so: no")
    assert verdict(_case("x")).state is State.FAILED  # nothing was looked at


@pytest.mark.parametrize("found", [float("nan"), float("inf")])
def test_what_is_no_number_is_wrong(found: float) -> None:
    assert verdict(_case("x", figures=[Figure("a", found, 1.0)])).state is State.FAILED


def test_only_what_is_optional_may_be_refused() -> None:
    refusal = BadRequest("We have none.", "Use another.")
    assert verdict(_case("x", optional=True, error=refusal)).state is State.REFUSED
    assert verdict(_case("x", error=refusal)).state is State.FAILED
    broken = verdict(_case("x", optional=True, error=BackendFault("broke.")))
    assert (broken.state, broken.message) == (State.FAILED, "BackendFault: broke.")


def test_shapes_count() -> None:
    limit = measures.tolerance("float32")
    assert not far("x", [np.zeros(3)], [np.zeros(4)], limit)[0].ok
    assert all(figure.ok for figure in far("x", [np.zeros(3), np.ones((2, 2))], [np.zeros(3), np.ones((2, 2))], limit))
    assert np.isnan(apart([np.zeros((2, 1))], [np.zeros(2)]))
    with pytest.raises(ModelError, match="float8"):
        measures.tolerance("float8")


# ---- numbers that must not change ----


def test_hashed_numbers_are_these() -> None:
    """Answers were computed for them: other numbers would make all of them wrong."""
    assert hashing.integers("a", (2, 3), -5, 5).tolist() == [[-3, -3, 0], [3, 2, -1]]
    assert hashing.signs("b", 6).tolist() == [1.0, 1.0, 1.0, -1.0, -1.0, 1.0]


@pytest.mark.parametrize("family", models.FAMILIES)
def test_weights_are_ones_that_bf16_holds(family: str) -> None:
    tensors = dict(models.weights(family))
    for name in ("a", "b", "head"):
        tensors |= models.adapter(name, family)
    for name, tensor in tensors.items():
        assert not (tensor.view(np.uint32) & 0xFFFF).any(), name


# ---- processes ----


@pytest.fixture
def child(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))
    monkeypatch.setattr(process, "CHILD", "support.selftest_child")


def outcomes(families: Sequence[str], names: Sequence[str]) -> Report:
    cases = [_case(name) for name in names]
    report = Report("cpu", cases)
    for news in process.run(WORKER, families, cases):
        process.collect(report, news)
    return report


@pytest.mark.usefixtures("child")
def test_a_crash_fails_its_case_and_no_other() -> None:
    report = outcomes(["llama", "refused", "apart", "qwen3"], ["one", "crash", "two"])
    for family in ("llama", "apart", "qwen3"):
        found = report.families[family].outcomes
        assert [found[name].state for name in ("one", "crash", "two")] == [State.OK, State.FAILED, State.OK]
        assert "exit code 9" in found["crash"].message
    assert report.families["refused"].refusal == "not this one."
    assert not report.ok


@pytest.mark.usefixtures("child")
def test_a_crash_while_a_model_is_opened_costs_that_model() -> None:
    report = outcomes(["deadly", "llama"], ["one"])
    assert "exit code 7" in report.fatal["deadly"]
    assert report.families["llama"].outcomes["one"].state is State.OK
    assert (report.cell("one", "deadly"), report.ok) == ("failed", False)


@pytest.mark.usefixtures("child")
def test_a_hang_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "PATIENCE", 5.0)
    report = outcomes(["llama"], ["hang", "one"])
    assert "nothing was heard for 5 s" in report.families["llama"].outcomes["hang"].message
    assert report.families["llama"].outcomes["one"].state is State.OK


@pytest.mark.usefixtures("child")
def test_all_well() -> None:
    assert outcomes(["llama", "refused", "apart", "qwen3"], ["one", "two"]).ok
    assert not outcomes(["refused"], ["one"]).ok  # nothing was tried


# ---- what is printed ----


def _report() -> Report:
    cases = [_case("one"), _case("two", optional=True)]
    report = Report("mps", cases)
    device = DeviceReport("mlx", "gpu | M9", "bfloat16", 4, 0)
    for family in ("llama", "qwen3"):
        ended = [Outcome("one", State.OK), Outcome("two", State.REFUSED, "We have none.")]
        report.families[family] = FamilyResult(family, device, None, "", {o.case: o for o in ended})
    report.families["qwen3"].outcomes["one"] = Outcome("one", State.FAILED, "loss: 0.5, at most 0.1")
    report.families["qwen3_moe"] = FamilyResult("qwen3_moe", refusal="no mixtures.")
    return report


def test_markdown_has_verdict_machine_table_and_reasons() -> None:
    text = markdown(_report())
    assert text.startswith(
        "### openrl doctor --self-test, backend mps: 1 ok, 1 failed, 2 refused; families refused: qwen3_moe\n"
    )
    assert "- device: gpu | M9 (mlx), bfloat16, 4 threads" in text
    assert "- packages: numpy " in text
    assert "|  | llama | qwen3 | qwen3_moe |\n| --- | --- | --- | --- |\n| about one | ok | failed | – |" in text
    assert "Failed:\n\n- qwen3: about one: loss: 0.5, at most 0.1\n" in text
    assert "Refused:\n\n- qwen3_moe: no mixtures.\n- llama, qwen3: about two: We have none.\n" in text


def test_the_overview_names_families_only_where_they_differ() -> None:
    report = _report()
    text = overview({"mps bfloat16": report}, report.cases)
    cells = table.cells(table.BEGIN + text + table.END)
    assert cells["about one"] == {"mps bfloat16": "ok; failed: qwen3"}
    assert cells["about two"] == {"mps bfloat16": "refused"}
    assert cells[models.FAMILIES["qwen3_moe"].title] == {"mps bfloat16": "refused"}
    assert cells[models.FAMILIES["gemma2"].title] == {"mps bfloat16": "–"}


# ---- the command ----


def test_the_command_tries_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENRL_DATA_DIR", str(tmp_path / "data"))
    written = tmp_path / "report.md"
    arguments = ["--backend", "cpu", "--dtype", "float32", "--family", "llama", "--output", str(written)]
    result = CliRunner().invoke(app, ["doctor", "--self-test", *arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    assert written.read_text().strip() == result.stdout.strip()
    assert "backend cpu" in result.stdout
    assert "0 failed, 0 refused" in result.stdout


def test_the_command_says_what_it_does_not_know() -> None:
    for arguments, words in ((["--family", "gpt9"], "llama"), (["--backend", "remote"], "device of this machine")):
        with pytest.raises(SettingsError, match=words):
            CliRunner().invoke(app, ["doctor", "--self-test", *arguments], catch_exceptions=False)

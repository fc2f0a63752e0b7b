"""One contract: every case of the self-test on every backend that this machine has (docs/backends.md)."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from contract import expect, table
from openrl.errors import ModelError
from openrl.selftest import data, expected, models
from openrl.selftest.case import Case, State, run_case
from openrl.selftest.measures import off, sketch
from openrl.selftest.subject import Subject
from openrl.selftest.suite import CASES
from support.faulty import FAULTS
from support.variants import VARIANTS, Subjects, Variant


def _name(*parts: object) -> str:
    return "-".join(str(getattr(part, "name", part)).replace(" ", "_") for part in parts)


def _marks(variant: Variant, family: str) -> list[pytest.MarkDecorator]:
    slow = [pytest.mark.slow] if (variant.name, family) in SLOW else []
    return [pytest.mark.vllm] if variant.vllm else slow


# What backends refuse. Everything else must be right.
REFUSED_FAMILIES = {"cpu": set[str](), "cuda": set[str](), "mps": {"qwen3_moe"}, "several devices": set[str]()}
REFUSED_FAMILIES |= {"vLLM": {"qwen3_moe"}}
REFUSED_CASES = {"cpu": set[str](), "cuda": set[str](), "mps": {"custom_loss"}, "several devices": {"full_tuning"}}
REFUSED_CASES |= {"vLLM": set[str]()}
REFUSED_OF = {"qwen3_moe": {"full_tuning"}}

AVAILABLE = [variant for variant in VARIANTS if variant.available]
# Tried by `pytest -m slow` and `make backends` alone: what other columns and families have, too.
SLOW = {("cpu bfloat16", "qwen3"), ("cpu bfloat16", "gemma2"), ("mps float32", "qwen3")}
SLOW |= {("mps bfloat16", family) for family in models.FAMILIES}
SLOW |= {("cpu float32, 2 processes", family) for family in models.FAMILIES}
TAKEN = [
    pytest.param(
        variant,
        family,
        case,
        id=_name(variant, family, case),
        marks=_marks(variant, family),
    )
    for variant in AVAILABLE
    for family in models.FAMILIES
    if family not in REFUSED_FAMILIES[variant.kind]
    for case in CASES
]
REFUSED = [
    pytest.param(variant, family, id=_name(variant, family), marks=_marks(variant, family))
    for variant in AVAILABLE
    for family in sorted(REFUSED_FAMILIES[variant.kind])
]
PLAIN = VARIANTS[0]


@pytest.fixture(scope="module")
def subjects(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Subjects]:
    opened = Subjects(tmp_path_factory.mktemp("suite"))
    yield opened
    opened.close()


@pytest.mark.parametrize(("variant", "family", "case"), TAKEN)
def test_contract(variant: Variant, family: str, case: Case, subjects: Subjects) -> None:
    outcome = run_case(case, subjects.get(variant, family))
    refused = _refused(variant, family, case)
    assert outcome.state is (State.REFUSED if refused else State.OK), outcome.message


def _refused(variant: Variant, family: str, case: Case) -> bool:
    return case.name in REFUSED_CASES[variant.kind] | REFUSED_OF.get(family, set())


@pytest.mark.parametrize(("variant", "family"), REFUSED)
def test_what_is_not_supported_is_refused_when_it_is_opened(variant: Variant, family: str, subjects: Subjects) -> None:
    with pytest.raises(ModelError, match=family):
        subjects.get(variant, family)


# ---- the suite can fail ----

FOUND_BY = [
    ("scale 16/r", "logprobs"),
    ("mean", "cross_entropy"),
    ("frozen betas", "optimizer"),
    ("forgotten gradients", "accumulation"),
    ("lost step", "save_load"),
    ("lost step", "resume"),
    ("no unembed adapter", "greedy"),
    ("no unembed adapter", "prompt_logprobs"),
    ("stale prefix cache", "prefix_cache"),
    ("temperature ignored", "temperature"),
    ("top-k ignored", "top_k"),
    ("seed ignored", "seeds"),
    ("raw logprobs", "temperature"),
    ("logprobs after top-p", "top_p"),
    ("logprobs after top-p", "top_k"),
    ("no stop token", "stop_tokens"),
    ("no stop token", "eos"),
    ("no stop token", "stop_strings"),
    ("prompt logprobs off by one", "prompt_logprobs"),
]


@pytest.mark.parametrize(("fault", "name"), FOUND_BY)
def test_a_planted_fault_is_found(fault: str, name: str, subjects: Subjects, tmp_path: Path) -> None:
    """Each on a backend that passes without it (`test_contract`)."""
    good = subjects.get(PLAIN, "llama")
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    bad = FAULTS[fault](replace(good.backend), tmp_path, models.VOCAB)
    subject = Subject("cpu", bad, good.world, good.expected, scratch)
    (case,) = (case for case in CASES if case.name == name)
    outcome = run_case(case, subject)
    assert outcome.state is State.FAILED
    assert outcome.worst is None or outcome.worst.ok or outcome.worst.share > 3  # clearly, if by a figure


def test_every_fault_is_looked_for() -> None:
    assert {fault for fault, _ in FOUND_BY} == set(FAULTS)


def test_a_sketch_tells_the_distance_of_gradients() -> None:
    """To about a tenth of itself, whatever the error looks like."""
    rng = np.random.default_rng(0)
    right = {f"layer {i}": rng.normal(0, 1 + i, (20, 30)) for i in range(40)}
    wanted = sketch(right)
    for error in (1e-4, 1e-2):
        wrong = {name: t + error * rng.normal(0, np.abs(t).mean(), t.shape) for name, t in right.items()}
        gap = math.sqrt(sum(float(np.square(wrong[n] - right[n]).sum()) for n in right))
        size = math.sqrt(sum(float(np.square(t).sum()) for t in right.values()))
        (figure,) = off("gradient", wrong, wanted, 1.0)
        assert figure.found == pytest.approx(gap / size, rel=0.35)


# ---- the answers are current ----


@pytest.fixture(scope="module")
def teachers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, expect.Teacher]:
    root = tmp_path_factory.mktemp("teachers")
    return {family: expect.Teacher(family, root / family) for family in models.FAMILIES}


@pytest.mark.parametrize("family", models.FAMILIES)
def test_expected_logprobs_are_current(family: str, teachers: dict[str, expect.Teacher]) -> None:
    """What `python -m contract.expect` would write, but for what takes long."""
    stored = expected.load()[family]
    for key, value in expect.scores(teachers[family]).items():
        _compare(expect.rounded(value), stored[key], f"{family} {key}")


def test_expected_gradients_are_current(teachers: dict[str, expect.Teacher]) -> None:
    teacher, known = teachers["llama"], expected.of("llama")
    found = {
        "ppo": expect.answer(teacher, data.payload("ppo", known), "a"),
        "weighted head": expect.answer(teacher, data.weighted(), "head"),
    }
    for name, value in found.items():
        _compare(expect.rounded(value), expected.load()["llama"]["losses"][name], name)
    drawn = known.greedy("b")
    ((row, logprobs),) = expect.continuations(teacher, np.array([drawn.prompt]), "b", None)
    assert row.tolist() == drawn.prompt + drawn.tokens
    np.testing.assert_allclose(logprobs, drawn.logprobs, atol=2e-5)


def test_answers_have_all_that_requests_need() -> None:
    for family in models.FAMILIES:
        stored = expected.load()[family]
        assert stored["losses"].keys() >= set(data.LOSSES) | {f"wide {name}" for name in data.WIDE_LOSSES}
        assert expected.of(family).until_eos().tokens[-1] == models.EOS


def _compare(found: object, stored: object, where: str) -> None:
    """Equal but for the last digits, which go by processor: transformers takes some sums in float32."""
    if isinstance(found, dict) and isinstance(stored, dict):
        assert found.keys() == stored.keys(), where
        for key in found:
            _compare(found[key], stored[key], f"{where} {key}")
    elif isinstance(found, list) and isinstance(stored, list):
        assert len(found) == len(stored), where
        for one, other in zip(found, stored, strict=True):
            _compare(one, other, where)
    else:
        assert found == pytest.approx(stored, rel=1e-4, abs=2e-5), where


# ---- the table in docs/backends.md ----


def test_the_table_is_of_this_suite() -> None:
    """Its rows are the suite's cases and families; `make backends` writes it."""
    assert table.titles() == [case.title for case in CASES] + [kind.title for kind in models.FAMILIES.values()]
    assert set(table.columns()) <= {variant.name for variant in VARIANTS}


def test_the_table_says_what_the_tests_say() -> None:
    """Of the backends that both have: what is refused is written down as such, and nothing failed."""
    cells = table.cells()
    for variant in VARIANTS:
        if variant.name not in table.columns():
            continue
        for case in CASES:
            opened = [family for family in models.FAMILIES if family not in REFUSED_FAMILIES[variant.kind]]
            refused = [family for family in opened if _refused(variant, family, case)]
            partly = f"ok; refused: {', '.join(refused)}" if refused else "ok"
            assert cells[case.title][variant.name] == ("refused" if refused == opened else partly)
        for family, kind in models.FAMILIES.items():
            refused = family in REFUSED_FAMILIES[variant.kind]
            assert cells[kind.title][variant.name] == ("refused" if refused else "ok")

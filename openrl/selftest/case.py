"""A case of the suite, and running one."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

from openrl.errors import BadRequest, OpenRLError
from openrl.selftest.measures import Figure
from openrl.selftest.subject import Subject

Figures = Iterator[Figure]


@dataclass(frozen=True, slots=True)
class Case:
    """A part of the contract. `optional`: a backend may refuse it, if it says so; else a refusal is a failure."""

    name: str
    title: str
    run: Callable[[Subject], Figures]
    optional: bool = False


class State(StrEnum):
    OK = "ok"
    FAILED = "failed"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class Outcome:
    """Of one case: `message` says what is wrong or why the backend refuses; `worst` is the figure nearest its limit."""

    case: str
    state: State
    message: str = ""
    worst: Figure | None = None
    seconds: float = 0.0


def run_case(case: Case, subject: Subject) -> Outcome:
    """Run a case to its end. Errors of the backend that are not `OpenRLError`s come through."""
    begun = time.monotonic()
    figures: list[Figure] = []
    try:
        figures.extend(case.run(subject))
    except OpenRLError as error:
        refused = case.optional and isinstance(error, BadRequest) and all(figure.ok for figure in figures)
        state = State.REFUSED if refused else State.FAILED
        return _outcome(case, state, figures, _words(error), begun)
    finally:
        subject.clear()
    right = bool(figures) and all(figure.ok for figure in figures)
    return _outcome(case, State.OK if right else State.FAILED, figures, "", begun)


def _outcome(case: Case, state: State, figures: Sequence[Figure], error: str, begun: float) -> Outcome:
    said = [*(str(figure) for figure in figures if not figure.ok), *([error] if error else [])]
    worst = max(figures, key=lambda figure: figure.share, default=None)
    return Outcome(case.name, state, "; ".join(said), worst, time.monotonic() - begun)


def _words(error: OpenRLError) -> str:
    return str(error) if isinstance(error, BadRequest) else f"{type(error).__name__}: {error}"

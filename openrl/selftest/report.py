"""What came out, as data, and as Markdown for an issue."""

from __future__ import annotations

import importlib.metadata
import platform
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import psutil

from openrl.selftest.case import Case, Outcome, State
from openrl.selftest.models import FAMILIES
from openrl.types import DeviceReport, ModelInfo
from openrl.version import VERSION

_PACKAGES = ("numpy", "torch", "transformers", "mlx", "mlx-lm", "vllm")
_GIB = 1 << 30
_NONE = "–"


@dataclass(slots=True)
class FamilyResult:
    """Of one model family. `refusal` says why the backend does not open it; there are no outcomes then."""

    family: str
    device: DeviceReport | None = None
    info: ModelInfo | None = None
    refusal: str = ""
    outcomes: dict[str, Outcome] = field(default_factory=dict[str, Outcome])

    @property
    def failed(self) -> bool:
        return any(outcome.state is State.FAILED for outcome in self.outcomes.values())


@dataclass(slots=True)
class Report:
    """Of one backend. `fatal`: families that broke while they were opened, which no backend may."""

    backend: str
    cases: Sequence[Case]
    families: dict[str, FamilyResult] = field(default_factory=dict[str, FamilyResult])
    fatal: dict[str, str] = field(default_factory=dict[str, str])

    @property
    def ok(self) -> bool:
        """Whether something was tried, and nothing failed."""
        tried = any(result.outcomes for result in self.families.values())
        return tried and not self.fatal and not any(result.failed for result in self.families.values())

    def count(self, state: State) -> int:
        return sum(o.state is state for result in self.families.values() for o in result.outcomes.values())

    def device(self) -> DeviceReport | None:
        """As the first family that was opened has it."""
        return next((result.device for result in self.families.values() if result.device), None)

    def rows(self) -> list[list[str]]:
        """A row for each case: its title, and a cell for each family."""
        return [[case.title, *(self.cell(case.name, family) for family in self.families)] for case in self.cases]

    def cell(self, case: str, family: str) -> str:
        if family in self.fatal:
            return State.FAILED
        result = self.families[family]
        return result.outcomes[case].state if case in result.outcomes else _NONE

    def notes(self, state: State) -> Iterator[str]:
        """What is to be said about failures or refusals; one line for all families that say the same."""
        if state is State.FAILED:
            yield from (f"{family}: {message}" for family, message in self.fatal.items())
        if state is State.REFUSED:
            yield from _grouped((r.refusal, r.family) for r in self.families.values() if r.refusal)
        titles = {case.name: case.title for case in self.cases}
        yield from _grouped(
            (f"{titles[outcome.case]}: {outcome.message}", result.family)
            for result in self.families.values()
            for outcome in result.outcomes.values()
            if outcome.state is state
        )


def _grouped(pairs: Iterable[tuple[str, str]]) -> Iterator[str]:
    places: dict[str, list[str]] = {}
    for message, family in pairs:
        places.setdefault(message, []).append(family)
    yield from (f"{', '.join(families)}: {message}" for message, families in places.items())


def machine() -> dict[str, str]:
    """What the figures depend on, for someone who has another machine."""
    versions = {name: found for name in _PACKAGES if (found := _version(name))}
    return {
        "OpenRL": VERSION,
        "Python": platform.python_version(),
        "system": platform.platform(),
        "processor": f"{platform.processor() or platform.machine()}, {psutil.cpu_count(logical=False) or '?'} cores",
        "memory": f"{psutil.virtual_memory().total / _GIB:.1f} GiB",
        "packages": ", ".join(f"{name} {version}" for name, version in versions.items()),
    }


def markdown(report: Report) -> str:
    """The report as one pastes it: verdict, machine, table, and what is to be said about its cells."""
    counts = ", ".join(f"{report.count(state)} {state}" for state in State)
    closed = [result.family for result in report.families.values() if result.refusal]
    counts += f"; families refused: {', '.join(closed)}" if closed else ""
    lines = [f"### openrl doctor --self-test, backend {report.backend}: {counts}", ""]
    lines += [f"- {name}: {value}" for name, value in {**machine(), **_device(report)}.items()]
    lines += ["", *table(["", *report.families], report.rows())]
    for state in (State.FAILED, State.REFUSED):
        notes = [f"- {note}" for note in report.notes(state)]
        lines += ["", f"{state.capitalize()}:", "", *notes] if notes else []
    return "\n".join(lines) + "\n"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Lines of a Markdown table."""
    return [_line(head), _line(["---"] * len(head)), *(_line(row) for row in rows)]


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _device(report: Report) -> Mapping[str, str]:
    device = report.device()
    if device is None:
        return {}
    found = {"device": f"{device.device} ({device.backend}), {device.dtype}, {device.threads} threads"}
    return found | ({"sampler": device.sampler} if device.sampler else {})


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


# ---- docs/backends.md ----


def overview(columns: Mapping[str, Report], cases: Sequence[Case]) -> str:
    """Backend by feature by family: for each case a row, for each report a column. A cell names families where they
    differ; those that a backend does not open are in the second table."""
    head = ["", *columns]
    features = [[case.title, *(_summary(report, case.name) for report in columns.values())] for case in cases]
    families = [
        [kind.title, *(_opened(report, name) for report in columns.values())] for name, kind in FAMILIES.items()
    ]
    return "\n".join([*table(head, features), "", *table(head, families)]) + "\n"


def _summary(report: Report, case: str) -> str:
    """What most families have, and which have something else."""
    cells = {name: report.cell(case, name) for name, result in report.families.items() if not result.refusal}
    most, *others = [state for state, _ in Counter(cells.values()).most_common()]
    return "; ".join([most, *(f"{state}: {', '.join(n for n, s in cells.items() if s == state)}" for state in others)])


def _opened(report: Report, family: str) -> str:
    result = report.families.get(family)
    if result is None:
        return _NONE
    if result.refusal:
        return State.REFUSED
    return State.FAILED if result.failed or family in report.fatal else State.OK

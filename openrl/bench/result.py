"""What a benchmark found: rates side by side, and findings that are held against a target."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Rates:
    """Tokens a second by side, one figure a round."""

    name: str
    sides: dict[str, list[float]]

    def median(self, side: str) -> float:
        return statistics.median(self.sides[side])

    def ratio(self, side: str, other: str) -> float:
        """How many times faster `side` is than `other`, by medians."""
        return self.median(side) / self.median(other)


@dataclass(frozen=True, slots=True)
class Finding:
    """One measured figure. `target` None: only reported; `at_most`: smaller is better; `detail`: what lies behind."""

    what: str
    figure: float
    unit: str
    target: float | None = None
    at_most: bool = False
    detail: str = ""

    @property
    def met(self) -> bool | None:
        """Whether the target was reached; None where there is none."""
        if self.target is None:
            return None
        return self.figure <= self.target if self.at_most else self.figure >= self.target


@dataclass(slots=True)
class Result:
    """Everything that one run measured. `setting` says on what: machine, threads, versions, model."""

    setting: dict[str, str]
    rates: list[Rates] = field(default_factory=list["Rates"])
    findings: list[Finding] = field(default_factory=list["Finding"])

    def as_json(self) -> dict[str, Any]:
        """Plain data, with medians spelled out."""
        rates = [{**asdict(r), "medians": {side: r.median(side) for side in r.sides}} for r in self.rates]
        findings = [{**asdict(f), "met": f.met} for f in self.findings]
        return {"setting": self.setting, "tokens_per_second": rates, "findings": findings}


def percentiles(seconds: Sequence[float]) -> tuple[float, float]:
    """p50 and p95 in milliseconds, of at least 20 figures."""
    return 1000 * statistics.median(seconds), 1000 * statistics.quantiles(seconds, n=20)[-1]

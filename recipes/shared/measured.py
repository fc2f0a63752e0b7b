"""A run as its folder tells it: the options, what was measured at which step, and what the model wrote."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from openrl_recipes.shared.folder import CONFIG, METRICS, SAMPLES, Record, read_lines

EVALUATIONS = ("before", "after", "evaluate")
Points = list[tuple[float, float]]


@dataclass(frozen=True)
class Measured:
    """What `config.json`, `metrics.jsonl` and `samples.jsonl` of a run hold."""

    folder: Path
    config: Record
    records: Sequence[Record]
    samples: Sequence[Record]

    @property
    def title(self) -> str:
        """The folder's name; a run of a sweep stands under the sweep's name."""
        path = self.folder.resolve()
        return f"{path.parent.name}, {path.name}" if "=" in path.name else path.name

    @property
    def duration(self) -> float:
        """Seconds of running up to the last record."""
        return max((record["at"] for record in self.records), default=0.0)

    @cached_property
    def positions(self) -> list[int]:
        """For each record: how many training steps of all stages were done by then."""
        return positions(self.records)

    def series(self, metric: str) -> dict[str, Points]:
        """Points (position, value) of a metric, by the training stage in which they were measured."""
        found: dict[str, Points] = {}
        stage = ""
        for record, position in zip(self.records, self.positions, strict=True):
            stage = stage if is_evaluation(record["stage"]) else record["stage"]
            if metric in record and not is_of_another(record["stage"]):
                found.setdefault(stage or record["stage"], []).append((position, float(record[metric])))
        return found

    def values(self, metric: str) -> list[float]:
        """All values of a metric, in order, of the model that the run is about."""
        return [float(r[metric]) for r in self.records if metric in r and not is_of_another(r["stage"])]

    def evaluations(self) -> list[tuple[str, Record]]:
        """The records with a held-out score; an "evaluate" is named after the stage during which it was made."""
        found: list[tuple[str, Record]] = []
        during = ""
        for record in self.records:
            during = during if is_evaluation(record["stage"]) else record["stage"]
            if "held_out" in record:
                found.append((during if record["stage"] == "evaluate" and during else record["stage"], record))
        return found

    def speed(self, counter: str) -> float:
        """Tokens a second over all records that count `counter`: `train_tokens` or `sampled_tokens`; 0 if none does."""
        return speed([record for record in self.records if counter in record], counter)

    def speeds(self, counter: str, window: int = 5) -> dict[str, Points]:
        """Tokens a second over the newest `window` records, at each record that counts `counter`, by training stage."""
        found: dict[str, Points] = {}
        recent: list[Record] = []
        for record, position in zip(self.records, self.positions, strict=True):
            if counter not in record or "seconds" not in record or is_evaluation(record["stage"]):
                continue
            same = [r for r in recent if r["stage"] == record["stage"]]
            recent = [*same[1 - window :], record]
            found.setdefault(record["stage"], []).append((position, speed(recent, counter)))
        return found


def measured(folder: Path) -> Measured:
    """Read a run's folder. A run that goes on, or was killed, is shown as far as it came."""
    file = folder / CONFIG
    config: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    return Measured(folder, config, read_lines(folder / METRICS), read_lines(folder / SAMPLES))


def is_evaluation(stage: str) -> bool:
    """Whether a stage measures and does not train: "before", "evaluate", "after", "after sft"."""
    return stage.startswith(EVALUATIONS)


def is_of_another(stage: str) -> bool:
    """Whether a stage measures another model than the one that the run is about: "evaluate teacher"."""
    return stage.startswith("evaluate ")


def speed(records: Sequence[Record], counter: str) -> float:
    """Tokens a second over records that count `counter`.

    Overlapping records (the next step is sent before the last one ends) share their time: it counts once.
    """
    spans = [(r["at"] - r["seconds"], r["at"], r[counter]) for r in records if "seconds" in r]
    busy, until = 0.0, float("-inf")
    for start, end, _ in sorted(spans):
        busy += max(0.0, end - max(start, until))
        until = max(until, end)
    return sum(tokens for _, _, tokens in spans) / busy if busy else 0.0


def positions(records: Sequence[Record]) -> list[int]:
    """For each record: how many training steps of all stages were done, the record's own step included.

    Stages follow one another in the order of their first records. An evaluation during a stage says after how many
    of the stage's steps it was made; "before" and "after" stand where they are.
    """
    begun: dict[str, int] = {}  # where on the common axis a stage's step 0 lies
    done = start = 0
    found: list[int] = []
    for record in records:
        stage, step = record["stage"], int(record["step"])
        if is_evaluation(stage):
            found.append(min(done, start + step) if stage == "evaluate" else done)
            continue
        start = begun.setdefault(stage, done + 1 - step)
        found.append(start + step)
        done = max(done, found[-1])
    return found

"""What crosses the pipe between `openrl doctor --self-test` and the process that has the backend."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from openrl.errors import OpenRLError
from openrl.selftest.case import Outcome
from openrl.types import DeviceReport, ModelInfo
from openrl.workers.messages import WorkerSpec


@dataclass(frozen=True, slots=True)
class Order:
    """Told once. `worker` is as the daemon would have it, but for the model; `todo` has the cases of each family by
    name, `root` is a folder for all that is written."""

    worker: WorkerSpec
    root: Path
    todo: tuple[tuple[str, tuple[str, ...]], ...]


@dataclass(frozen=True, slots=True)
class Opened:
    family: str
    info: ModelInfo
    device: DeviceReport


@dataclass(frozen=True, slots=True)
class Unopened:
    """The backend does not take the family, or broke."""

    family: str
    error: OpenRLError


@dataclass(frozen=True, slots=True)
class Began:
    family: str
    case: str


@dataclass(frozen=True, slots=True)
class Ended:
    family: str
    outcome: Outcome


News = Opened | Unopened | Began | Ended

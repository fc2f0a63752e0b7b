"""What `openrl.app.serve` tells whoever shows it to a person: plain events, no display code in the server."""

from __future__ import annotations

from dataclasses import dataclass

from openrl.types import DeviceReport


@dataclass(frozen=True, slots=True)
class Listening:
    """Requests are answered from now on; models may still be loading."""

    url: str  # what TINKER_BASE_URL should be


@dataclass(frozen=True, slots=True)
class ModelProgress:
    """A model is being fetched, converted or loaded; `total` None: nobody knows how much there is."""

    name: str  # served name
    stage: str
    done: int
    total: int | None


@dataclass(frozen=True, slots=True)
class ModelReady:
    name: str
    report: DeviceReport
    seconds: float  # since the start of its preparation


@dataclass(frozen=True, slots=True)
class ModelFailed:
    """The model will not be served; `message` says why and what to do."""

    name: str
    message: str


@dataclass(frozen=True, slots=True)
class ModelPostponed:
    """The model does not fit beside those before it: it is loaded on its first use, by turns with them."""

    name: str


@dataclass(frozen=True, slots=True)
class Stopping:
    """The first signal came; running work ends, a second signal ends at once."""


ServeEvent = Listening | ModelProgress | ModelReady | ModelFailed | ModelPostponed | Stopping

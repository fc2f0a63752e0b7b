"""How far the preparation of a model is; crosses the pipe from a worker to the daemon, so plain data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Progress:
    """`stage` is a few words for a person ("downloading"); `total` None means that nobody knows how much there is.

    `done` and `total` count bytes; only their ratio matters.
    """

    stage: str
    done: int
    total: int | None


Report = Callable[[Progress], None]

"""What rank 0 tells the others: pickled dataclasses, between processes of one program.

All ranks carry out the same commands in the same order. Those marked so are answered; in others ranks may meet in
collectives, so none may be left out.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from openrl.backends.base import TrainItem
from openrl.errors import BadRequest, OpenRLError
from openrl.losses import Loss
from openrl.types import AdamParams, FloatArray, LoraSpec, OptimOutput, RunId

# ---- once, at the start ----


@dataclass(frozen=True, slots=True)
class Opening:
    """All that a rank needs to join and to open its part. `device` is its own, `dtype` torch's name of it; the ranks
    meet at `port`."""

    folder: Path
    device: str
    dtype: str
    threads: int
    rank: int
    ranks: int
    port: int
    timeout: float
    max_batch_tokens: int
    name: str  # of the base model, for adapter files


@dataclass(frozen=True, slots=True)
class Layout:
    """What rank 0 will share of the model beside its decoder layers' matrices: shape and dtype by name. `tied`: which
    of them is the output head, too."""

    tensors: dict[str, tuple[tuple[int, ...], str]]
    tied: str | None


# ---- runs: answered ----


@dataclass(frozen=True, slots=True)
class Create:
    """Answered by a `State`."""

    run: RunId
    spec: LoraSpec


@dataclass(frozen=True, slots=True)
class Load:
    """Answered by a `State`."""

    run: RunId
    source: Path
    optimizer: bool


@dataclass(frozen=True, slots=True)
class Step:
    """Answered by a `State`."""

    run: RunId
    adam: AdamParams


@dataclass(frozen=True, slots=True)
class Drop:
    """Not answered."""

    run: RunId


@dataclass(frozen=True, slots=True)
class State:
    """How a run is after a command, to be the same on all ranks: a sum over its weights, and what the command gave."""

    digest: bytes
    result: OptimOutput | OpenRLError | None


# ---- passes, by number ----


@dataclass(frozen=True, slots=True)
class Begin:
    """Answered by the tokens that this rank's part of a micro-batch may hold."""

    number: int
    items: tuple[TrainItem, ...]


@dataclass(frozen=True, slots=True)
class Compute:
    """Answered by a `Part`. `rows` are this rank's datums as (item, index), `items` those that any rank computes.

    `sparing`: memory ran out before, so keep nothing that can be computed again.
    """

    number: int
    rows: tuple[tuple[int, int], ...]
    items: tuple[int, ...]
    backward: bool
    sparing: bool


@dataclass(frozen=True, slots=True)
class Part:
    """Logprobs and losses (without their gradients) of a rank's datums, in the order of `rows`, and the items that
    got a gradient. `full`: memory ran out, and nothing counts."""

    verdicts: tuple[tuple[FloatArray, Loss | BadRequest], ...] = ()
    touched: frozenset[int] = frozenset()
    full: bool = False


@dataclass(frozen=True, slots=True)
class Settle:
    """Not answered: what was computed last counts, or not."""

    number: int
    keep: bool


@dataclass(frozen=True, slots=True)
class Finish:
    """Not answered: these items' gradients are added up over the ranks and go to their runs; those are forgotten."""

    number: int
    give: tuple[int, ...]
    forget: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class End:
    """Not answered: forget a pass."""

    number: int


# ---- the rest: not answered ----


@dataclass(frozen=True, slots=True)
class Fetch:
    """Rank 0 samples and needs a layer; which one follows."""

    layer: int
    following: int | None


@dataclass(frozen=True, slots=True)
class UseThreads:
    threads: int


Command = Create | Load | Step | Drop | Begin | Compute | Settle | Finish | End | Fetch | UseThreads
Answer = State | Part | int | None

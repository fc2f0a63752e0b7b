"""What the HTTP layer and the daemon say to each other: accepted work, and how a request ended.

A module of its own so that `openrl.wire` can make these nouns and `openrl.daemon.daemon` can call `openrl.wire`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from openrl.custom_loss import LossProgram
from openrl.keys.principal import LOCAL_OWNER
from openrl.types import AdamParams, ModelInfo, SessionId, TrainPayload


@dataclass(frozen=True, slots=True)
class Raw:
    """A request body as received, kept so that accepted work can be decoded again after a restart."""

    content_type: str
    body: bytes


@dataclass(frozen=True, slots=True)
class NewSession:
    sdk_version: str
    tags: tuple[str, ...] = ()
    user_metadata: Mapping[str, Any] | None = None
    project_id: str | None = None
    display_name: str | None = None
    owner: str = LOCAL_OWNER


@dataclass(frozen=True, slots=True)
class NewRun:
    """`create_model`. `seed` None: the daemon picks one and stores it. rank <= 0 and illegal flags fail the future."""

    session_id: SessionId
    model_seq_id: int
    base_model: str
    rank: int
    seed: int | None
    train_attn: bool
    train_mlp: bool
    train_unembed: bool
    optimizer: Mapping[str, Any]  # {"type": "adamw"}
    user_metadata: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class SaveState:
    name: str
    overwrite: bool = False
    ttl_seconds: int | None = None
    user_metadata: Mapping[str, str] | None = None


@dataclass(frozen=True, slots=True)
class SaveSampler:
    """`name` None: ephemeral, and the result is a sampling session with number `sampler_seq` (6.7)."""

    name: str | None
    sampler_seq: int | None = None
    ttl_seconds: int | None = None
    user_metadata: Mapping[str, str] | None = None


@dataclass(frozen=True, slots=True)
class SaveExternal:
    """Files to download. With `recipients` (age public keys) only whoever has their private key can read them."""

    name: str
    ttl_seconds: int | None = None
    recipients: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class LoadState:
    """`reader` is whose right to read the checkpoint is used; None: the run's owner's own."""

    path: str
    optimizer: bool
    reader: str | None = None


@dataclass(frozen=True, slots=True)
class Train:
    """`program` is what the payload's `loss_id` names, for the loss_fn "custom"; the daemon puts it in."""

    payload: TrainPayload
    backward: bool
    program: LossProgram | None = None


@dataclass(frozen=True, slots=True)
class OptimStep:
    adam: AdamParams


@dataclass(frozen=True, slots=True)
class Unload:
    pass


Work = Train | OptimStep | SaveState | SaveSampler | SaveExternal | LoadState | Unload


@dataclass(frozen=True, slots=True)
class Finished:
    """A request's end: `content_type` and `body` of a result, or the error that its future carries."""

    content_type: str
    body: bytes
    error: str | None = None
    category: str | None = None


@dataclass(frozen=True, slots=True)
class Pending:
    """Not done yet. `state` is the wire's queue_state; `reason` is shown to the user."""

    state: str
    reason: str


@dataclass(frozen=True, slots=True)
class ModelStatus:
    name: str  # served name; aliases have an entry of their own
    alias_of: str | None
    state: str  # "preparing" | "loading" | "ready" | "failed"
    detail: str
    info: ModelInfo | None  # known once the files are on disk, before the weights are loaded
    tokenizer_id: str  # what a client can hand to AutoTokenizer.from_pretrained


# ---- what is metered ----


@dataclass(frozen=True, slots=True)
class UsageEvent:
    """Use in the hour from `hour` on (seconds since the epoch). `kind` is the wire's: training, sampling_prefill,
    sampling_sample (tokens), checkpoint (a count) or storage (gigabyte hours). `rate` is in USD per million tokens or
    per gigabyte and month of 720 hours, `cost` in USD; both None where there is no price."""

    hour: int
    kind: str
    amount: float
    base_model: str
    project_id: str
    session_id: SessionId | None = None
    rate: float | None = None
    cost: float | None = None
    owner: str = LOCAL_OWNER


@dataclass(frozen=True, slots=True)
class DeviceUse:
    """Seconds of the device in an hour; `activity` is training or sampling."""

    hour: int
    activity: str
    seconds: float
    base_model: str
    session_id: SessionId


@dataclass(frozen=True, slots=True)
class Bill:
    """All use in a window, and the metadata of the sessions that appear in it."""

    events: list[UsageEvent]
    device: list[DeviceUse]
    sessions: Mapping[SessionId, Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class StorageBill:
    """A project's checkpoints now, and what they cost a month of 720 hours."""

    project_id: str
    count: int
    size_bytes: int
    monthly_cost: float
    owner: str = LOCAL_OWNER

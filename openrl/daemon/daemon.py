"""The daemon's face: everything the HTTP layer may ask of it, in typed calls on one event loop."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from openrl.errors import OpenRLError
from openrl.store.records import Checkpoint, Run, Sampler, Session
from openrl.types import (
    AdamParams, LoraSpec, ModelInfo, Op, RequestId, RunId, SamplePayload, SamplerId, SessionId, TrainPayload,
)


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
class LoadState:
    path: str
    optimizer: bool


@dataclass(frozen=True, slots=True)
class Train:
    payload: TrainPayload
    backward: bool


@dataclass(frozen=True, slots=True)
class OptimStep:
    adam: AdamParams


@dataclass(frozen=True, slots=True)
class Unload:
    pass


Work = Train | OptimStep | SaveState | SaveSampler | LoadState | Unload


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


class Daemon:
    """One owner of sessions, runs, samplers, queues and futures. Raises `OpenRLError`s; never hangs a caller."""

    # -- sessions --
    async def create_session(self, new: NewSession, idempotency_key: str | None) -> SessionId: ...
    async def heartbeat(self, session: SessionId) -> None:
        """Raises NotFound, or Gone when the session is finished or expired."""
    async def finish_session(self, session: SessionId, reason: str, detail: str | None) -> None: ...

    # -- models --
    def models(self) -> list[ModelStatus]: ...

    # -- runs --
    async def create_run(self, new: NewRun, raw: Raw) -> RequestId:
        """Accept a create_model, idempotent by (session, model_seq_id). Bad content fails the future.

        Raises NotFound for an unknown session, BadRequest for an unknown base model."""
    def run(self, run: RunId) -> Run:
        """Raises NotFound."""
    async def load_run(self, session: SessionId, model_seq_id: int, load: LoadState, base_model: str | None,
                       user_metadata: Mapping[str, Any], raw: Raw) -> RequestId:
        """The session-addressed `load_weights` (7.3): creates run `{session}:train:{model_seq_id}` from a checkpoint."""
    async def submit(self, run: RunId, seq: int, op: Op, work: Work | OpenRLError, raw: Raw) -> RequestId:
        """Accept one request of a run, idempotent by (run, seq) whatever the body says (4.7).

        `work` may be an error: the request is then stored as failed and uses its seq up (O5, O6). Content is checked
        here too, against the model, and a bad one is stored as failed. Raises only NotFound (unknown run), BadRequest
        (seq < 1) and NotReady (stopping)."""

    # -- samplers --
    async def create_sampler(self, session: SessionId, seq: int, base_model: str | None, model_path: str | None) -> SamplerId: ...
    def sampler(self, sampler: SamplerId) -> Sampler: ...
    async def submit_sample(self, sampler: SamplerId, seq: int, payload: SamplePayload, raw: Raw) -> RequestId:
        """Accept a sample, idempotent by (sampler, seq). Raises BadRequest for bad content, NotFound, Busy, NotReady."""

    # -- futures and checkpoints --
    async def wait(self, request: RequestId, timeout: float) -> Finished | Pending:
        """Wait on an event until the request ends or `timeout` seconds pass. Raises Gone for an unknown id."""
    async def checkpoint(self, path: str) -> Checkpoint:
        """Raises NotFound, BadRequest for a malformed path."""
    def status(self) -> dict[str, Any]:
        """A JSON-ready picture of the server: models, runs, queue, device."""

"""Rows of the store as frozen dataclasses. Times are seconds since the epoch (UTC)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from openrl.keys.principal import LOCAL_OWNER
from openrl.types import CheckpointKind, Op, RequestId, RunId, SamplerId, SessionId, TrainSpec

DEFAULT_PROJECT = "default"  # of sessions that named none


class SessionState(StrEnum):
    ACTIVE = "active"
    FINISHED = "finished"  # the client said so
    EXPIRED = "expired"  # it fell silent


class RunState(StrEnum):
    CREATING = "creating"  # accepted, not yet on a device
    LIVE = "live"
    BROKEN = "broken"  # a request never arrived (O7) or its state could not be recovered
    CLOSED = "closed"  # unloaded by the client


class RequestState(StrEnum):
    QUEUED = "queued"
    DONE = "done"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Session:
    """One SDK client's life, kept alive by heartbeats; owns runs and samplers."""

    id: SessionId
    state: SessionState
    created_at: float
    last_seen: float
    sdk_version: str
    tags: tuple[str, ...]
    user_metadata: Mapping[str, Any]
    project_id: str | None
    display_name: str | None
    finish_reason: str | None = None  # success | errored | interrupted, once FINISHED
    finish_detail: str | None = None
    owner: str = LOCAL_OWNER


@dataclass(frozen=True, slots=True)
class Run:
    """One LoRA adapter, or a whole model, in training (`model_id` on the wire)."""

    id: RunId
    session_id: SessionId
    base_model: str  # the served name as the client gave it (may be an alias)
    spec: TrainSpec
    state: RunState
    user_metadata: Mapping[str, Any]
    created_at: float
    last_request_at: float
    reason: str = ""  # why it is BROKEN
    owner: str = LOCAL_OWNER  # its session's


@dataclass(frozen=True, slots=True)
class Sampler:
    """What a sampling session points at: a base model plus at most one immutable checkpoint."""

    id: SamplerId
    session_id: SessionId
    base_model: str
    model_path: str | None  # tinker:// path, None for the base model
    folder: str | None  # the checkpoint's folder at that time: overwriting the name must not change this sampler
    created_at: float


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """An immutable folder on disk with a `tinker://` address."""

    path: str  # tinker://<run>/<segment>/<name>
    run_id: RunId
    kind: CheckpointKind
    name: str
    folder: str  # relative to the checkpoints folder
    base_model: str
    spec: TrainSpec
    size_bytes: int
    created_at: float
    expires_at: float | None
    user_metadata: Mapping[str, str]
    ephemeral: bool = False
    public: bool = False
    owner: str = LOCAL_OWNER


@dataclass(frozen=True, slots=True)
class StoredRequest:
    """One accepted request. `payload` and `result` are wire bytes; `error` is set when it failed."""

    id: RequestId
    scope: str  # run, sampler or session id
    seq: int
    op: Op
    state: RequestState
    content_type: str
    payload: bytes
    result_type: str | None
    result: bytes | None
    error: str | None
    category: str | None
    accepted_at: float
    done_at: float | None
    dispatched_at: float | None = None  # when it was handed to its worker
    started_at: float | None = None  # when the device began with it


@dataclass(frozen=True, slots=True)
class RequestTimes:
    """A request's life without its bytes; times that it has not reached are None."""

    id: RequestId
    scope: str
    seq: int
    op: Op
    state: RequestState
    error: str | None
    accepted_at: float
    dispatched_at: float | None
    started_at: float | None
    done_at: float | None


@dataclass(frozen=True, slots=True)
class Completion:
    """The end of a sample. `number` counts those of its sampler, from 1 on; `size` is the result's bytes, if any."""

    number: int
    request: RequestId
    failed: bool
    size: int | None


@dataclass(frozen=True, slots=True)
class RunSummary:
    """A run with its newest checkpoint of each kind that can be asked for by name."""

    run: Run
    last_training: Checkpoint | None
    last_sampler: Checkpoint | None


@dataclass(frozen=True, slots=True)
class RunPage:
    runs: list[RunSummary]
    total: int


@dataclass(frozen=True, slots=True)
class SessionFilter:
    """Which sessions to find; None and empty match all.

    `session_id` and `words` (each somewhere in the display name, whatever the case) are alternatives. `statuses` are
    states, FINISHED ones narrowed to the reasons given with it. `metadata` pairs are compared as text. `before` is
    creation time and id of the last session of the page before. `owners` are whose sessions they may be.
    """

    session_id: SessionId | None = None
    words: tuple[str, ...] = ()
    projects: tuple[str, ...] | None = None
    metadata: Mapping[str, str] = field(default_factory=dict[str, str])
    statuses: tuple[tuple[SessionState, tuple[str, ...]], ...] | None = None
    before: tuple[float, str] | None = None
    owners: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True)
class SessionSummary:
    """A session with what its named checkpoints come to."""

    session: Session
    checkpoints: int
    checkpoint_bytes: int


@dataclass(frozen=True, slots=True)
class SessionPage:
    sessions: list[SessionSummary]
    more: bool


@dataclass(frozen=True, slots=True)
class SessionContent:
    """A session with what belongs to it, oldest first."""

    session: Session
    runs: list[RunId]
    samplers: list[SamplerId]


@dataclass(frozen=True, slots=True)
class AuditEntry:
    """What happened, `event` being `<resource>_<action>`; ids that do not apply are None."""

    at: float
    event: str
    session_id: str | None
    run_id: str | None
    path: str | None
    purpose: str | None
    details: Mapping[str, Any]
    owner: str = LOCAL_OWNER  # of what it happened to

"""Answers about what is and was (section 8), from the store's records; and the questions that come with a body."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import AwareDatetime, Field

from openrl.codec import as_text
from openrl.daemon.work import Bill, DeviceUse, StorageBill, UsageEvent
from openrl.store.records import (
    DEFAULT_PROJECT,
    AuditEntry,
    RunPage,
    RunSummary,
    Session,
    SessionContent,
    SessionFilter,
    SessionPage,
    SessionState,
    SessionSummary,
)
from openrl.types import SessionId
from openrl.wire.identity import email, owner_of_urn, user_urn
from openrl.wire.replies import checkpoint, timestamp, training_run

_HOUR = 3600

# ---- questions ----


@dataclass(frozen=True, slots=True)
class OwnerBody:
    type: Literal["own", "accessible", "user"]
    owner_urns: list[str] | None = None

    def owners(self, asking: str) -> tuple[str, ...] | None:
        """Whose sessions are wanted by `asking`; None: all that it may see."""
        match self.type:
            case "own":
                return (asking,)
            case "accessible":
                return None
            case "user":
                return tuple(owner_of_urn(urn) for urn in self.owner_urns or ())


@dataclass(frozen=True, slots=True)
class StatusBody:
    type: Literal["active", "cancelled", "failed", "client_finished"]
    reasons: list[Literal["success", "errored", "interrupted"]] | None = None

    def state(self) -> tuple[SessionState, tuple[str, ...]] | None:
        """None: no session of this server is ever so."""
        match self.type:
            case "active":
                return SessionState.ACTIVE, ()
            case "client_finished":
                return SessionState.FINISHED, tuple(self.reasons or ())
            case _:
                return None


@dataclass(frozen=True, slots=True)
class CursorBody:
    last_created_at: AwareDatetime
    last_session_id: str


@dataclass(frozen=True, slots=True)
class SearchBody:
    session_id: str | None = None
    project_ids: list[str] | None = None
    user_metadata: dict[str, str] | None = None
    display_name: Annotated[str, Field(min_length=1)] | None = None
    owner: OwnerBody | None = None
    statuses: Annotated[list[StatusBody], Field(min_length=1)] | None = None
    limit: Annotated[int, Field(ge=1, le=200)] | None = None
    cursor: CursorBody | None = None

    def to_filter(self, asking: str) -> SessionFilter:
        """What is wanted by the owner `asking`, whose own sessions are meant unless the body says otherwise."""
        return SessionFilter(
            session_id=None if self.session_id is None else SessionId(self.session_id),
            words=tuple((self.display_name or "").split()),
            projects=None if self.project_ids is None else tuple(self.project_ids),
            metadata=self.user_metadata or {},
            statuses=None if self.statuses is None else tuple(s for b in self.statuses if (s := b.state())),
            owners=(self.owner or OwnerBody("own")).owners(asking),
            before=None if (c := self.cursor) is None else (c.last_created_at.timestamp(), c.last_session_id),
        )


@dataclass(frozen=True, slots=True)
class ProjectBody:
    project_id: Annotated[str, Field(min_length=1, max_length=200)]


# ---- runs and sessions ----


def run(summary: RunSummary) -> dict[str, Any]:
    """8.2."""
    answer = training_run(summary.run)
    if summary.last_training is not None:
        answer["last_checkpoint"] = checkpoint(summary.last_training)
    if summary.last_sampler is not None:
        answer["last_sampler_checkpoint"] = checkpoint(summary.last_sampler)
    return answer


def run_page(page: RunPage, limit: int, offset: int) -> dict[str, Any]:
    """E37; without the cursor the SDK refuses the whole (T25)."""
    cursor = {"offset": offset, "limit": limit, "total_count": page.total}
    return {"training_runs": [run(summary) for summary in page.runs], "cursor": cursor}


def session(content: SessionContent) -> dict[str, Any]:
    """8.3."""
    return {
        "training_run_ids": content.runs,
        "sampler_ids": content.samplers,
        **_described(content.session),
    }


def session_page(page: SessionPage) -> dict[str, Any]:
    """8.5. The cursor's time has an offset, which the SDK enforces (T31)."""
    answer: dict[str, Any] = {"sessions": [_summary(summary) for summary in page.sessions]}
    if page.more:
        last = page.sessions[-1].session
        answer["next_cursor"] = {"last_created_at": timestamp(last.created_at), "last_session_id": last.id}
    return answer


def _summary(summary: SessionSummary) -> dict[str, Any]:
    found = summary.session
    answer: dict[str, Any] = {
        "session_id": found.id,
        "created_at": timestamp(found.created_at),
        "owner": user_urn(found.owner),
        "project_id": found.project_id or DEFAULT_PROJECT,
        "checkpoints_count": summary.checkpoints,
        "checkpoint_storage_bytes": summary.checkpoint_bytes,
        **_described(found),
    }
    if (status := _status(found)) is not None:
        answer["status"] = status
    return answer


def _described(found: Session) -> dict[str, Any]:
    answer: dict[str, Any] = {"user_metadata": text_map(found.user_metadata)}
    if found.display_name is not None:
        answer["display_name"] = found.display_name
    return answer


def _status(found: Session) -> dict[str, Any] | None:
    """None for a session that fell silent: it neither finished nor is known to run."""
    if found.state is SessionState.ACTIVE:
        return {"type": "active"}
    if found.state is SessionState.EXPIRED:
        return None
    answer: dict[str, Any] = {"type": "client_finished", "reason": {"type": found.finish_reason or "success"}}
    if found.finish_detail is not None:
        answer["detail"] = found.finish_detail
    return answer


def text_map(metadata: Mapping[str, Any]) -> dict[str, str]:
    """Metadata goes in as any JSON but comes back as strings (T24)."""
    return {key: as_text(value) for key, value in metadata.items()}


# ---- audit and bills ----


def audit_log(entries: Iterable[AuditEntry]) -> dict[str, Any]:
    """8.7."""
    return {"entries": [_audit_entry(entry) for entry in entries]}


def _audit_entry(entry: AuditEntry) -> dict[str, Any]:
    ids = {"session_id": entry.session_id, "model_id": entry.run_id, "tinker_path": entry.path}
    known = {name: value for name, value in {**ids, "purpose": entry.purpose}.items() if value is not None}
    answer = {
        "timestamp": timestamp(entry.at),
        "event": entry.event,
        "event_details": {"user": user_urn(entry.owner), **known, **entry.details},
    }
    if entry.event.startswith("checkpoint_"):
        answer |= {name: known[name] for name in ("model_id", "tinker_path", "purpose") if name in known}
    return answer


def bill(found: Bill) -> dict[str, Any]:
    """8.8. Device seconds have no event type in the SDK, so they stand beside the events."""
    return {
        "data": [_usage_event(event) for event in found.events],
        "sessions": {name: {"user_metadata": text_map(given)} for name, given in found.sessions.items()},
        "device_seconds": [_device_use(use) for use in found.device],
    }


def _usage_event(event: UsageEvent) -> dict[str, Any]:
    info: dict[str, Any] = {"type": event.kind}
    answer: dict[str, Any] = {
        **_bucket(event.hour),
        "base_model": event.base_model,
        "user_id": user_urn(event.owner),
        "user_name": event.owner,
        "project_id": event.project_id,
        "event_info": info,
    }
    if event.session_id is not None:
        answer["session_id"] = event.session_id
    rate_name = "effective_rate_usd_per_million_tokens"
    match event.kind:
        case "storage":
            rate_name = "effective_rate_usd_per_gigabyte_month"
            info["gigabyte_hours"] = event.amount  # `free` is not sent: false is meant, and old SDKs do not know it
        case "checkpoint":
            info["count"] = round(event.amount)
        case "sampling_prefill":
            info |= {"cached": False, "token_count": round(event.amount)}
        case _:
            info["token_count"] = round(event.amount)
    if event.rate is not None:
        answer |= {rate_name: event.rate, "estimated_cost_usd": event.cost}
    return answer


def _device_use(use: DeviceUse) -> dict[str, Any]:
    return {
        **_bucket(use.hour),
        "activity": use.activity,
        "seconds": use.seconds,
        "base_model": use.base_model,
        "session_id": use.session_id,
    }


def _bucket(hour: int) -> dict[str, Any]:
    return {"bucket_start": timestamp(hour), "bucket_end": timestamp(hour + _HOUR)}


def storage(bills: Iterable[StorageBill], rate: float) -> dict[str, Any]:
    """8.8: checkpoints now, by project."""
    return {
        "effective_rate_usd_per_gigabyte_month": rate,
        "data": [
            {
                "project_id": row.project_id,
                "org_user_urn": user_urn(row.owner),
                "user_email": email(row.owner),
                "user_name": row.owner,
                "checkpoint_count": row.count,
                "size_bytes": row.size_bytes,
                "size_gigabytes": row.size_bytes / 1e9,
                "estimated_monthly_cost_usd": row.monthly_cost,
            }
            for row in bills
        ],
    }

"""The audit log and metered use (8.7, 8.8)."""

from __future__ import annotations

import asyncio
from datetime import UTC, date, datetime

from starlette.requests import Request
from starlette.responses import Response

from openrl.errors import BadRequest
from openrl.server.errors import json_response
from openrl.server.requests import daemon_of, query_choice
from openrl.wire import records

EVENT_TYPES = ("all", "checkpoints", "projects", "teams", "organizations")


async def audit(request: Request) -> Response:
    """One UTC day. Teams and organizations have no events on a server of one user."""
    kind = query_choice(request, "event_type", EVENT_TYPES)
    resource = None if kind == "all" else kind.removesuffix("s")
    entries = await daemon_of(request).rest.audit(resource, _day(request))
    return json_response(records.audit_log(entries))


async def usage_events(request: Request) -> Response:
    start, end = _time(request, "starting_on"), _time(request, "ending_before")
    found = await daemon_of(request).rest.bill(start, end)
    return await asyncio.to_thread(lambda: json_response(records.bill(found)))


async def checkpoint_storage(request: Request) -> Response:
    rest = daemon_of(request).rest
    found = await rest.storage(request.query_params.get("project_id"))
    return json_response(records.storage(found, rest.prices.price_storage))


def _day(request: Request) -> date | None:
    given = request.query_params.get("day")
    try:
        return None if given is None else date.fromisoformat(given)
    except ValueError:
        raise BadRequest(f"day must be a date such as 2026-07-13, got {given!r}") from None


def _time(request: Request, name: str) -> datetime:
    """An RFC 3339 time; one without offset counts as UTC."""
    given = request.query_params.get(name, "")
    try:
        value = datetime.fromisoformat(given)
    except ValueError:
        raise BadRequest(f"{name} must be a time such as 2026-07-13T00:00:00Z, got {given!r}") from None
    return value if value.tzinfo is not None else value.replace(tzinfo=UTC)

"""Sessions: one SDK client's life."""

from __future__ import annotations

import asyncio
import time

from starlette.requests import Request
from starlette.responses import Response

from openrl.server.errors import json_response
from openrl.server.requests import bare_daemon, check_scope, daemon_of, page_of, principal_of, read_json
from openrl.server.signing import SIGNED, signed_url
from openrl.types import SessionId
from openrl.wire import records
from openrl.wire.messages import CreateSessionBody, FinishReason, FinishSessionBody, SessionBody
from openrl.wire.trace import session_trace

TRACE_SECONDS = 3600.0  # how long the URL of a trace stays good
DEFAULT_SEARCH = 50


async def create_session(request: Request) -> Response:
    body = await read_json(request, CreateSessionBody)
    session = await daemon_of(request).create_session(body.to_new(), request.headers.get("x-idempotency-key"))
    return json_response({"type": "create_session", "session_id": session})


async def session_heartbeat(request: Request) -> Response:
    """410 once the session is finished: the SDK's loop then ends quietly."""
    body = await read_json(request, SessionBody)
    await daemon_of(request).heartbeat(SessionId(body.session_id))
    return json_response({"type": "session_heartbeat"})


async def finish_session(request: Request) -> Response:
    body = await read_json(request, FinishSessionBody)
    reason = (body.reason or FinishReason()).type
    await daemon_of(request).finish_session(_session(request), reason, body.detail)
    return json_response({})


async def list_sessions(request: Request) -> Response:
    limit, offset = page_of(request)
    found = await daemon_of(request).rest.sessions(limit, offset, everyone=check_scope(request))
    return json_response({"sessions": found})


async def get_session(request: Request) -> Response:
    check_scope(request)
    return json_response(records.session(await daemon_of(request).rest.session(_session(request))))


async def search_sessions(request: Request) -> Response:
    body = await read_json(request, records.SearchBody)
    wanted = body.to_filter(principal_of(request).owner)
    page = await daemon_of(request).rest.search(wanted, body.limit or DEFAULT_SEARCH)
    return json_response(records.session_page(page))


async def assign_project(request: Request) -> Response:
    body = await read_json(request, records.ProjectBody)
    await daemon_of(request).rest.assign_project(_session(request), body.project_id)
    return json_response({})


async def trace_export(request: Request) -> Response:
    """Ready at once: the file is made from the request rows when it is fetched."""
    session = _session(request)
    await daemon_of(request).rest.session(session)
    return json_response({"status": "ready", "url": signed_url(request, f"{SIGNED}traces/{session}", TRACE_SECONDS)})


async def trace_file(request: Request) -> Response:
    """Behind a signed URL."""
    session = _session(request)
    requests = await bare_daemon(request).rest.trace(session)
    content = await asyncio.to_thread(session_trace, session, requests, time.time())
    headers = {"content-disposition": f'attachment; filename="{session}.pftrace"'}
    return Response(content, headers=headers, media_type="application/json")


def _session(request: Request) -> SessionId:
    return SessionId(request.path_params["session"])

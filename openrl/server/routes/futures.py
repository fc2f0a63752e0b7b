"""Futures: the long poll for one request's result, the long poll for news of many, and giving a request up.

`retrieve_future` answers 200, 408 (not done yet) or 410 (unknown or expired) and nothing else of its own: failures of
the work are 200 with `error` (4.4).
"""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from openrl.daemon.work import Finished, Pending
from openrl.server.errors import json_response
from openrl.server.middleware import CLIENT_CLOSED
from openrl.server.requests import daemon_of, off_loop, read_json, settings_of, until_disconnect
from openrl.types import RequestId, SamplerId
from openrl.wire import replies
from openrl.wire.bodies import negotiate
from openrl.wire.messages import RetrieveFutureBody, RetrieveFuturesBody


async def retrieve_future(request: Request) -> Response:
    body = await read_json(request, RetrieveFutureBody)
    request_id = RequestId(body.request_id)
    waiting = daemon_of(request).wait(request_id, settings_of(request).long_poll_seconds)
    outcome = await until_disconnect(request, waiting)
    if outcome is None:
        return Response(status_code=CLIENT_CLOSED)  # nobody is there to read it
    if isinstance(outcome, Pending):
        return json_response(replies.try_again(request_id, outcome), 408)
    return await _finished(outcome, request.headers.get("accept", ""))


async def retrieve_futures(request: Request) -> Response:
    """What ended among the samples of one client (4.5). `timeout` 0 is answered at once (T42)."""
    body = await read_json(request, RetrieveFuturesBody)
    sampler = SamplerId(body.target.sampling_session_id)
    clients, cursor = daemon_of(request).clients, body.prev_cursor or 0
    await clients.retrieved(sampler, [RequestId(entry) for entry in body.retrieved_request_ids or ()])
    longest = settings_of(request).long_poll_seconds
    timeout = longest if body.timeout is None else min(max(body.timeout, 0.0), longest)
    news = clients.completions(sampler, body.target.cloned_sampler_id or 0, cursor, timeout)
    ended = await until_disconnect(request, news)
    if ended is None:
        return Response(status_code=CLIENT_CLOSED)
    return json_response(replies.completions(ended, cursor))


async def cancel_future(request: Request) -> Response:
    """200 for whatever id (4.6)."""
    body = await read_json(request, RetrieveFutureBody)
    await daemon_of(request).clients.cancel(RequestId(body.request_id))
    return json_response({})


async def _finished(outcome: Finished, accept: str) -> Response:
    if outcome.error is not None:
        return json_response({"error": outcome.error, "category": outcome.category or "unknown"})
    stored = outcome.content_type, outcome.body
    content_type, body = await off_loop(len(outcome.body), negotiate, *stored, accept)
    return Response(body, media_type=content_type)

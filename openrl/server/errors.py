"""Errors -> HTTP answers, in one table. What the SDK does with a status decides it (tinker-protocol 1.8 and 11.2).

Never 409, which the SDK repeats for five minutes, and never 402, for which it waits up to an hour.
"""

from __future__ import annotations

from collections.abc import Mapping

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from openrl.codec import encode_json
from openrl.errors import (
    BadRequest,
    Busy,
    Conflict,
    Forbidden,
    Gone,
    InvalidToken,
    ModelError,
    NotFound,
    NotReady,
    OpenRLError,
    TooLarge,
    TooSlow,
    Unauthorized,
)

# The first class along an error's ancestors counts; what is not listed is ours to repair: 500.
STATUS: Mapping[type[OpenRLError], int] = {
    BadRequest: 400,
    Conflict: 400,
    ModelError: 400,
    Unauthorized: 401,
    Forbidden: 403,
    NotFound: 404,
    TooSlow: 408,
    Gone: 410,
    TooLarge: 413,
    Busy: 429,
    NotReady: 503,
}
RETRY_AFTER_SECONDS: Mapping[int, int] = {429: 1, 503: 2}


def status_of(error: OpenRLError) -> int:
    return next((STATUS[kind] for kind in type(error).__mro__ if kind in STATUS), 500)


def json_response(content: object, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """JSON with a Content-Length, without which the SDK takes a 400 for a proxy's and repeats the call (T3)."""
    return Response(encode_json(content), status, dict(headers or {}), media_type="application/json")


def refusal(detail: str, status: int, headers: Mapping[str, str] | None = None) -> Response:
    retry = RETRY_AFTER_SECONDS.get(status)
    more = {"retry-after": str(retry)} if retry else {}
    return json_response({"detail": detail}, status, {**more, **(headers or {})})


async def on_openrl_error(request: Request, error: Exception) -> Response:
    """Starlette's handler for every `OpenRLError` that a route raises."""
    assert isinstance(error, OpenRLError)
    if isinstance(error, Unauthorized):
        return unauthorized(error)
    return refusal(str(error), status_of(error))


def unauthorized(error: Unauthorized) -> Response:
    """A 401; of a token one that makes the SDK exchange its key for a new one and repeat the call (T45)."""
    invalid = {"www-authenticate": 'Bearer error="invalid_token"'} if isinstance(error, InvalidToken) else None
    return refusal(str(error), 401, invalid)


async def on_http_exception(request: Request, error: Exception) -> Response:
    """Unknown routes and methods, which starlette itself raises."""
    assert isinstance(error, HTTPException)
    return refusal(f"{error.detail}: {request.method} {request.url.path}", error.status_code)

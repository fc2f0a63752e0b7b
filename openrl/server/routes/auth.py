"""Tokens and what the server says of the key that it was called with (2.9, 2.10)."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from openrl.server.credentials import Credentials
from openrl.server.errors import json_response, refusal
from openrl.wire.identity import EMAIL, ORGANIZATION

_KEY_ID = 1  # this server has one


async def token(request: Request) -> Response:
    """A token for a key, or for a token that is still good."""
    credentials: Credentials = request.app.state.credentials
    return json_response({"jwt": credentials.issue()})


async def show_key(request: Request) -> Response:
    """`tinker auth login` stores the key once this answers."""
    return json_response(
        {
            "key_id": _KEY_ID,
            "name": "openrl",
            "note": "The key of this OpenRL server; it is kept in its data folder.",
            "details": {"org_details": {"name": ORGANIZATION}, "user_details": {"email": EMAIL}},
        }
    )


async def delete_key(request: Request) -> Response:
    """Refused: the SDK asks only for keys that a CLI made for itself, and this server makes none."""
    return refusal(
        "this is the server's own key and other clients use it; to replace it, remove api_key from the server's data "
        "folder and start the server again",
        403,
    )

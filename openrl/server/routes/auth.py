"""Tokens and what the server says of the key that it was called with (2.9, 2.10)."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from openrl.server.errors import json_response, refusal
from openrl.server.requests import credentials_of, principal_of
from openrl.wire.identity import ORGANIZATION, email

_LAST_KEY_ID = 1 << 53  # a number that every JSON reader holds


async def token(request: Request) -> Response:
    """A token for a key, or for a token that is still good."""
    return json_response({"jwt": credentials_of(request).issue(principal_of(request))})


async def show_key(request: Request) -> Response:
    """`tinker auth login` stores the key once this answers."""
    principal = principal_of(request)
    return json_response(
        {
            "key_id": int(principal.key or "1", 16) % _LAST_KEY_ID,
            "name": f"openrl {principal.key}".rstrip(),
            "note": "A key of this OpenRL server.",
            "scopes": sorted(principal.scopes),
            "details": {"org_details": {"name": ORGANIZATION}, "user_details": {"email": email(principal.owner)}},
        }
    )


async def delete_key(request: Request) -> Response:
    """Refused: the SDK asks only for keys that a CLI made for itself, and none is made so here."""
    return refusal(
        "keys end where they were made: `openrl keys revoke ID`, or the server's keys file; to replace the machine's "
        "own, remove api_key from the server's data folder and start the server again",
        403,
    )

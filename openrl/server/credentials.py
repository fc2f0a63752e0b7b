"""What opens the server: its API key, or a token (JWT) that it gave out for one (tinker-protocol 2.9).

Tokens are signed with a key made from the server's secret and the API key: a new API key ends the old one's tokens.
Only our own form of JWT is read, so the header's `alg` is never trusted.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import time
from dataclasses import dataclass

from openrl.codec import decode_json, encode_json
from openrl.errors import BadRequest, Unauthorized
from openrl.wire.identity import EMAIL, ORGANIZATION, USER

TOKEN_SECONDS = 24 * 3600  # the client exchanges at half of it; a short life would cost an exchange a call (T44)

_HEADER = {"alg": "HS256", "typ": "JWT"}


class InvalidToken(Unauthorized):
    """A token that has expired or is not this server's: the client should exchange its key for a new one (T45)."""


@dataclass(frozen=True, slots=True)
class _Claims:
    exp: float


class Credentials:
    """Checks what clients send as `X-API-Key`; an empty `api_key` accepts anything."""

    def __init__(self, api_key: str, secret: bytes) -> None:
        self._key = api_key.encode()
        self._token_key = hmac.digest(secret, b"token:" + self._key, hashlib.sha256)

    def check(self, given: str | None) -> None:
        """Raises Unauthorized, or InvalidToken for a token, if `given` does not open the server."""
        if not self._key:
            return
        if given is None:
            raise Unauthorized("X-API-Key is missing;", "export the TINKER_API_KEY that `openrl serve` prints")
        if hmac.compare_digest(given.encode(), self._key):
            return
        if given.startswith("eyJ"):
            self._check_token(given)
            return
        raise Unauthorized("the API key is not this server's;", "export the TINKER_API_KEY that `openrl serve` prints")

    def issue(self, lifetime_s: float = TOKEN_SECONDS) -> str:
        """A token that opens the server for `lifetime_s` seconds, with the claims that the SDK reads."""
        now = int(time.time())
        claims = {
            "iss": "openrl",
            "iat": now,
            "exp": now + lifetime_s,
            "sub": USER,
            "org_id": ORGANIZATION,
            "email": EMAIL,
        }
        signed = f"{_encode(encode_json(_HEADER))}.{_encode(encode_json(claims))}"
        return f"{signed}.{self._signature(signed)}"

    def _check_token(self, token: str) -> None:
        signed, _, signature = token.rpartition(".")
        if not hmac.compare_digest(self._signature(signed).encode(), signature.encode()):
            raise InvalidToken("the token is not this server's;", "exchange the API key for a new one")
        if time.time() >= _expiry(signed):
            raise InvalidToken("the token has expired;", "exchange the API key for a new one")

    def _signature(self, signed: str) -> str:
        return _encode(hmac.digest(self._token_key, signed.encode(), hashlib.sha256))


def _expiry(signed: str) -> float:
    payload = signed.partition(".")[2]
    try:
        return decode_json(_Claims, base64.urlsafe_b64decode(payload + "=" * (-len(payload) % 4))).exp
    except (BadRequest, ValueError):
        return 0.0


def _encode(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()

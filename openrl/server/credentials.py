"""What opens the server: an API key, or a token (JWT) that it gave out for one (tinker-protocol 2.9).

A token names its key and is signed with a secret made from the server's and that key's hash. So it is good as long as
its key: a token of a key that was revoked, has expired or was replaced ends with it. Only our own form of JWT is read,
so the header's `alg` is never trusted.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import time
from dataclasses import dataclass

from openrl.codec import decode_json, encode_json
from openrl.errors import BadRequest, InvalidToken, Unauthorized
from openrl.keys.key import Key
from openrl.keys.principal import LOCAL, Principal
from openrl.keys.ring import Keyring
from openrl.wire.identity import ORGANIZATION, email, user_urn

TOKEN_SECONDS = 24 * 3600  # the client exchanges at half of it; a short life would cost an exchange a call (T44)

_HEADER = {"alg": "HS256", "typ": "JWT"}
_EXCHANGE = "exchange the API key for a new one"
_HINT = "export the TINKER_API_KEY that `openrl serve` prints, or one made by `openrl keys create`"


@dataclass(frozen=True, slots=True)
class _Claims:
    exp: float
    key: str = ""


class Credentials:
    """Checks what clients send as `X-API-Key`. With `required` False anything is fine, and everybody is the machine."""

    def __init__(self, ring: Keyring, secret: bytes, *, required: bool = True) -> None:
        self.ring = ring
        self._secret = secret
        self._required = required

    def principal(self, given: str | None) -> Principal:
        """Whom a credential is of. Raises Unauthorized, or InvalidToken for a token, if it does not open the server."""
        if not self._required:
            return LOCAL
        if given is None:
            raise Unauthorized("X-API-Key is missing;", _HINT)
        if given.startswith("eyJ"):
            return self._key_of(given).principal
        key = self.ring.open(given)
        if key is None:
            raise Unauthorized("the API key is not this server's, or has expired or been revoked;", _HINT)
        return key.principal

    def issue(self, principal: Principal, lifetime_s: float = TOKEN_SECONDS) -> str:
        """A token that stands for a principal's key for `lifetime_s` seconds, with the claims that the SDK reads."""
        now = int(time.time())
        claims = {
            "iss": "openrl",
            "iat": now,
            "exp": now + lifetime_s,
            "sub": user_urn(principal.owner),
            "org_id": ORGANIZATION,
            "email": email(principal.owner),
            "key": principal.key,
        }
        key = self.ring.find(principal.key)
        signed = f"{_encode(encode_json(_HEADER))}.{_encode(encode_json(claims))}"
        return f"{signed}.{self._signature(signed, '' if key is None else key.digest)}"

    def _key_of(self, token: str) -> Key:
        signed, _, signature = token.rpartition(".")
        claims = _claims(signed)
        key = self.ring.find(claims.key)
        right = self._signature(signed, key.digest if key is not None else "-")
        if not hmac.compare_digest(right.encode(), signature.encode()) or key is None:
            raise InvalidToken("the token is not this server's, or its key is good no more;", _EXCHANGE)
        if time.time() >= claims.exp:
            raise InvalidToken("the token has expired;", _EXCHANGE)
        return key

    def _signature(self, signed: str, digest: str) -> str:
        token_key = hmac.digest(self._secret, f"token:{digest}".encode(), hashlib.sha256)
        return _encode(hmac.digest(token_key, signed.encode(), hashlib.sha256))


def _claims(signed: str) -> _Claims:
    """The middle part of a token, before anything of it is trusted."""
    payload = signed.partition(".")[2]
    try:
        return decode_json(_Claims, base64.urlsafe_b64decode(payload + "=" * (-len(payload) % 4)))
    except (BadRequest, ValueError):
        return _Claims(0.0)


def _encode(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()

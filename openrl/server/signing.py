"""Signed URLs: a path and an expiry under an HMAC, so that a plain download needs no key (tinker-protocol 1.2, T46).

The middleware checks the signature of everything below `/signed/`, and that the key which the URL was made for is still
good; routes there need no check of their own.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import time
from pathlib import Path
from urllib.parse import parse_qs, quote, urlencode

from starlette.requests import Request

from openrl.errors import SettingsError
from openrl.keys.principal import Principal
from openrl.private_file import make_once

SIGNED = "/signed/"  # every path below it is served to whoever has a valid signature for it

_FILE = "signing_key"
_BYTES = 32


def signing_key(data_dir: Path) -> bytes:
    """The secret in `<data_dir>/signing_key`, made if it is missing. Raises SettingsError if it is not one."""
    path = data_dir / _FILE
    make_once(path, secrets.token_hex(_BYTES) + "\n")
    try:
        key = bytes.fromhex(path.read_text().strip())
    except ValueError:
        key = b""
    if len(key) != _BYTES:
        raise SettingsError(f"{path} does not hold a signing key.", "Remove the file to get a new one.")
    return key


class Signer:
    """Signs and checks paths. `path` is always the decoded one, without query."""

    def __init__(self, key: bytes) -> None:
        self._key = hmac.digest(key, b"url", hashlib.sha256)  # apart from what else the same secret is used for

    def sign(self, path: str, lifetime_s: float, key: str = "") -> str:
        """The query string that opens `path` for `lifetime_s` seconds from now; `key` is the id of whose key asked."""
        expires = int(time.time() + lifetime_s)
        named = {"key": key} if key else {}
        return urlencode({"expires": expires, **named, "signature": self._signature(path, expires, key)})

    def check(self, path: str, query: str) -> bool:
        """Whether a query string opens `path` now; takes the same time however much of a signature is right."""
        given = parse_qs(query)
        expires, signature = given.get("expires", [""])[0], given.get("signature", [""])[0]
        key = given.get("key", [""])[0]
        if not (expires.isascii() and expires.isdecimal() and len(expires) <= 15):
            return False
        right = hmac.compare_digest(self._signature(path, int(expires), key).encode(), signature.encode())
        return right and time.time() < int(expires)

    def _signature(self, path: str, expires: int, key: str) -> str:
        return hmac.new(self._key, f"{expires}\n{key}\n{path}".encode(), hashlib.sha256).hexdigest()


def key_in(query: str) -> str:
    """The id of the key that a signed URL was made for; empty if it needed none."""
    return parse_qs(query).get("key", [""])[0]


def signer_of(request: Request) -> Signer:
    return request.app.state.signer


def signed_url(request: Request, path: str, lifetime_s: float) -> str:
    """The absolute URL of a path below `/signed/` as this client reaches the server, with its permission in it."""
    base = str(request.base_url).rstrip("/")
    principal: Principal = request.state.principal
    return f"{base}{quote(path)}?{signer_of(request).sign(path, lifetime_s, principal.key)}"

"""Which headers cross, in either direction, and which URLs in answers lead back through us."""

from __future__ import annotations

from collections.abc import Iterable
from urllib.parse import urlsplit, urlunsplit

from openrl.backends.remote.calls import Headers

FILES = "/remote-files/"  # below it, signed URLs of a remote: /remote-files/NAME/signed/...
SIGNED = "/signed/"

# Those of one connection; those that the client of the next hop sets itself; and what was meant for us alone: our key,
# cookies and the origin of a page, which we have checked already.
_NOT_SENT_ON = frozenset(
    {
        b"connection",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
        b"expect",
        b"host",
        b"content-length",
        b"x-api-key",
        b"authorization",
        b"cookie",
        b"origin",
        b"referer",
    }
)
_NOT_SENT_BACK = frozenset(
    {
        b"connection",
        b"keep-alive",
        b"proxy-authenticate",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
        b"content-length",
        b"date",
        b"server",
        b"set-cookie",
        b"x-request-id",
        b"x-openrl-boot",
    }
)


def onward(headers: Iterable[tuple[bytes, bytes]]) -> Headers:
    """A request's headers for the next hop; length, host and key are added there."""
    return tuple((name, value) for name, value in headers if name not in _NOT_SENT_ON)


def back(headers: Iterable[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """An answer's headers for the client, names in lower case; the length is added where it is known."""
    lowered = ((name.lower(), value) for name, value in headers)
    return [(name, value) for name, value in lowered if name not in _NOT_SENT_BACK]


def through_us(url: str, remote_url: str, name: str, own_base: str) -> str:
    """A signed URL of the remote as this server's, since the client may not reach the remote itself. Any other URL
    (an object store's) stays as it is.

    Only host and path are compared: behind a proxy that ends TLS, the remote calls itself http.
    """
    given, remote = urlsplit(url), urlsplit(remote_url)
    where = given.path.find(SIGNED)
    if given.hostname != remote.hostname or where < 0 or given.path[:where] not in ("", remote.path.rstrip("/")):
        return url
    own = urlsplit(own_base)
    path = f"{own.path.rstrip('/')}{FILES}{name}{given.path[where:]}"
    return urlunsplit((own.scheme, own.netloc, path, given.query, ""))

"""Pools of connections to a remote as they should be: noticed by the kernel when the other side is gone, through the
proxy that the machine prescribes, and trusting the certificates that the user named."""

from __future__ import annotations

import logging
import socket
import ssl
import urllib.request
from functools import lru_cache
from pathlib import Path
from typing import Protocol
from urllib.parse import urlsplit

import httpcore

from openrl.backends.remote.streams import Streams
from openrl.errors import SettingsError

_SILENT_S, _BETWEEN_S, _PROBES = 10, 3, 3  # after this much silence the kernel asks, and gives up after three probes
_UNANSWERED_MS = 15_000  # how long sent bytes may stay unacknowledged
_IDLE_S = 30.0  # shorter than what servers and gateways allow: they close at 60 s or more
_MAX_IDLE = 64


class Pool(Protocol):
    """What is needed of a client: one request, one answer."""

    async def handle_async_request(self, request: httpcore.Request) -> httpcore.Response: ...

    async def aclose(self) -> None: ...


def pool(base_url: str, ca_file: Path | None, *, keep: bool = True) -> Pool:
    """HTTP/1.1 connections without an upper bound: what may be under way at once is not decided here.

    `keep` False: a new connection for each call. Raises SettingsError for a `ca_file` that holds no certificates.
    """
    logging.getLogger("httpcore").setLevel(logging.INFO)  # below that it logs each step of each call, with headers
    proxy = _proxy(base_url)
    return httpcore.AsyncConnectionPool(
        ssl_context=_trust(ca_file) if base_url.startswith("https:") else None,
        proxy=None if proxy is None else httpcore.Proxy(proxy),
        max_connections=None,
        max_keepalive_connections=_MAX_IDLE if keep else 0,
        keepalive_expiry=_IDLE_S,
        network_backend=Streams(),
        socket_options=_options(),
    )


@lru_cache(maxsize=16)
def _trust(ca_file: Path | None) -> ssl.SSLContext:
    """Reading certificates takes 20 ms, so it is done once."""
    try:
        return ssl.create_default_context(cafile=None if ca_file is None else str(ca_file))
    except (OSError, ssl.SSLError) as error:
        raise SettingsError(f"{ca_file} holds no certificates: {error}.", "It must be a PEM file.") from None


def _proxy(base_url: str) -> str | None:
    """The proxy for a URL by the machine's rules (HTTPS_PROXY, NO_PROXY and what the system has), if any."""
    parts = urlsplit(base_url)
    if urllib.request.proxy_bypass(parts.netloc):
        return None
    return urllib.request.getproxies().get(parts.scheme)


def _options() -> list[tuple[int, int, int]]:
    """TCP keepalive, by the names of whichever platform this is."""
    options = [(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1), (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)]
    wanted = {
        "TCP_KEEPIDLE": _SILENT_S,
        "TCP_KEEPALIVE": _SILENT_S,  # macOS's name for the same
        "TCP_KEEPINTVL": _BETWEEN_S,
        "TCP_KEEPCNT": _PROBES,
        "TCP_USER_TIMEOUT": _UNANSWERED_MS,
    }
    known = ((getattr(socket, name, None), value) for name, value in wanted.items())
    options += [(socket.IPPROTO_TCP, name, value) for name, value in known if name is not None]
    return options

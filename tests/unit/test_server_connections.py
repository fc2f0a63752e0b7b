"""Clients that ask too much patience of the server, over raw sockets, with both of uvicorn's protocols."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest
import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from openrl.server import connections
from openrl.server.app import create_app, limits_of
from openrl.server.connections import patient
from openrl.settings import ServerSettings
from support.fake_daemon import FakeDaemon, server_settings
from support.http import KEY


@pytest.fixture(autouse=True, params=["auto", "h11"])
def protocol(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where httptools is installed, uvicorn takes it; else h11. Ours has to hold with both."""
    if request.param == "h11":
        monkeypatch.setattr(connections, "AutoHTTPProtocol", H11Protocol)


@contextmanager
def held_to(**limits: float) -> Iterator[int]:
    """A real server with tight limits; yields its port."""
    tight = {"head_seconds": 0.6, "body_seconds": 0.8, "send_seconds": 0.8, "max_head_bytes": 4096}
    settings = server_settings(**{**tight, **limits})
    with serving_to(create_app(FakeDaemon().as_daemon, settings, KEY), settings) as port:
        yield port


@contextmanager
def serving_to(app: ASGIApp, settings: ServerSettings) -> Iterator[int]:
    listener = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(
        app,
        http=patient(limits_of(settings)),
        h11_max_incomplete_event_size=settings.max_head_bytes,
        log_config=None,
        access_log=False,
        timeout_graceful_shutdown=1,
        lifespan="off",
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    try:
        yield listener.getsockname()[1]
    finally:
        server.should_exit = True
        thread.join(10)
        listener.close()


def connect(port: int) -> socket.socket:
    client = socket.create_connection(("127.0.0.1", port))
    client.settimeout(10)
    return client


def until_closed(client: socket.socket, trickle: bytes = b"") -> tuple[float, bytes]:
    """Seconds until the server ends the connection, and what it sent; `trickle` is sent a byte at a time meanwhile."""
    began, got, left = time.monotonic(), b"", list(trickle)
    client.settimeout(0.1)
    while time.monotonic() - began < 10:
        try:
            if left:
                client.sendall(bytes([left.pop(0)]))
            part = client.recv(65536)
            if not part:
                break
            got += part
        except TimeoutError:
            continue
        except OSError:
            break
    return time.monotonic() - began, got


HEAD = f"POST /api/v1/create_session HTTP/1.1\r\nhost: localhost\r\nx-api-key: {KEY}\r\n".encode()


def test_a_connection_without_a_request_is_closed() -> None:
    with held_to() as port, connect(port) as client:
        assert 0.5 < until_closed(client)[0] < 4


@pytest.mark.parametrize("sent", [b"", HEAD + b"content-length: 2\r\n\r\n{}"], ids=["at first", "after a request"])
def test_slowloris_a_header_at_a_time(sent: bytes) -> None:
    """However often something arrives, a head has to be whole in time; also on a connection that has served before."""
    with held_to() as port, connect(port) as client:
        client.sendall(sent)
        if sent:
            assert client.recv(65536).startswith(b"HTTP/1.1 200")
        seconds, _ = until_closed(client, HEAD + b"x-more: 1\r\n" * 50)
        assert 0.5 < seconds < 4


def test_a_slow_body_gets_408_and_the_next_client_is_served() -> None:
    with held_to() as port, connect(port) as client:
        client.sendall(HEAD + b"content-length: 100000\r\n\r\n{")
        seconds, got = until_closed(client, b" " * 100)
        assert got.startswith(b"HTTP/1.1 408"), got
        assert b"did not arrive within" in got
        assert seconds < 6
        with connect(port) as other:
            other.sendall(HEAD + b"content-length: 2\r\n\r\n{}")
            assert other.recv(65536).startswith(b"HTTP/1.1 200")


def test_the_rest_of_a_body_that_was_refused_is_not_waited_for() -> None:
    with held_to() as port, connect(port) as client:
        client.sendall(HEAD.replace(KEY.encode(), b"tml-wrong") + b"content-length: 100000\r\n\r\n{")
        seconds, got = until_closed(client, b" " * 100)
        assert got.startswith(b"HTTP/1.1 401")
        assert seconds < 4


def test_a_long_poll_and_a_quiet_connection_are_not_slow_clients() -> None:
    """The limits are on what a client sends; how long it is answered is the server's own."""
    with held_to(long_poll_seconds=2.0) as port, connect(port) as client:
        for _ in range(2):
            client.sendall(HEAD + b"content-length: 2\r\n\r\n{}")
            got = client.recv(65536)
            assert got.startswith(b"HTTP/1.1 200")
            while not got.endswith(b"}"):  # some servers send head and body apart
                got += client.recv(65536)
            time.sleep(1.5)


@pytest.mark.parametrize("name", [b"x: " + b"y" * 6000 + b"\r\n", b"x: y\r\n" * 1000], ids=["one", "many"])
def test_large_heads_are_refused(name: bytes) -> None:
    with held_to() as port:
        for end in (b"content-length: 2\r\n\r\n{}", b""):  # whole, and never ending
            with connect(port) as client:
                client.sendall(HEAD + name + end)
                _, got = until_closed(client)
                assert got[:12] in (b"HTTP/1.1 431", b"HTTP/1.1 400"), got


def test_an_endless_head_is_cut() -> None:
    with held_to(head_seconds=60) as port, connect(port) as client:
        client.sendall(HEAD)
        sent = 0
        with suppress(OSError):
            while sent < 20 << 20:
                sent += client.send(b"x: " + b"y" * 1000 + b"\r\n")
        assert sent < 20 << 20, "the server took it all"


def test_a_body_over_the_limit_is_cut() -> None:
    with held_to(max_body_bytes=1 << 16) as port:
        for framing in (b"content-length: 200000\r\n\r\n", b"transfer-encoding: chunked\r\n\r\n30d40\r\n"):
            with connect(port) as client:
                client.sendall(HEAD + framing + b" " * 200000)
                _, got = until_closed(client)
                assert got.startswith(b"HTTP/1.1 413"), got


def test_more_connections_than_the_limit_are_told_so() -> None:
    with held_to(max_connections=3, head_seconds=60) as port:
        held = [connect(port) for _ in range(3)]
        time.sleep(0.3)
        with connect(port) as one_more:
            assert until_closed(one_more)[1].startswith(b"HTTP/1.1 503")
        held.pop().close()
        time.sleep(0.3)
        with connect(port) as again:
            again.sendall(HEAD + b"content-length: 2\r\n\r\n{}")
            assert again.recv(65536).startswith(b"HTTP/1.1 200")
        for client in held:
            client.close()


LARGE = 48 << 20


async def large(_scope: Scope, _receive: Receive, send: Send) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % LARGE)]})
    for _ in range(LARGE >> 20):
        await send({"type": "http.response.body", "body": bytes(1 << 20), "more_body": True})
    await send({"type": "http.response.body", "body": b""})


@pytest.mark.parametrize("reads", [False, True])
def test_a_client_that_does_not_read_is_cut_off_and_a_slow_one_is_not(reads: bool) -> None:
    """Answers that nobody takes would lie in memory."""
    with serving_to(large, server_settings(send_seconds=0.8)) as port, connect(port) as client:
        client.sendall(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
        got, began = 0, time.monotonic()
        while time.monotonic() - began < 3:
            got += len(client.recv(1 << 19)) if reads else 0
            time.sleep(0.05)
        with suppress(OSError):
            while got < LARGE and (part := client.recv(1 << 20)):
                got += len(part)
        assert (got >= LARGE) is reads

"""The connections below the remote backend's HTTP client, against servers of this event loop."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import httpcore
import pytest
import trustme

from openrl.backends.remote import sockets
from openrl.backends.remote.body import Body, Passing
from openrl.backends.remote.calls import Call
from openrl.backends.remote.link import Away, Link
from openrl.backends.remote.token import Token
from openrl.errors import SettingsError
from openrl.remotes import Remote
from openrl.tokens import TokenSource

CALL = Call("POST", "/api/v1/x", b"/api/v1/x", ())
OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"

Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def serving(handler: Handler, tls: ssl.SSLContext | None = None) -> AsyncGenerator[int]:
    tasks: set[asyncio.Task[None]] = set()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await handler(reader, writer)
        except (OSError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(handle(reader, writer))
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    server = await asyncio.start_server(accept, "127.0.0.1", 0, ssl=tls)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        for task in [*tasks]:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@asynccontextmanager
async def link_to(url: str, ca_file: Path | None = None) -> AsyncGenerator[Link]:
    remote = Remote("far", url, TokenSource("none"), ca_file)
    link = Link(remote, lambda: url, Token(remote.token))
    try:
        yield link
    finally:
        await link.stop()


def test_a_small_call_is_one_piece_and_keeps_its_connection() -> None:
    pieces: list[bytes] = []
    connections = 0

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        while piece := await reader.read(1 << 20):
            pieces.append(piece)
            writer.write(OK)

    async def check() -> None:
        async with serving(handle) as port, link_to(f"http://127.0.0.1:{port}/base/") as link:
            for _ in range(3):
                reply = await link.send(CALL, Body(b"x" * 5000), 5)
                assert (reply.status, reply.content) == (200, b"ok")
        assert connections == 1
        assert len(pieces) == 3
        assert pieces[0].startswith(b"POST /base/api/v1/x HTTP/1.1\r\n")
        assert f"\r\nhost: 127.0.0.1:{port}\r\n".encode() in pieces[0].lower()
        assert pieces[0].endswith(b"\r\n\r\n" + b"x" * 5000)

    asyncio.run(check())


def test_a_large_body_is_sent_while_it_comes() -> None:
    arrived = asyncio.Event()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        assert await reader.readexactly(200_000) == b"a" * 200_000
        arrived.set()
        assert await reader.readexactly(3_000_000) == b"b" * 3_000_000
        writer.write(OK)

    async def check() -> None:
        async with serving(handle) as port, link_to(f"http://127.0.0.1:{port}") as link:
            body = Body(announced=3_200_000)
            sending = asyncio.create_task(link.send(CALL, body, 5))
            body.add(b"a" * 200_000)
            await asyncio.wait_for(arrived.wait(), 5)
            body.add(b"b" * 3_000_000)
            body.end()
            assert (await sending).content == b"ok"

    asyncio.run(check())


def test_a_body_of_unknown_length_is_chunked() -> None:
    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        assert b"transfer-encoding: chunked" in head.lower()
        assert await reader.readuntil(b"0\r\n\r\n") == b"3\r\nabc\r\n0\r\n\r\n"
        writer.write(OK)

    async def parts() -> AsyncGenerator[bytes]:
        yield b"abc"

    async def check() -> None:
        async with serving(handle) as port, link_to(f"http://127.0.0.1:{port}") as link:
            assert (await link.send(CALL, Passing(parts(), None), 5)).status == 200

    asyncio.run(check())


def test_a_large_answer_waits_for_its_reader() -> None:
    size = 40 << 20

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % size)
        for _ in range(40):
            writer.write(bytes(1 << 20))
            await writer.drain()

    async def check() -> None:
        async with serving(handle) as port, link_to(f"http://127.0.0.1:{port}") as link:
            reply = await link.send(CALL, Body(b""), 5)
            assert reply.rest is not None
            assert len(reply.content) < 8 << 20
            await asyncio.sleep(0.1)
            rest = [len(part) async for part in reply.rest]
            assert len(reply.content) + sum(rest) == size
            await reply.close()

    asyncio.run(check())


def test_a_connection_that_was_closed_while_idle_is_not_used_again() -> None:
    connections = 0

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        await reader.readuntil(b"\r\n\r\n")
        writer.write(OK)

    async def check() -> None:
        async with serving(handle) as port, link_to(f"http://127.0.0.1:{port}") as link:
            for _ in range(3):
                assert (await link.send(CALL, Body(b""), 5)).status == 200
                await asyncio.sleep(0.02)
        assert connections == 3

    asyncio.run(check())


def test_silence_ends_a_call() -> None:
    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1 << 20)
        await asyncio.sleep(10)

    async def check() -> None:
        async with serving(handle) as port, link_to(f"http://127.0.0.1:{port}") as link:
            with pytest.raises(Away, match=r"silent for 0\.1 s") as caught:
                await link.send(CALL, Body(b""), 0.1)
            assert caught.value.sent

    asyncio.run(check())


def test_a_server_that_takes_nothing_ends_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("openrl.backends.remote.link._WRITE_S", 0.2)

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(10)

    async def check() -> None:
        async with serving(handle) as port, link_to(f"http://127.0.0.1:{port}") as link:
            with pytest.raises(Away, match="nothing taken"):
                await link.send(CALL, Body(bytes(50 << 20)), 5)

    asyncio.run(check())


def test_a_port_where_nobody_listens_was_never_sent_anything() -> None:
    async def check() -> None:
        async with link_to("http://127.0.0.1:9") as link:
            with pytest.raises(Away) as caught:
                await link.send(CALL, Body(b""), 1)
            assert not caught.value.sent

    asyncio.run(check())


# ---- TLS ----


async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while True:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(OK)


def authority(folder: Path) -> tuple[ssl.SSLContext, Path]:
    """A server's context, and the file that vouches for it."""
    made = trustme.CA()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    made.issue_cert("127.0.0.1", "localhost").configure_cert(context)
    made.cert_pem.write_to_path(folder / "ca.pem")
    return context, folder / "ca.pem"


def test_https_with_a_private_authority(tmp_path: Path) -> None:
    async def check() -> None:
        context, ca_file = authority(tmp_path)
        async with serving(answer, context) as port, link_to(f"https://localhost:{port}", ca_file) as link:
            for _ in range(2):
                assert (await link.send(CALL, Body(b""), 5)).content == b"ok"

    asyncio.run(check())


def test_a_certificate_that_nobody_vouches_for_is_refused(tmp_path: Path) -> None:
    async def check() -> None:
        context, _ = authority(tmp_path)
        async with serving(answer, context) as port, link_to(f"https://localhost:{port}") as link:
            with pytest.raises(Away, match="certificate verify failed") as caught:
                await link.send(CALL, Body(b""), 5)
            assert not caught.value.sent

    asyncio.run(check())


def test_a_file_without_certificates_is_refused(tmp_path: Path) -> None:
    (tmp_path / "ca.pem").write_text("nothing")
    with pytest.raises(SettingsError, match="holds no certificates"):
        sockets.pool("https://localhost", tmp_path / "ca.pem")


# ---- the machine's proxy ----


def test_the_machine_s_proxy_is_used_but_not_for_its_own_servers(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bytes] = []

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        seen.append(await reader.readuntil(b"\r\n\r\n"))
        writer.write(OK)

    async def check() -> None:
        async with serving(handle) as proxy:
            monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{proxy}")
            monkeypatch.setenv("no_proxy", "127.0.0.1")
            async with link_to("http://far.example") as link:
                assert (await link.send(CALL, Body(b""), 5)).status == 200
            async with link_to("http://127.0.0.1:9") as link:
                with pytest.raises(Away):
                    await link.send(CALL, Body(b""), 5)
        assert [head.split(b"\r\n")[0] for head in seen] == [b"POST http://far.example/api/v1/x HTTP/1.1"]

    asyncio.run(check())


def test_the_client_s_own_exceptions_are_all_caught() -> None:
    """A new one of httpcore would be a crash of a call."""
    from openrl.backends.remote.link import _FAULTS

    raised = (httpcore.ConnectError, httpcore.ReadTimeout, httpcore.WriteError, httpcore.RemoteProtocolError)
    assert all(issubclass(error, _FAULTS) for error in (*raised, httpcore.LocalProtocolError, httpcore.ProxyError))

"""Bodies that are passed on while they come, and the room that kept requests take."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from pathlib import Path

import pytest

from openrl.backends.remote.body import Body, Broken
from openrl.backends.remote.calls import Call, Family, Key
from openrl.backends.remote.kept import Shelf
from openrl.errors import Busy, NotReady

CALL = Call("POST", "/api/v1/optim_step", b"/api/v1/optim_step", ())


def run_key(number: int) -> Key:
    return Key(Family.RUN, "s:train:0", number)


async def parts_of(body: Body) -> list[bytes]:
    return [part async for part in body.read()]


def test_a_body_is_read_while_it_comes_and_again_from_the_start() -> None:
    async def check() -> None:
        body = Body(announced=6)
        reading = asyncio.create_task(parts_of(body))
        for part in (b"ab", b"cd", b"ef"):
            await asyncio.sleep(0)
            body.add(part)
        assert body.final_size == 6
        assert not reading.done()
        body.end()
        assert b"".join(await reading) == await body.content() == b"abcdef"
        assert body.head(3) == b"abc"

    asyncio.run(check())


def test_a_body_that_breaks_off_is_never_taken_for_whole() -> None:
    async def breaking() -> AsyncGenerator[bytes]:
        yield b"ab"
        raise OSError("gone")

    async def check() -> None:
        body = Body(announced=6)
        reading = asyncio.create_task(parts_of(body))
        with pytest.raises(OSError, match="gone"):
            await body.fill(breaking())
        with pytest.raises(Broken):
            await reading

    asyncio.run(check())


def test_a_reader_goes_on_where_it_is_when_the_body_moves_to_a_file(tmp_path: Path) -> None:
    async def check() -> None:
        content = bytes(range(256)) * 9000  # several reads of the file
        body = Body(content)
        reader = body.read()
        seen = await anext(reader)
        await body.spill(tmp_path / "body")
        assert body.in_memory == 0
        assert body.on_disk == len(content)
        assert seen + b"".join([part async for part in reader]) == content
        assert await body.content() == content
        body.drop()
        assert not (tmp_path / "body").exists()

    asyncio.run(check())


def test_accepted_requests_go_to_files_first_and_come_back(tmp_path: Path) -> None:
    async def check() -> None:
        shelf = Shelf(tmp_path / "kept", memory=1000, disk=10_000)
        waiting = await shelf.add(run_key(1), CALL, Body(b"w" * 400))
        accepted = await shelf.add(run_key(2), CALL, Body(b"a" * 400))
        shelf.accept(accepted, "r2")
        await shelf.add(run_key(3), CALL, Body(b"n" * 400))
        assert (shelf.memory, shelf.disk) == (800, 400)
        assert accepted.body.on_disk == 400
        assert waiting.body.in_memory == 400
        assert await accepted.body.content() == b"a" * 400
        shelf.forget(accepted)
        assert shelf.disk == 0
        assert not list((tmp_path / "kept").iterdir())

    asyncio.run(check())


def test_what_the_client_has_is_given_up_first(tmp_path: Path) -> None:
    async def check() -> None:
        shelf = Shelf(tmp_path / "kept", memory=1000, disk=10_000)
        for number in (1, 2):
            kept = await shelf.add(run_key(number), CALL, Body(b"x" * 400))
            shelf.accept(kept, f"r{number}")
        shelf.deliver(kept)
        await shelf.add(run_key(3), CALL, Body(b"x" * 400))
        assert shelf.promised("r1") is not None
        assert shelf.promised("r2") is None
        assert shelf.disk == 0

    asyncio.run(check())


def test_full_files_cost_accepted_requests_before_new_ones(tmp_path: Path) -> None:
    """Accepted means safe with the remote; what is kept of it is an insurance."""

    async def check() -> None:
        shelf = Shelf(tmp_path / "kept", memory=1000, disk=800)
        for number in range(1, 6):
            kept = await shelf.add(run_key(number), CALL, Body(b"x" * 400))
            shelf.accept(kept, f"r{number}")
        assert len(shelf) == 4
        assert shelf.promised("r1") is None

    asyncio.run(check())


def test_unanswered_requests_fill_the_room_until_new_ones_are_refused(tmp_path: Path) -> None:
    """Busy is a 429, which a sample's client understands (6.4); NotReady is a 503 for all else."""

    async def check() -> None:
        shelf = Shelf(tmp_path / "kept", memory=1000, disk=800)
        for number in range(4):
            await shelf.add(run_key(number), CALL, Body(b"x" * 400))
        assert (shelf.memory, shelf.disk) == (800, 800)
        with pytest.raises(NotReady, match="fill their room"):
            await shelf.add(run_key(9), CALL, Body(b"x" * 400))
        with pytest.raises(Busy):
            await shelf.add(Key(Family.SAMPLE, "s:sample:0", 1), CALL, Body(b"x" * 400))
        assert await shelf.add(run_key(10), CALL, Body(b"x" * 100)) is not None

    asyncio.run(check())


def test_one_body_may_be_larger_than_the_memory(tmp_path: Path) -> None:
    async def check() -> None:
        shelf = Shelf(tmp_path / "kept", memory=1000, disk=0)
        kept = await shelf.add(run_key(1), CALL, Body(b"x" * 5000))
        shelf.forget(kept)
        assert shelf.memory == 0

    asyncio.run(check())


def test_what_an_earlier_proxy_left_is_removed(tmp_path: Path) -> None:
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "00000001").write_bytes(b"x")
    Shelf(tmp_path / "kept", memory=1, disk=1)
    assert not (tmp_path / "kept").exists()

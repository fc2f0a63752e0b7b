"""A checkpoint between two servers over real sockets: cut connections, restarts, damage, and what a user is told."""

from __future__ import annotations

import asyncio
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from openrl.checkpoints.incoming import Announcement
from openrl.checkpoints.manifest import digest_files
from openrl.errors import BadRequest, Conflict, NotFound, NotReady, SettingsError, Unauthorized
from openrl.remotes import Remote
from openrl.tokens import TokenSource
from openrl.transfer import copying
from openrl.transfer.copying import Moved, copy_checkpoint
from openrl.transfer.finding import find_checkpoint
from openrl.transfer.server import Server, reach
from support.cutting import cutting
from support.http import KEY
from support.live import LiveServer, folder_of, lay_checkpoint

RUN = "0123456789abcdef:train:0"
WIDTH = 2048  # of the checkpoint's layers: about 800 kB in all


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copying, "PIECE_BYTES", 50_000)
    monkeypatch.setattr("openrl.transfer.server._FIRST_WAIT", 0.02)


@pytest.fixture
def source(tmp_path: Path) -> Iterator[LiveServer]:
    lay_checkpoint(tmp_path / "a", run=RUN, width=WIDTH)
    with LiveServer(tmp_path / "a") as server:
        yield server


@pytest.fixture
def target(tmp_path: Path) -> Iterator[LiveServer]:
    with LiveServer(tmp_path / "b") as server:
        yield server


PATH = f"tinker://{RUN}/weights/half"


class Watcher:
    """A progress display that remembers, and may act at some point."""

    def __init__(
        self,
        after: int = 0,
        act: Callable[[], None] = lambda: None,
        at_first_check: Callable[[], None] = lambda: None,
    ) -> None:
        self.begun: dict[str, int] = {}
        self.moves: list[tuple[str, int]] = []
        self.checks = 0
        self.waits: list[str] = []
        self._after = after
        self._act = act
        self._at_first_check = at_first_check

    def begin(self, announced: Announcement, received: Mapping[str, int]) -> None:
        self.begun = dict(received)

    def moved(self, file: str, at: int) -> None:
        self.moves.append((file, at))
        if len(self.moves) == self._after:
            self._act()

    def checking(self) -> None:
        if not self.checks:
            self._at_first_check()
        self.checks += 1

    def waiting(self, why: str) -> None:
        self.waits.append(why)


def remote(name: str, url: str) -> Remote:
    return Remote(name, url, TokenSource("none"))


def copy(source: str, target: str, watcher: Watcher | None = None, path: str = PATH, patience: float = 20) -> Moved:
    watching = watcher or Watcher()

    async def run() -> Moved:
        async with (
            reach(remote("here", source), KEY, patience, watching.waiting) as giver,
            reach(remote("there", target), KEY, patience, watching.waiting) as taker,
        ):
            return await copy_checkpoint(giver, path, taker, watching)

    return asyncio.run(run())


def same_files(a: LiveServer, path_a: str, b: LiveServer, path_b: str) -> None:
    assert digest_files(folder_of(a.data_dir, path_a)) == digest_files(folder_of(b.data_dir, path_b))


def test_all_files_arrive_and_a_second_time_costs_nothing(source: LiveServer, target: LiveServer) -> None:
    watcher = Watcher()
    moved = copy(source.url, target.url, watcher)
    same_files(source, PATH, target, moved.path)
    assert moved.found == 0
    assert moved.sent == sum(d.size for d in digest_files(folder_of(source.data_dir, PATH)).values())
    assert watcher.checks == 1
    ends = dict(watcher.moves)
    assert ends["optimizer.safetensors"] == (folder_of(source.data_dir, PATH) / "optimizer.safetensors").stat().st_size
    again = copy(source.url, target.url)
    assert (again.path, again.sent) == (moved.path, 0)


@pytest.mark.parametrize("side", ["source", "target"])
def test_cut_connections_are_made_again(source: LiveServer, target: LiveServer, side: str) -> None:
    """Towards the target every connection is cut after 120 kB, towards the source after 2 kB of requests."""
    with cutting(target.url if side == "target" else source.url) as cutter:
        cutter.refill = cutter.budget = 120_000 if side == "target" else 2_000
        watcher = Watcher()
        urls = (source.url, cutter.url) if side == "target" else (cutter.url, target.url)
        moved = copy(*urls, watcher)
        assert cutter.cuts > 2
        assert watcher.waits
        same_files(source, PATH, target, moved.path)


def test_an_interrupted_push_goes_on_where_it_stopped(source: LiveServer, target: LiveServer) -> None:
    """The command ends; the next one sends only what is missing."""

    def interrupt() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        copy(source.url, target.url, Watcher(30, interrupt))
    watcher = Watcher()
    moved = copy(source.url, target.url, watcher)
    total = sum(d.size for d in digest_files(folder_of(source.data_dir, PATH)).values())
    assert moved.found > 100_000
    assert moved.sent + moved.found == total
    assert sum(watcher.begun.values()) == moved.found
    same_files(source, PATH, target, moved.path)


@pytest.mark.parametrize("side", ["source", "target"])
def test_a_server_that_restarts_is_waited_for(source: LiveServer, target: LiveServer, side: str) -> None:
    server = source if side == "source" else target
    threads: list[threading.Thread] = []

    def restart() -> None:
        def run() -> None:
            server.stop()
            server.start()

        threads.append(threading.Thread(target=run))
        threads[0].start()

    watcher = Watcher(8, restart)
    moved = copy(source.url, target.url, watcher)
    threads[0].join()
    same_files(source, PATH, target, moved.path)


def test_a_server_that_stays_away_is_given_up(source: LiveServer, target: LiveServer) -> None:
    watcher = Watcher(8, target.stop)
    try:
        with pytest.raises(NotReady, match="there has not answered for 0 s: nothing listens at"):
            copy(source.url, target.url, watcher, patience=0.3)
    finally:
        target.start()
    assert copy(source.url, target.url).found > 0


def test_a_file_that_is_damaged_at_the_source_is_refused(source: LiveServer, target: LiveServer) -> None:
    """It is sent twice, in case it was the receiver's disk; then the user is told which file it is."""
    file = folder_of(source.data_dir, PATH) / "optimizer.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    watcher = Watcher()
    with pytest.raises(BadRequest, match=r"there: optimizer\.safetensors is damaged: its SHA-256 here is"):
        copy(source.url, target.url, watcher)
    assert watcher.checks == 2
    assert not list((target.data_dir / "checkpoints").rglob("*.safetensors"))


def test_what_is_damaged_on_the_way_is_sent_again(source: LiveServer, target: LiveServer) -> None:
    def damage() -> None:
        (staged,) = target.data_dir.glob("uploads/*/adapter_model.safetensors")
        data = bytearray(staged.read_bytes())
        data[100] ^= 1
        staged.write_bytes(data)

    watcher = Watcher(at_first_check=damage)
    moved = copy(source.url, target.url, watcher)
    assert watcher.checks == 2
    same_files(source, PATH, target, moved.path)


def test_a_checkpoint_that_is_overwritten_meanwhile_is_no_mixture(source: LiveServer, target: LiveServer) -> None:
    def overwrite() -> None:
        source.stop()
        shutil.rmtree(folder_of(source.data_dir, PATH))
        lay_checkpoint(source.data_dir, run=RUN, width=WIDTH + 1)
        source.start()

    with pytest.raises(Conflict, match="was overwritten while it was moved"):
        copy(source.url, target.url, Watcher(3, overwrite))
    same_files(source, PATH, target, copy(source.url, target.url).path)


def test_errors_name_the_server_and_the_reason(source: LiveServer, target: LiveServer) -> None:
    with pytest.raises(NotFound, match=r"here: checkpoint .* does not exist"):
        copy(source.url, target.url, path=f"tinker://{RUN}/weights/none")
    with pytest.raises(BadRequest, match="is not a checkpoint path"):
        copy(source.url, target.url, path="tinker://x")

    async def other_base() -> None:
        async with reach(remote("here", source.url), KEY) as a, reach(remote("there", target.url), KEY) as b:
            await copy_checkpoint(a, PATH, b, Watcher(), base_model="org/other")

    with pytest.raises(BadRequest, match="there: base model 'org/other' is not served here"):
        asyncio.run(other_base())


def call(server: str, path: str = "get_server_capabilities", key: str = KEY, ca: Path | None = None) -> None:
    async def run() -> None:
        target = Remote("lab", server, TokenSource("none"), ca)
        async with reach(target, key, patience=0) as reached:
            await reached.call("GET", path)

    asyncio.run(run())


def test_a_wrong_key_and_a_wrong_address(target: LiveServer) -> None:
    with pytest.raises(Unauthorized, match="lab does not take this key"):
        call(target.url, key="tml-wrong-wrong-wrong")
    with pytest.raises(NotReady, match=r"nothing listens at http://127\.0\.0\.1:9"):
        call("http://127.0.0.1:9")
    with pytest.raises(NotReady, match="does not speak TLS as expected"):
        call(target.url.replace("http:", "https:"))
    with pytest.raises(SettingsError, match="ca_file"):
        call(target.url, ca=Path("/no/such/file"))


def find(server: LiveServer, what: str) -> tuple[str, str]:
    async def run() -> tuple[str, str]:
        async with reach(remote("here", server.url), KEY) as reached:
            found = await find_checkpoint(reached, what)
            return found.path, found.note

    return asyncio.run(run())


def test_a_run_means_its_newest_training_checkpoint(tmp_path: Path) -> None:
    async def make(server: LiveServer) -> str:
        run = await server.h.open_run()
        for seq, name in enumerate(("one", "two"), 1):
            assert (await server.h.result(await server.h.save(run, seq, name))).error is None
        empty = await server.h.open_run(1)
        assert empty
        return run

    with LiveServer(tmp_path) as server:
        run = server.on_loop(make(server))
        assert find(server, run) == (f"tinker://{run}/weights/two", "")
        assert find(server, f"tinker://{run}/weights/one") == (f"tinker://{run}/weights/one", "")
        with pytest.raises(NotFound, match="has no training checkpoint"):
            find(server, run.replace(":0", ":1"))
        with pytest.raises(NotFound):
            find(server, "ffffffffffffffff:train:0")
        for wrong in ("half", "tinker://x/y", "../x:train:0"):
            with pytest.raises(BadRequest):
                find(server, wrong)


def test_no_secret_in_the_reprs(target: LiveServer) -> None:
    async def run() -> None:
        async with reach(remote("lab", target.url), KEY) as reached:
            assert isinstance(reached, Server)
            assert KEY not in repr(vars(reached))

    asyncio.run(run())

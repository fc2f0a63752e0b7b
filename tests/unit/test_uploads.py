"""Checkpoints that are pushed to a server: what it takes, in which pieces, and what it refuses."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from openrl.checkpoints.manifest import digest_files
from openrl.keys.key import Quotas
from openrl.keys.principal import Scope
from openrl.server.app import create_app
from support.daemons import BASE, Harness
from support.fake_daemon import server_settings
from support.http import KEY, Http
from support.live import RANK, folder_of, lay_checkpoint, write_files

SOURCE = "tinker://0123456789abcdef:train:0/weights/half"


class Taker:
    """A server that takes a checkpoint, and the files that are to be brought."""

    def __init__(self, h: Harness, files: Path) -> None:
        self.h = h
        self.files = files
        self._http = Http(create_app(h.daemon, server_settings(), KEY))

    def announcement(self, **changes: Any) -> dict[str, Any]:
        digests = {name: {"size": d.size, "sha256": d.sha256} for name, d in digest_files(self.files).items()}
        spec = {"rank": RANK, "seed": 5, "train_attn": True, "train_mlp": True, "train_unembed": True}
        fields = {"source": SOURCE, "kind": "weights", "name": "half", "base_model": BASE, "spec": spec}
        return {**fields, "files": digests, "user_metadata": {"note": "kept"}, **changes}

    async def announce(self, **changes: Any) -> httpx.Response:
        return await self.call("POST", "uploads", json=self.announcement(**changes))

    async def call(self, method: str, path: str, **options: Any) -> httpx.Response:
        return await self._http.acall(method, path, **options)

    async def put(self, upload: str, name: str, start: int, stop: int, content: object = None) -> httpx.Response:
        data = (self.files / name).read_bytes()
        headers = {"content-range": f"bytes {start}-{stop - 1}/{len(data)}"}
        body = data[start:stop] if content is None else content
        return await self.call("PUT", f"uploads/{upload}/files/{name}", content=body, headers=headers)

    async def put_all(self, upload: str) -> None:
        for path in self.files.iterdir():
            answer = await self.put(upload, path.name, 0, path.stat().st_size)
            assert answer.status_code == 200, answer.text

    async def commit(self, upload: str) -> httpx.Response:
        return await self.call("POST", f"uploads/{upload}/commit")


def with_taker(tmp_path: Path, test: Callable[[Taker], Awaitable[None]], **limits: Any) -> None:
    async def run() -> None:
        h = await Harness(tmp_path / "data", **limits).start()
        try:
            await test(Taker(h, files))
        finally:
            await h.daemon.stop()

    files = tmp_path / "files"
    files.mkdir()
    write_files(files)
    asyncio.run(run())


def test_pieces_become_a_checkpoint(tmp_path: Path) -> None:
    async def test(t: Taker) -> None:
        upload = (await t.announce()).json()
        assert upload["tinker_path"] is None
        name = "optimizer.safetensors"
        size = upload["files"][name]["size"]
        assert (await t.put(upload["upload_id"], name, 0, 1000)).json() == {"received": 1000}
        assert (await t.put(upload["upload_id"], name, 1000, size)).json() == {"received": size}
        for other in upload["files"]:
            if other != name:
                await t.put(upload["upload_id"], other, 0, upload["files"][other]["size"])
        path = (await t.commit(upload["upload_id"])).json()["tinker_path"]
        assert path.endswith(":train:0/weights/half")
        assert path != SOURCE
        brought = folder_of(tmp_path / "data", path)
        assert digest_files(brought) == digest_files(t.files)
        found = await t.h.daemon.checkpoint(path)
        assert found.base_model == BASE
        assert found.user_metadata == {"note": "kept"}
        assert not list((tmp_path / "data" / "uploads").rglob("*.safetensors")), "staging lets go of the files"
        run = await t.h.open_run()
        again = await t.call("GET", f"training_runs/{path.split('/')[2]}/checkpoints/weights/half/files")
        assert again.json()["files"] == t.announcement()["files"]
        assert run

    with_taker(tmp_path, test)


def test_the_same_announcement_finds_the_same_upload(tmp_path: Path) -> None:
    """Under way, and when it is in; another checkpoint, or the same one once it is deleted, begins anew."""

    async def test(t: Taker) -> None:
        first = (await t.announce()).json()
        await t.put(first["upload_id"], "adapter_model.safetensors", 0, 100)
        again = (await t.announce()).json()
        assert again["upload_id"] == first["upload_id"]
        assert again["files"]["adapter_model.safetensors"]["received"] == 100
        assert (await t.announce(name="other")).json()["upload_id"] != first["upload_id"]
        data = (t.files / "adapter_model.safetensors").stat().st_size
        await t.put(first["upload_id"], "adapter_model.safetensors", 100, data)
        await t.put(first["upload_id"], "adapter_config.json", 0, (t.files / "adapter_config.json").stat().st_size)
        await t.put(first["upload_id"], "optimizer.safetensors", 0, (t.files / "optimizer.safetensors").stat().st_size)
        path = (await t.commit(first["upload_id"])).json()["tinker_path"]
        assert (await t.commit(first["upload_id"])).json()["tinker_path"] == path
        assert (await t.announce()).json()["tinker_path"] == path
        await t.h.daemon.life.delete(path)
        anew = (await t.announce()).json()
        assert anew["tinker_path"] is None
        await t.put_all(anew["upload_id"])
        assert (await t.commit(anew["upload_id"])).json()["tinker_path"] != path

    with_taker(tmp_path, test)


def test_a_wrong_offset_says_where_to_go_on(tmp_path: Path) -> None:
    async def test(t: Taker) -> None:
        upload = (await t.announce()).json()["upload_id"]
        await t.put(upload, "adapter_model.safetensors", 0, 100)
        for start in (0, 50, 200):
            answer = await t.put(upload, "adapter_model.safetensors", start, 300)
            assert answer.status_code == 416
            assert answer.json()["received"] == 100

    with_taker(tmp_path, test)


def test_a_restart_keeps_what_has_come(tmp_path: Path) -> None:
    async def test(t: Taker) -> None:
        upload = (await t.announce()).json()["upload_id"]
        await t.put(upload, "adapter_model.safetensors", 0, 100)
        await t.h.kill()
        t2 = Taker(await Harness(tmp_path / "data").start(), t.files)
        try:
            state = (await t2.call("GET", f"uploads/{upload}")).json()
            assert state["files"]["adapter_model.safetensors"]["received"] == 100
        finally:
            await t2.h.daemon.stop()
        await t.h.start()

    with_taker(tmp_path, test)


def test_a_damaged_file_is_refused_and_can_be_sent_again(tmp_path: Path) -> None:
    async def test(t: Taker) -> None:
        upload = (await t.announce()).json()["upload_id"]
        await t.put_all(upload)
        staged = tmp_path / "data" / "uploads" / upload / "optimizer.safetensors"
        data = bytearray(staged.read_bytes())
        data[-1] ^= 1
        staged.write_bytes(data)
        answer = await t.commit(upload)
        assert answer.status_code == 400
        assert "optimizer.safetensors is damaged: its SHA-256 here is" in answer.json()["detail"]
        state = (await t.call("GET", f"uploads/{upload}")).json()
        assert state["files"]["optimizer.safetensors"]["received"] == 0
        await t.put(upload, "optimizer.safetensors", 0, len(data))
        assert (await t.commit(upload)).status_code == 200

    with_taker(tmp_path, test)


def test_an_unfinished_upload_is_no_checkpoint(tmp_path: Path) -> None:
    async def test(t: Taker) -> None:
        upload = (await t.announce()).json()["upload_id"]
        answer = await t.commit(upload)
        assert answer.status_code == 400
        assert "is not complete: 0 of" in answer.json()["detail"]

    with_taker(tmp_path, test)


REFUSED: dict[str, tuple[dict[str, Any], int, str]] = {
    "unknown base": ({"base_model": "org/other"}, 400, "is not served here"),
    "external": ({"kind": "external_weights"}, 400, "cannot be moved"),
    "kind": ({"kind": "nonsense"}, 400, "kind"),
    "path as a name": ({"name": "../../etc/passwd"}, 400, "is no checkpoint's name"),
    "metadata": ({"user_metadata": {"k": "v" * 70000}}, 400, "user_metadata"),
    "rank": ({"spec": {"rank": 4096, "seed": 1}}, 400, "rank"),
    "no files": ({"files": {}}, 400, "files lacks"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused_at_once(tmp_path: Path, case: str) -> None:
    changes, status, words = REFUSED[case]

    async def test(t: Taker) -> None:
        answer = await t.announce(**changes)
        assert answer.status_code == status
        assert words in answer.json()["detail"]
        assert not list((tmp_path / "data").glob("uploads/*"))

    with_taker(tmp_path, test)


@pytest.mark.parametrize(
    ("name", "size", "sha256", "status"),
    [
        ("../../evil.safetensors", 10, "0" * 64, 400),
        ("manifest.json", 10, "0" * 64, 400),
        ("upload.json", 10, "0" * 64, 400),
        ("optimizer.safetensors", 0, "0" * 64, 400),
        ("optimizer.safetensors", 10, "nonsense", 400),
        ("optimizer.safetensors", 1 << 40, "0" * 64, 413),
    ],
)
def test_only_the_known_files_of_a_sane_size(tmp_path: Path, name: str, size: int, sha256: str, status: int) -> None:
    async def test(t: Taker) -> None:
        files = {**t.announcement()["files"], name: {"size": size, "sha256": sha256}}
        assert (await t.announce(files=files)).status_code == status

    with_taker(tmp_path, test)


def test_a_full_disk_is_said_before_the_first_byte(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(t: Taker) -> None:
        monkeypatch.setattr("openrl.checkpoints.staging.Staging.free_bytes", lambda self: (512 << 20) + 10_000)
        answer = await t.announce()
        assert answer.status_code == 413
        assert "the server's disk has room for 10000" in answer.json()["detail"]

    with_taker(tmp_path, test)


def test_an_owner_has_so_many_uploads_at_a_time(tmp_path: Path) -> None:
    async def test(t: Taker) -> None:
        for number in range(16):
            assert (await t.announce(name=f"n{number}")).status_code == 200
        answer = await t.announce(name="one-more")
        assert answer.status_code == 429
        first = (await t.announce(name="n0")).json()["upload_id"]
        assert (await t.call("DELETE", f"uploads/{first}")).status_code == 204
        assert (await t.call("GET", f"uploads/{first}")).status_code == 404
        assert (await t.announce(name="one-more")).status_code == 200

    with_taker(tmp_path, test)


@pytest.mark.parametrize(
    ("name", "span", "status"),
    [
        ("adapter_model.safetensors", "bytes 0-9/7", 400),
        ("adapter_model.safetensors", "bytes 9-0/7", 400),
        ("adapter_model.safetensors", "0-9/7", 400),
        ("adapter_model.safetensors", "", 400),
        ("upload.json", "bytes 0-9/10", 404),
        ("manifest.json", "bytes 0-9/10", 404),
        ("..%2F..%2Fevil", "bytes 0-9/10", 404),
    ],
)
def test_pieces_that_fit_nothing(tmp_path: Path, name: str, span: str, status: int) -> None:
    async def test(t: Taker) -> None:
        upload = (await t.announce()).json()["upload_id"]
        answer = await t.call(
            "PUT", f"uploads/{upload}/files/{name}", content=b"0123456789", headers={"content-range": span}
        )
        assert answer.status_code == status, answer.text

    with_taker(tmp_path, test)


def test_more_bytes_than_the_span_has_are_refused(tmp_path: Path) -> None:
    async def test(t: Taker) -> None:
        upload = (await t.announce()).json()["upload_id"]
        answer = await t.put(upload, "adapter_model.safetensors", 0, 10, b"x" * 20)
        assert answer.status_code == 400
        state = (await t.call("GET", f"uploads/{upload}")).json()
        assert state["files"]["adapter_model.safetensors"]["received"] == 0

    with_taker(tmp_path, test)


@pytest.mark.parametrize("identity", ["0" * 32, "..", "%2e%2e%2f", "x" * 300])
def test_unknown_uploads(tmp_path: Path, identity: str) -> None:
    async def test(t: Taker) -> None:
        assert (await t.call("GET", f"uploads/{identity}")).status_code == 404
        assert (await t.commit(identity)).status_code == 404

    with_taker(tmp_path, test)


def test_a_new_request_takes_a_file_over_from_one_that_hangs(tmp_path: Path) -> None:
    """The client has given the first connection up, but the server cannot know that yet."""

    async def test(t: Taker) -> None:
        upload = (await t.announce()).json()["upload_id"]
        name = "adapter_model.safetensors"
        data = (t.files / name).read_bytes()
        started, go_on = asyncio.Event(), asyncio.Event()

        async def hanging() -> AsyncIterator[bytes]:
            yield data[:100]
            started.set()
            await go_on.wait()
            yield data[100:200]

        first = asyncio.create_task(t.put(upload, name, 0, 200, hanging()))
        await started.wait()
        assert (await t.put(upload, name, 0, len(data))).status_code == 200
        go_on.set()
        assert (await first).status_code == 400
        state = (await t.call("GET", f"uploads/{upload}")).json()
        assert state["files"][name]["received"] == len(data)

    with_taker(tmp_path, test)


async def new_key(t: Taker, owner: str, scope: Scope = Scope.USE, room: int | None = None) -> dict[str, str]:
    """Headers with a new key."""
    quotas = Quotas(checkpoint_bytes=room)
    text, _ = await t.h.daemon.keys.create(owner, frozenset({scope}), quotas, None, "")
    return {"x-api-key": text}


def test_an_upload_belongs_to_its_key(tmp_path: Path) -> None:
    """Others find neither the upload nor what becomes of it, and their own push of the same is another one."""

    async def test(t: Taker) -> None:
        alice, bob = await new_key(t, "alice"), await new_key(t, "bob")
        upload = (await t.call("POST", "uploads", json=t.announcement(), headers=alice)).json()["upload_id"]
        other = (await t.call("POST", "uploads", json=t.announcement(), headers=bob)).json()["upload_id"]
        assert other != upload
        name = "adapter_config.json"
        data = (t.files / name).read_bytes()
        span = {"content-range": f"bytes 0-{len(data) - 1}/{len(data)}"}
        place = f"uploads/{upload}"
        for method, path in (("GET", place), ("DELETE", place), ("POST", f"{place}/commit")):
            assert (await t.call(method, path, headers=bob)).status_code == 404
        assert (await t.call("PUT", f"{place}/files/{name}", content=data, headers=bob | span)).status_code == 404
        for path in t.files.iterdir():
            content = path.read_bytes()
            headers = alice | {"content-range": f"bytes 0-{len(content) - 1}/{len(content)}"}
            assert (await t.call("PUT", f"{place}/files/{path.name}", content=content, headers=headers)).is_success
        made = (await t.call("POST", f"{place}/commit", headers=alice)).json()["tinker_path"]
        files = f"training_runs/{made.split('/')[2]}/checkpoints/weights/half/files"
        assert (await t.h.daemon.checkpoint(made)).owner == "alice"
        for path, status in ((files, 404), (f"{files}/{name}", 404)):
            assert (await t.call("GET", path, headers=bob)).status_code == status
            assert (await t.call("GET", path, headers=alice)).status_code == 200

    with_taker(tmp_path, test)


def test_scope_and_quota(tmp_path: Path) -> None:
    async def test(t: Taker) -> None:
        reader = await new_key(t, "alice", Scope.READ)
        assert (await t.call("POST", "uploads", json=t.announcement(), headers=reader)).status_code == 403
        small = await new_key(t, "carol", room=1000)
        answer = await t.call("POST", "uploads", json=t.announcement(), headers=small)
        assert 400 <= answer.status_code < 500
        assert "bytes" in answer.json()["detail"]
        assert not list((tmp_path / "data").glob("uploads/*"))

    with_taker(tmp_path, test)


def damage_header(files: Path) -> None:
    path = files / "adapter_model.safetensors"
    data = bytearray(path.read_bytes())
    data[8:20] = b"x" * 12
    path.write_bytes(data)


def other_rank(files: Path) -> None:
    for path in files.iterdir():
        path.unlink()
    write_files(files, rank=RANK // 2)


def foreign_optimizer(files: Path) -> None:
    good = files.parent / "other"
    good.mkdir()
    write_files(good, width=32)
    (files / "optimizer.safetensors").write_bytes((good / "optimizer.safetensors").read_bytes())


def no_config(files: Path) -> None:
    (files / "adapter_config.json").write_text(json.dumps({"r": RANK}))


@pytest.mark.parametrize("damage", [damage_header, other_rank, foreign_optimizer, no_config])
def test_files_that_are_no_checkpoint_never_become_one(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    """Their hashes are right: whoever sends them says what they are."""

    async def test(t: Taker) -> None:
        damage(t.files)
        upload = (await t.announce()).json()["upload_id"]
        await t.put_all(upload)
        answer = await t.commit(upload)
        assert answer.status_code == 400, answer.text
        assert not list((tmp_path / "data" / "checkpoints").rglob("*.safetensors"))

    with_taker(tmp_path, test)


def test_old_uploads_go_and_young_ones_stay(tmp_path: Path) -> None:
    async def test(t: Taker) -> None:
        old = (await t.announce(name="old")).json()["upload_id"]
        young = (await t.announce(name="young")).json()["upload_id"]
        yesterday = time.time() - 90000
        folder = tmp_path / "data" / "uploads" / old
        for path in (*folder.iterdir(), folder):
            os.utime(path, (yesterday, yesterday))
        await t.h.daemon.uploads.sweep()
        assert (await t.call("GET", f"uploads/{old}")).status_code == 404
        assert (await t.call("GET", f"uploads/{young}")).status_code == 200

    with_taker(tmp_path, test)


def test_a_crash_between_folder_and_rows_makes_no_second_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test(t: Taker) -> None:
        upload = (await t.announce()).json()["upload_id"]
        await t.put_all(upload)

        async def crash(*_: object, **__: object) -> None:
            raise RuntimeError("crash")

        with monkeypatch.context() as patch:
            patch.setattr("openrl.daemon.copying.Copying.take_in", crash)
            assert (await t.commit(upload)).status_code == 500
        await t.h.kill()
        t2 = Taker(await Harness(tmp_path / "data").start(), t.files)
        try:
            path = (await t2.commit(upload)).json()["tinker_path"]
            folder_of(tmp_path / "data", path)  # the only one of its name
            assert (await t2.h.daemon.checkpoint(path)).path == path
        finally:
            await t2.h.daemon.stop()
        await t.h.start()

    with_taker(tmp_path, test)


def test_files_of_a_checkpoint_are_given_out_in_ranges(tmp_path: Path) -> None:
    async def run() -> None:
        path = lay_checkpoint(tmp_path)
        h = await Harness(tmp_path).start()
        t = Taker(h, tmp_path)
        place = f"training_runs/{path.split('/')[2]}/checkpoints/weights/half/files"
        told = (await t.call("GET", place)).json()
        assert told["kind"] == "weights"
        assert told["source"] == path
        name = "adapter_model.safetensors"
        part = await t.call("GET", f"{place}/{name}", headers={"range": "bytes=10-19"})
        assert part.status_code == 206
        data = (folder_of(tmp_path, path) / name).read_bytes()
        assert part.content == data[10:20]
        assert hashlib.sha256(data).hexdigest() == told["files"][name]["sha256"]
        for other in ("manifest.json", "..%2Fmanifest.json", "nothing"):
            assert (await t.call("GET", f"{place}/{other}")).status_code in (400, 404)
        await h.daemon.stop()

    asyncio.run(run())

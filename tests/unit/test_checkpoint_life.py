"""Checkpoint life over a scalar worker and the real routes: lists, lifetimes, copies, deletes, downloads."""

from __future__ import annotations

import asyncio
import io
import json
import sys
import tarfile
import time
from collections.abc import Awaitable, Callable
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyrage
import pytest

from openrl.checkpoints.peft import write_adapter
from openrl.daemon.work import Finished, NewSession, SaveExternal, SaveSampler
from openrl.errors import NotFound
from openrl.server.app import create_app
from openrl.store import audit, checkpoints
from openrl.types import LoraSpec, Op, RunId, SamplerId
from openrl.workers import messages
from support.daemons import Harness, expected_weight
from support.fake_daemon import server_settings
from support.http import KEY, Http

DAY = 86400


def scenario(test: Callable[[Harness, Http], Awaitable[None]]) -> Callable[[Path], None]:
    """Run an async test over a fresh daemon and its HTTP app."""

    def run(tmp_path: Path) -> None:
        async def main() -> None:
            harness = await Harness(tmp_path).start()
            try:
                await asyncio.wait_for(test(harness, http_of(harness)), 30)
            finally:
                await harness.daemon.stop()

        asyncio.run(main())

    run.__name__, run.__doc__ = test.__name__, test.__doc__
    return run


def http_of(h: Harness) -> Http:
    return Http(create_app(h.daemon, server_settings(), KEY, b"s" * 32))


async def saved(h: Harness, run: RunId, seq: int, name: str) -> str:
    done = await h.result(await h.save(run, seq, name))
    assert done.error is None, done.error
    return json.loads(done.body)["path"]


async def external(h: Harness, run: RunId, seq: int, save: SaveExternal) -> Finished:
    return await h.result(await h.submit(run, seq, Op.SAVE_EXTERNAL, save))


def rest(path: str, suffix: str = "") -> str:
    run, _, checkpoint = path.removeprefix("tinker://").partition("/")
    return f"training_runs/{run}/checkpoints/{checkpoint}{suffix}"


def folders(h: Harness, kind: str = "weights") -> list[str]:
    return [path.name for path in h.settings.data_dir.glob(f"checkpoints/*/{kind}/*")]


async def listed(http: Http, query: str = "", **headers: str) -> list[str]:
    answer = await http.acall("GET", f"checkpoints{query}", headers=headers)
    assert answer.status_code == 200, answer.text
    return [entry["checkpoint_id"].partition("/")[2] for entry in answer.json()["checkpoints"]]


# ---- lists ----


@scenario
async def test_e36_e30_lists_are_paged_newest_first(h: Harness, http: Http) -> None:
    """E30, E36, T25: newest first, a cursor, pages of up to 1000; ephemeral ones are not shown."""
    run = await h.open_run()
    for seq in range(1, 6):
        await saved(h, run, seq, f"c{seq}")
    await h.save_sampler(run, 6, 1)
    assert await listed(http) == ["c5", "c4", "c3", "c2", "c1"]
    assert await listed(http, "?limit=2&offset=1") == ["c4", "c3"]
    answer = (await http.acall("GET", "checkpoints?limit=5000&offset=4")).json()
    assert answer["cursor"] == {"offset": 4, "limit": 1000, "total_count": 5}
    entry = answer["checkpoints"][0]
    assert entry["checkpoint_type"] == "training"
    assert entry["tinker_path"] == f"tinker://{run}/weights/c1"
    assert entry["size_bytes"] > 0
    assert entry["public"] is False
    assert "expires_at" not in entry, "not null: the CLI shows it as it comes"
    assert entry["time"].endswith("Z"), "T31"
    of_run = (await http.acall("GET", f"training_runs/{run}/checkpoints")).json()
    assert len(of_run["checkpoints"]) == 5
    assert (await http.acall("GET", "training_runs/x:train:0/checkpoints")).status_code == 404
    for query in ("?limit=0", "?offset=-1", "?limit=x"):
        assert (await http.acall("GET", f"checkpoints{query}")).status_code == 400


@scenario
async def test_t26_external_ones_are_hidden_from_sdks_that_do_not_know_them(h: Harness, http: Http) -> None:
    run = await h.open_run()
    await saved(h, run, 1, "a")
    done = await external(h, run, 2, SaveExternal("e"))
    assert json.loads(done.body)["size_bytes"] > 0
    for version, shown in {"0.7.0": ["a"], "0.30.3": ["a"], "0.30.4": ["e", "a"], "0.38.0": ["e", "a"]}.items():
        header = {"x-stainless-package-version": version}
        assert await listed(http, **header) == shown
        of_run = await http.acall("GET", f"training_runs/{run}/checkpoints", headers=header)
        assert len(of_run.json()["checkpoints"]) == len(shown) == of_run.json()["cursor"]["total_count"]
    assert await listed(http) == ["e", "a"]


@scenario
async def test_t27_ids_have_two_segments(h: Harness, http: Http) -> None:
    """T27, 7.1, 7.8: suffixes follow both; anything else is 400, an unknown one 404."""
    run = await h.open_run()
    path = await saved(h, run, 1, "a")
    assert (await http.acall("POST", rest(path, "/publish"))).status_code == 200
    for call in (("DELETE", "weights"), ("POST", "weights/publish"), ("DELETE", "weights/a/b"), ("DELETE", "other/a")):
        answer = await http.acall(call[0], f"training_runs/{run}/checkpoints/{call[1]}")
        assert answer.status_code == 400, call
        assert answer.json()["detail"]
    for method, suffix in (("DELETE", ""), ("POST", "/publish"), ("DELETE", "/publish"), ("GET", "/archive")):
        answer = await http.acall(method, rest(f"tinker://{run}/weights/b", suffix))
        assert answer.status_code == 404, (method, suffix)
    assert (await http.acall("DELETE", f"training_runs/{run}/checkpoints/weights/%2e%2e")).status_code in (400, 404)
    assert await listed(http) == ["a"]


# ---- lifetime and publication ----


@scenario
async def test_e33_e34_publishing_is_idempotent(h: Harness, http: Http) -> None:
    """E33, E34, T4: 2xx also when it is so already; never 409."""
    run = await h.open_run()
    path = await saved(h, run, 1, "a")
    for method, public in (("POST", True), ("POST", True), ("DELETE", False), ("DELETE", False)):
        assert (await http.acall(method, rest(path, "/publish"))).status_code == 200
        answer = (await http.acall("GET", "checkpoints")).json()
        assert answer["checkpoints"][0]["public"] is public
    events = await h.daemon._db.run(lambda db: audit.between(db, 0, time.time() + 1, "checkpoint"))
    assert [e.event for e in events] == ["checkpoint_create", "checkpoint_publish", "checkpoint_unpublish"]


@scenario
async def test_e35_lifetimes_are_set_cleared_and_enforced(h: Harness, http: Http) -> None:
    """E35, C1: shown as expires_at; null removes; once over, the checkpoint is gone and so are its bytes."""
    run = await h.open_run()
    path = await saved(h, run, 1, "a")
    await saved(h, run, 2, "kept")

    async def put(body: Any) -> int:
        content = json.dumps(body).encode()
        return (await http.acall("PUT", rest(path, "/ttl"), content=content)).status_code

    async def expiry() -> str | None:
        return (await http.acall("GET", "checkpoints")).json()["checkpoints"][-1].get("expires_at")

    assert await put({"ttl_seconds": 3600}) == 200
    assert (await expiry() or "").endswith("Z")
    assert await put({"ttl_seconds": None}) == 200
    assert await expiry() is None
    for body in ({"ttl_seconds": 3599}, {"ttl_seconds": 11 * 365 * DAY}, {}, {"ttl_seconds": "1"}):
        assert await put(body) == 400, body
    assert await put({"ttl_seconds": 7200}) == 200
    await h.daemon._db.run(lambda db: checkpoints.set_expiry(db, path, time.time() - 1))
    assert await listed(http) == ["kept"]
    assert await put({"ttl_seconds": 3600}) == 404, "it has expired, though its files are still there"
    await h.daemon._housekeeping.once()
    assert len(folders(h)) == 1
    with pytest.raises(NotFound):
        await h.daemon.checkpoint(path)


def test_changes_survive_a_restart_and_a_lost_store(tmp_path: Path) -> None:
    """Published, expiry: in the rows and in the manifests; a deleted checkpoint does not come back from its folder."""

    async def main() -> None:
        h = await Harness(tmp_path).start()
        run = await h.open_run()
        a, b = await saved(h, run, 1, "a"), await saved(h, run, 2, "b")
        sampler = await h.daemon.create_sampler(h.session, 1, None, b)
        await h.daemon.life.publish(a, True)
        await h.daemon.life.set_ttl(a, 7200)
        expires = (await h.daemon.checkpoint(a)).expires_at
        await h.daemon.life.delete(b)
        assert len(folders(h)) == 2, "a sampler draws from b"
        await h.kill()
        await h.start()
        await h.daemon._housekeeping.once()
        found = await h.daemon.checkpoint(a)
        assert (found.public, found.expires_at) == (True, expires)
        with pytest.raises(NotFound):
            await h.daemon.checkpoint(b)
        assert (await h.result(await h.sample(sampler, 1))).error is None
        await h.daemon.stop()
        for file in tmp_path.glob("openrl.sqlite*"):
            file.unlink()
        await h.start()
        found = await h.daemon.checkpoint(a)
        assert (found.public, found.expires_at) == (True, expires)
        assert (await h.daemon.life.page(10, 0)).total == 1
        await h.daemon.stop()

    asyncio.run(main())


# ---- deleting ----


@scenario
async def test_e32_a_delete_frees_the_bytes_and_may_be_repeated(h: Harness, http: Http) -> None:
    """E32, 7.8: gone at once; 2xx when the first answer got lost; the name can be used again."""
    run = await h.open_run()
    path = await saved(h, run, 1, "a")
    assert (await http.acall("DELETE", rest(path))).status_code == 204
    assert folders(h) == []
    assert await listed(http) == []
    assert (await http.acall("DELETE", rest(path))).status_code == 204
    assert (await http.acall("POST", rest(path, "/publish"))).status_code == 404
    assert await saved(h, run, 2, "a") == path
    assert await listed(http) == ["a"]
    assert (await http.acall("DELETE", rest(path))).status_code == 204
    assert await listed(http) == []


@scenario
async def test_a_delete_waits_for_samplers(h: Harness, http: Http) -> None:
    """S15: an open sampler goes on with the same weights; its bytes go once its session is finished."""
    run = await h.open_run()
    await h.weight(await h.step(run, 1))
    path = await saved(h, run, 2, "a")
    sampler = await h.daemon.create_sampler(h.session, 1, None, path)
    assert (await http.acall("DELETE", rest(path))).status_code == 204
    assert await listed(http) == []
    with pytest.raises(NotFound):
        await h.daemon.create_sampler(h.session, 2, None, path)
    await h.daemon._housekeeping.once()
    assert len(folders(h)) == 1
    assert (await h.result(await h.sample(sampler, 1))).error is None
    assert len(h.worker.jobs) == 1
    await h.daemon.finish_session(h.session, "success", None)
    await h.daemon._housekeeping.once()
    assert folders(h) == []


@scenario
async def test_a_delete_waits_for_waiting_samples(h: Harness, http: Http) -> None:
    run = await h.open_run()
    path = await saved(h, run, 1, "a")
    sampler = await h.daemon.create_sampler(h.session, 1, None, path)
    h.worker.hold = asyncio.Event()
    request = await h.sample(sampler, 1)
    await h.daemon.finish_session(h.session, "success", None)
    await h.daemon.life.delete(path)
    assert len(folders(h)) == 1
    h.worker.hold.set()
    assert (await h.result(request)).error is None
    await h.daemon._housekeeping.once()
    assert folders(h) == []


@scenario
async def test_an_overwritten_folder_goes_when_its_sampler_is_done(h: Harness, http: Http) -> None:
    run = await h.open_run()
    path = await saved(h, run, 1, "a")
    await h.daemon.create_sampler(h.session, 1, None, path)
    assert (await h.result(await h.save(run, 2, "a", overwrite=True))).error is None
    await h.daemon._housekeeping.once()
    assert len(folders(h)) == 2
    await h.daemon.finish_session(h.session, "success", None)
    await h.daemon._housekeeping.once()
    assert len(folders(h)) == 1
    assert await listed(http) == ["a"]


def test_a_replay_loads_what_was_loaded_though_the_name_is_gone(tmp_path: Path) -> None:
    """A run that loaded a checkpoint and cannot be snapshotted needs its files after a crash: deleted or overwritten,
    they stay until a snapshot covers the load."""

    async def main() -> None:
        h = await Harness(tmp_path).start()
        source = await h.open_run()
        await h.train(source, 1, 5)
        await h.weight(await h.step(source, 2))
        path = await saved(h, source, 3, "a")
        run = await h.open_run(1)
        h.worker.die_on = lambda op: isinstance(op, messages.Save)  # the snapshot after the load kills the worker
        assert (await h.result(await h.load(run, 1, path))).error is None
        await h.daemon.life.delete(path)
        assert len(folders(h)) == 1
        await h.kill()
        await h.start()
        await h.daemon._housekeeping.once()
        assert len(folders(h)) == 1
        assert await h.weight(await h.step(run, 2)) == expected_weight(5, 0)
        await h.daemon.stop()  # snapshots
        await h.start()
        await h.daemon._housekeeping.once()
        assert folders(h) == []
        await h.daemon.stop()

    asyncio.run(main())


# ---- copies ----


async def copy(http: Http, body: dict[str, Any], **headers: str) -> Any:
    content = json.dumps(body).encode()
    return await http.acall("POST", "copy_weights", content=content, headers=headers)


@scenario
async def test_e29_copy_into_a_project(h: Harness, http: Http) -> None:
    """E29, 7.5 (0.34.0+): same segment and name under a new run that cannot be trained; de-duplicated by key."""
    run = await h.open_run()
    await h.train(run, 1, 7)
    await h.weight(await h.step(run, 2))
    path = await saved(h, run, 3, "a")
    await h.daemon.life.set_ttl(path, 7200)
    body = {"destination_project_id": "p1", "source_path": path}
    first = await copy(http, body, **{"x-idempotency-key": "k1"})
    assert first.status_code == 200, first.text
    copied: str = first.json()["tinker_path"]
    assert copied.endswith("/weights/a")
    assert copied != path
    assert (await copy(http, body, **{"x-idempotency-key": "k1"})).json()["tinker_path"] == copied
    assert (await copy(http, body, **{"x-idempotency-key": "k2"})).json()["tinker_path"] not in (path, copied)
    found = await h.daemon.checkpoint(copied)
    assert found.expires_at is None, "expiry is not inherited"
    await h.daemon.life.delete(path)
    other = await h.open_run(1)
    assert (await h.result(await h.load(other, 1, copied))).error is None
    assert await h.weight(await h.step(other, 2)) == expected_weight(7, 0)
    holder = RunId(copied.removeprefix("tinker://").partition("/")[0])
    assert h.daemon.run(holder).state == "closed"
    assert (await h.daemon.rest.session(h.session)) is not None
    for bad in ({**body, "ttl_seconds": 60}, {"source_path": "tinker://x"}):
        assert (await copy(http, bad)).status_code == 400
    assert (await copy(http, body)).status_code == 404, "the source is deleted"


@scenario
async def test_e29_copy_into_a_session(h: Harness, http: Http) -> None:
    """7.5 (0.26.2 to 0.30.4): the run that the client names; de-duplicated by it."""
    run = await h.open_run()
    path = await saved(h, run, 1, "a")
    session = await h.daemon.create_session(NewSession("0.26.2"), None)
    body = {"session_id": session, "model_seq_id": 4, "source_path": path, "ttl_seconds": 3600}
    for _ in range(2):
        answer = await copy(http, body)
        assert answer.json() == {"tinker_path": f"tinker://{session}:train:4/weights/a"}
    assert (await h.daemon.checkpoint(answer.json()["tinker_path"])).expires_at is not None
    taken = {"session_id": h.session, "model_seq_id": 0, "source_path": path}
    assert (await copy(http, taken)).status_code == 400
    assert (await copy(http, {**body, "session_id": "none"})).status_code == 404
    assert (await copy(http, {"session_id": session, "source_path": path})).status_code == 400


@scenario
async def test_t52_access_tokens(h: Harness, http: Http) -> None:
    """7.3, 7.5, T52: only this server's own key or token opens weights; a foreign one is refused, and never stored."""
    run = await h.open_run()
    path = await saved(h, run, 1, "a")
    header = "x-tinker-weights-access-token"
    body = {"destination_project_id": "p", "source_path": path}
    credentials = http.app.state.credentials
    own_token: str = credentials.issue(credentials.principal(KEY))
    for token, status in ((KEY, 200), (own_token, 200), ("tml-someone-else", 401), ("eyJ.a.b", 401)):
        answer = await copy(http, body, **{header: token})
        assert answer.status_code == status, answer.text
        assert token not in answer.text
    assert (await copy(http, {**body, "weights_access_token": "tml-other"})).status_code == 401
    load = {"model_id": run, "seq_id": 2, "path": path, "optimizer": True}
    promised = await http.acall(
        "POST", "load_weights", content=json.dumps({**load, "weights_access_token": "tml-secret-other"}).encode()
    )
    future = await http.acall("POST", "retrieve_future", content=json.dumps(promised.json()).encode())
    assert future.json()["category"] == "user"
    assert "access token" in future.json()["error"]
    promised = await http.acall(
        "POST", "load_weights", content=json.dumps({**load, "seq_id": 3, "weights_access_token": KEY}).encode()
    )
    future = await http.acall("POST", "retrieve_future", content=json.dumps(promised.json()).encode())
    assert future.json()["path"] == path
    new = {"session_id": h.session, "model_seq_id": 9, "path": path, "optimizer": False}
    answer = await http.acall(
        "POST", "load_weights", content=json.dumps({**new, "weights_access_token": "tml-secret-other"}).encode()
    )
    assert answer.status_code == 401
    data = b"".join(file.read_bytes() for file in h.settings.data_dir.glob("openrl.sqlite*"))
    assert KEY.encode() not in data
    assert b"tml-secret-other" not in data


# ---- downloads ----


def lay_adapter(folder: Path) -> None:
    rng = np.random.default_rng(0)
    tensors = {
        "model.layers.0.self_attn.q_proj.lora_A": rng.normal(size=(2, 8)).astype(np.float32),
        "model.layers.0.self_attn.q_proj.lora_B": rng.normal(size=(8, 2)).astype(np.float32),
        "lm_head.lora_A": rng.normal(size=(2, 8)).astype(np.float32),
        "lm_head.lora_B": rng.normal(size=(30, 2)).astype(np.float32),
    }
    write_adapter(folder, LoraSpec(2, 0), tensors, "test/scalar")


@scenario
async def test_l3_archive(h: Harness, http: Http) -> None:
    """L3, 7.7, T46: 302 to an absolute URL that needs no key and says when it ends; ranges; none for others."""
    run = await h.open_run()
    path = await saved(h, run, 1, "a")
    assert (await http.acall("GET", rest(path, "/archive"))).status_code == 400, "a scalar checkpoint has no adapter"
    lay_adapter(h.daemon.life.folder((await h.daemon.checkpoint(path)).folder))
    answer = await http.acall("GET", rest(path, "/archive"))
    assert answer.status_code == 302
    lifetime = parsedate_to_datetime(answer.headers["expires"]).timestamp() - time.time()
    assert lifetime >= 15 * 60
    url = answer.headers["location"]
    assert url.startswith("http://localhost:8000/signed/")
    keyless = Http(http.app, key=None)
    target = "//" + url.removeprefix("http://localhost:8000/")
    full = await keyless.acall("GET", target)
    assert full.status_code == 200
    assert int(full.headers["content-length"]) == len(full.content)
    with tarfile.open(fileobj=io.BytesIO(full.content)) as tar:
        assert sorted(tar.getnames()) == ["adapter_config.json", "adapter_model.safetensors", "checkpoint_complete"]
    ranges = {"bytes=100-299": (100, 300), "bytes=9000-": (9000, None), "bytes=-50": (-50, None)}
    for wanted, (start, stop) in ranges.items():
        part = await keyless.acall("GET", target, headers={"range": wanted})
        assert part.status_code == 206
        assert part.content == full.content[start:stop]
        assert part.headers["content-range"].endswith(f"/{len(full.content)}")
    assert (await keyless.acall("GET", target, headers={"range": "bytes=99999999-"})).status_code == 416
    resumed = {"range": "bytes=10-", "if-range": full.headers["etag"]}
    assert (await keyless.acall("GET", target, headers=resumed)).status_code == 206
    changed = {"range": "bytes=10-", "if-range": '"other"'}
    assert (await keyless.acall("GET", target, headers=changed)).status_code == 200
    head = await keyless.acall("HEAD", target)
    assert head.headers["content-length"] == full.headers["content-length"]
    assert (await keyless.acall("GET", target.replace("/a--", "/b--"))).status_code in (401, 403)
    await h.daemon.life.delete(path)
    assert (await keyless.acall("GET", target)).status_code == 404


@scenario
async def test_e26_e31_external_weights(h: Harness, http: Http) -> None:
    """E26, E31, 7.6: a URL for each file, without our manifest, of at least 15 minutes; an existing name fails."""
    run = await h.open_run()
    done = await external(h, run, 1, SaveExternal("e", ttl_seconds=3600))
    answer = json.loads(done.body)
    path = answer["path"]
    assert path == f"tinker://{run}/external_weights/e"
    again = await external(h, run, 2, SaveExternal("e"))
    assert again.category == "user", "C1"
    urls = (await http.acall("GET", rest(path, "/external_weights_urls"))).json()
    assert list(urls["urls"]) == ["scalar.json"]
    assert urls["expires"].endswith("Z")
    target = "//" + urls["urls"]["scalar.json"].removeprefix("http://localhost:8000/")
    file = await Http(http.app, key=None).acall("GET", target)
    assert file.json() == {"weight": 1}
    assert int(file.headers["content-length"]) == answer["size_bytes"]
    training = await saved(h, run, 3, "t")
    assert (await http.acall("GET", rest(training, "/external_weights_urls"))).status_code == 400
    assert (await http.acall("GET", rest(path, "/archive"))).status_code == 400
    assert (await h.result(await h.load(run, 4, path))).category == "user"
    assert (await copy(http, {"source_path": path})).status_code == 400
    for bad in (SaveExternal("a/b"), SaveExternal("x", ttl_seconds=1)):
        seq = 5 if bad.name == "a/b" else 6
        assert (await external(h, run, seq, bad)).category == "user"


@scenario
async def test_age_encryption(h: Harness, http: Http) -> None:
    """7.2: files have an .age suffix and open with the private key only; bad recipients fail the future."""
    run = await h.open_run()
    identity = pyrage.x25519.Identity.generate()
    done = await external(h, run, 1, SaveExternal("e", recipients=(str(identity.to_public()),)))
    assert done.error is None, done.error
    path = json.loads(done.body)["path"]
    urls = (await http.acall("GET", rest(path, "/external_weights_urls"))).json()["urls"]
    assert list(urls) == ["scalar.json.age"]
    target = "//" + urls["scalar.json.age"].removeprefix("http://localhost:8000/")
    content = (await Http(http.app, key=None).acall("GET", target)).content
    assert b"weight" not in content
    assert json.loads(pyrage.decrypt(content, [identity])) == {"weight": 1}
    assert list(h.daemon.life.folder((await h.daemon.checkpoint(path)).folder).glob("scalar.json")) == []
    for seq, recipients in ((2, ("age1nonsense",)), (3, ("ssh-ed25519 AAAA",)), (4, ("x",) * 11)):
        failed = await external(h, run, seq, SaveExternal("f", recipients=recipients))
        assert failed.category == "user"
        assert "age_encryption_recipients" in (failed.error or "")


@scenario
async def test_without_the_library_encryption_is_refused(h: Harness, http: Http) -> None:
    run = await h.open_run()
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "pyrage", None)
        failed = await external(h, run, 1, SaveExternal("e", recipients=("age1x",)))
        assert "openrl[age]" in (failed.error or "")
        assert (await external(h, run, 2, SaveExternal("e"))).error is None


# ---- speed ----


@scenario
async def test_a_thousand_checkpoints_do_not_slow_a_page(h: Harness, http: Http) -> None:
    """Issue 3: a page of a full store is as quick as one of an empty one (within a generous bound here)."""
    run = await h.open_run()
    one = await h.daemon.checkpoint(await saved(h, run, 1, "a"))

    async def p50() -> float:
        times: list[float] = []
        for _ in range(30):
            started = time.perf_counter()
            await h.daemon.life.page(20, 0)
            times.append(time.perf_counter() - started)
        return sorted(times)[15]

    await h.daemon._db.run(
        lambda db: [checkpoints.put(db, _renamed(one, number)) for number in range(20)] and None,
    )
    before = await p50()
    await h.daemon._db.run(lambda db: [checkpoints.put(db, _renamed(one, number)) for number in range(20, 1000)])
    assert await p50() < 3 * before + 0.002


def _renamed(one: Any, number: int) -> Any:
    from dataclasses import replace

    path = f"{one.path}-{number}"
    return replace(one, path=path, name=f"{one.name}-{number}", created_at=one.created_at + number)


def test_kinds_in_a_restarted_list(tmp_path: Path) -> None:
    """Sampler checkpoints, named, are found again after a kill."""

    async def main() -> None:
        h = await Harness(tmp_path).start()
        run = await h.open_run()
        await h.result(await h.submit(run, 1, Op.SAVE_SAMPLER, SaveSampler("s")))
        await h.kill()
        await h.start()
        assert await listed(http_of(h)) == ["s"]
        sampler = await h.daemon.create_sampler(h.session, 1, None, f"tinker://{run}/sampler_weights/s")
        assert sampler == SamplerId(f"{h.session}:sample:1")
        await h.daemon.stop()

    asyncio.run(main())

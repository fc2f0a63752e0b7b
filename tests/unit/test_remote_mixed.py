"""Models of this machine and of a remote in one server: each call finds its place, lists show both."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import zstandard

from openrl.backends.remote.mixed.book import Book, Place, remote_for
from openrl.backends.remote.mixed.service import MixedService
from openrl.server.app import create_app
from openrl.settings import RemoteSettings
from openrl.wire import tinker_pb2 as pb
from support.daemons import BASE, Harness, expected_weight
from support.far import FAR_KEY, SECRET, FarServer, listening, server_settings
from support.http import KEY
from support.persistent import Persistent, training

FAR_BASE = "alias/scalar"  # both servers have it; the rules send it to the far one


class Nobody:
    """In the place of a daemon that the test starts and stops itself."""

    async def start(self) -> None: ...

    async def stop(self) -> None: ...

    def refuse_work(self) -> None: ...

    async def wind_down(self, seconds: float) -> None: ...


class Mixed:
    def __init__(self, here: Harness, far: FarServer, mixed: MixedService, client: Persistent) -> None:
        self.here, self.far, self.mixed, self.client = here, far, mixed, client

    async def step(self, run: str, seq: int, tokens: list[int]) -> int:
        """A pass and an update; returns the weight."""
        done = await self.client.result(await self.client.promise("forward_backward", training(run, seq, tokens)))  # type: ignore[arg-type]
        assert "error" not in done, done
        body = {"model_id": run, "seq_id": seq + 1, "adam_params": {}}
        done = await self.client.result(await self.client.promise("optim_step", body))
        return int(done["metrics"]["weight:sum"])

    def runs_here(self) -> set[str]:
        return {str(run) for run in self.here.worker.runs}

    def runs_there(self) -> set[str]:
        return {str(run) for run in self.far.harness.worker.runs}


@asynccontextmanager
async def mixed(folder: Path, monkeypatch: pytest.MonkeyPatch, far: FarServer | None = None) -> AsyncGenerator[Mixed]:
    """A daemon here, one far away, and a server that mixes them."""
    own_far = far is None
    far = far or await FarServer(folder / "far").start()
    monkeypatch.setenv("OPENRL_REMOTES", str(folder / "remotes.toml"))
    monkeypatch.setenv("FAR_KEY", FAR_KEY)
    (folder / "remotes.toml").write_text(f'[remotes.far]\nurl = "http://127.0.0.1:{far.port}"\ntoken = "env:FAR_KEY"\n')
    here = await Harness(folder / "here").start()
    server = server_settings()
    settings = replace(here.settings, server=server, remote=RemoteSettings(routes={"alias/*": "far"}))
    service = MixedService(Nobody(), settings, here.daemon.keys.ring)
    app = create_app(here.daemon, server, KEY, SECRET, None, [service.middleware], [service.route])
    await service.start()
    async with listening(app) as url, Persistent(url) as client:
        yield Mixed(here, far, service, client)
    await service.stop()
    await here.kill()
    if own_far:
        await far.kill()


# ---- the rules and the book ----


def test_the_first_pattern_that_matches_counts() -> None:
    routes = {"Qwen/Qwen3-0.6B": "home", "Qwen/*": "gke", "*-Instruct": "lab"}
    assert remote_for("Qwen/Qwen3-0.6B", routes) == "home"
    assert remote_for("Qwen/Qwen3-8B-Instruct", routes) == "gke"
    assert remote_for("meta-llama/Llama-3.2-1B-Instruct", routes) == "lab"
    assert remote_for("local/tiny", routes) is None


def test_the_book_knows_ids_by_their_session_and_aliases_by_their_run(tmp_path: Path) -> None:
    book = Book(tmp_path / "book.jsonl")
    book.made("l1", {"sdk_version": "0.38.0", "tags": ["a"]})
    book.mirrored("l1", "gke", "r1")
    book.renamed("l1:train:2", "gke", "r1:train:2")
    book.owns("lab", "odd-sampler-id")
    for known in (book, Book(tmp_path / "book.jsonl")):
        assert known.made_with("l1") == {"sdk_version": "0.38.0", "tags": ["a"]}
        assert known.counterparts("l1") == {"gke": "r1"}
        assert known.place("r1:train:0") == Place("gke", "r1:train:0")
        assert known.place("r1:train:0:17") == Place("gke", "r1:train:0:17")
        assert known.place("l1:train:2") == Place("gke", "r1:train:2")
        assert known.place("l1:train:2:5") == Place("gke", "r1:train:2:5")
        assert known.place("l1:train:1") == Place(None, "l1:train:1")
        assert known.place("l1:train:20") == Place(None, "l1:train:20")
        assert known.path_place("tinker://l1:train:2/weights/x") == Place("gke", "tinker://r1:train:2/weights/x")
        assert known.place("odd-sampler-id") == Place("lab", "odd-sampler-id")


def test_a_line_that_was_cut_off_costs_nothing_else(tmp_path: Path) -> None:
    book = Book(tmp_path / "book.jsonl")
    book.mirrored("l1", "gke", "r1")
    with (tmp_path / "book.jsonl").open("ab") as file:
        file.write(b'{"session": "l2", "rem')
    assert Book(tmp_path / "book.jsonl").counterparts("l1") == {"gke": "r1"}


# ---- calls find their place ----


def test_base_models_go_where_the_rules_send_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def check() -> None:
        async with mixed(tmp_path, monkeypatch) as m:
            ours = await m.client.open_run()
            theirs = await m.client.open_run(1, FAR_BASE)
            assert ours == f"{m.client.session}:train:0"
            assert theirs.partition(":")[0] != m.client.session  # ids stay those of the remote
            assert await m.step(ours, 1, [5]) == expected_weight(5)
            assert await m.step(theirs, 1, [7]) == expected_weight(7)
            assert (m.runs_here(), m.runs_there()) == ({ours}, {theirs})
            assert (await m.client.post("get_info", {"model_id": theirs}))["model_name"] == FAR_BASE

    asyncio.run(check())


def test_samplers_and_checkpoints_follow_their_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def check() -> None:
        async with mixed(tmp_path, monkeypatch) as m:
            theirs = await m.client.open_run(0, FAR_BASE)
            assert await m.step(theirs, 1, [7]) == 9
            save = {"model_id": theirs, "seq_id": 3, "path": "x"}
            path = (await m.client.result(await m.client.promise("save_weights_for_sampler", save)))["path"]
            assert path == f"tinker://{theirs}/sampler_weights/x"
            ephemeral = {"model_id": theirs, "seq_id": 4, "sampling_session_seq_id": 0}
            saved = await m.client.result(await m.client.promise("save_weights_for_sampler", ephemeral))
            opened = {"session_id": m.client.session, "sampling_session_seq_id": 1, "model_path": path}
            by_path = await m.client.post("create_sampling_session", opened)
            base = {"session_id": m.client.session, "sampling_session_seq_id": 2, "base_model": FAR_BASE}
            by_base = await m.client.post("create_sampling_session", base)
            for sampler, weight in ((saved, 9), (by_path, 9), (by_base, 0)):
                identifier = sampler["sampling_session_id"]
                body = {"sampling_session_id": identifier, "seq_id": 1, "prompt": {"chunks": [{"tokens": [1]}]}}
                done = await m.client.result(await m.client.promise("asample", body))
                assert done["sequences"][0]["tokens"] == [weight]
                assert (await m.client.get(f"samplers/{identifier}"))["sampler_id"] == identifier
                joined = await m.client.post("join_sampling_session", {"sampling_session_id": identifier})
                assert joined["client_counter"] == 1
                target = {"type": "sampling_session", "sampling_session_id": identifier, "cloned_sampler_id": 0}
                news = await m.client.post("retrieve_futures", {"target": target, "prev_cursor": 0})
                assert [ended["request_id"] for ended in news["completions"]] == [f"{identifier}:1"]
            assert not m.here.worker.jobs
            assert (await m.client.post("weights_info", {"tinker_path": path}))["base_model"] == FAR_BASE
            assert (
                await m.client.request("DELETE", f"training_runs/{theirs}/checkpoints/sampler_weights/x")
            ).status_code == 204

    asyncio.run(check())


def test_a_run_that_the_client_names_itself_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The SDK computes the id of a run that it makes from a checkpoint, from the session that it knows (T19)."""

    async def check() -> None:
        async with mixed(tmp_path, monkeypatch) as m:
            theirs = await m.client.open_run(0, FAR_BASE)
            await m.step(theirs, 1, [7])
            save = {"model_id": theirs, "seq_id": 3, "path": "x"}
            path = (await m.client.result(await m.client.promise("save_weights", save)))["path"]
            load = {"session_id": m.client.session, "model_seq_id": 1, "path": path, "optimizer": True}
            done = await m.client.result(await m.client.promise("load_weights", load))
            named = f"{m.client.session}:train:1"
            assert done["model_id"].endswith(":train:1")
            assert await m.step(named, 1, [4]) == expected_weight(7, 4)
            request = pb.ForwardBackwardRequest(model_id=named, seq_id=3, loss_fn="cross_entropy")
            datum = request.data.add()
            datum.model_input.add().encoded_text.tokens = b"\x05\x00\x00\x00"
            target = datum.loss_fn_inputs["target_tokens"]
            target.dense, target.dtype = b"\x05" + b"\x00" * 7, pb.DTYPE_INT64
            plain = request.SerializeToString()
            proto = {"content_type": "application/x-protobuf"}
            assert "error" not in await m.client.result(await m.client.promise("forward_backward", plain, **proto))
            request.seq_id = 4
            packed = zstandard.compress(request.SerializeToString())
            promised = await m.client.promise("forward_backward", packed, content_encoding="zstd", **proto)
            assert "error" not in await m.client.result(promised)
            step = {"model_id": named, "seq_id": 5, "adam_params": {}}
            weight = (await m.client.result(await m.client.promise("optim_step", step)))["metrics"]["weight:sum"]
            assert int(weight) == expected_weight(7, 4, 10)
            into = {"model_id": named, "seq_id": 6, "path": path, "optimizer": True}
            assert "error" not in await m.client.result(await m.client.promise("load_weights", into))
            assert (await m.client.get(f"training_runs/{named}"))["base_model"] == FAR_BASE
            assert not m.runs_here()

    asyncio.run(check())


def test_everything_is_found_again_after_a_restart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def check() -> None:
        far = await FarServer(tmp_path / "far").start()
        async with mixed(tmp_path, monkeypatch, far) as m:
            theirs = await m.client.open_run(0, FAR_BASE)
            await m.step(theirs, 1, [7])
            session = m.client.session
        async with mixed(tmp_path, monkeypatch, far) as m:
            assert await m.step(theirs, 3, [4]) == expected_weight(7, 4)
            body = {"session_id": session, "model_seq_id": 1, "base_model": FAR_BASE, "lora_config": {"rank": 8}}
            other = (await m.client.result(await m.client.promise("create_model", body)))["model_id"]
            assert other.partition(":")[0] == theirs.partition(":")[0]  # the same counterpart
        await far.kill()

    asyncio.run(check())


def test_what_was_made_elsewhere_is_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint that was pushed to the remote, or a run of another client of it."""

    async def check() -> None:
        far = await FarServer(tmp_path / "far").start()
        run = await far.harness.open_run()
        await far.harness.result(await far.harness.train(run, 1, 7))
        await far.harness.weight(await far.harness.step(run, 2))
        await far.harness.result(await far.harness.save(run, 3, "x"))
        async with mixed(tmp_path, monkeypatch, far) as m:
            await m.client.open_run()
            path = f"tinker://{run}/weights/x"
            assert (await m.client.post("weights_info", {"tinker_path": path}))["lora_rank"] == 8
            load = {"session_id": m.client.session, "model_seq_id": 1, "path": path, "optimizer": True}
            assert "error" not in await m.client.result(await m.client.promise("load_weights", load))
            assert await m.step(f"{m.client.session}:train:1", 1, [4]) == expected_weight(7, 4)
            missing = await m.client.once("weights_info", {"tinker_path": "tinker://nobody:train:0/weights/x"})
            assert missing.status_code == 404
        await far.kill()

    asyncio.run(check())


# ---- sessions ----


def test_signs_of_life_and_the_end_reach_the_counterpart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def check() -> None:
        async with mixed(tmp_path, monkeypatch) as m:
            theirs = await m.client.open_run(0, FAR_BASE)
            there = theirs.partition(":")[0]
            sessions = m.far.harness.daemon._sessions  # no route shows the last sign of life
            before = sessions.get(there).last_seen  # type: ignore[arg-type]
            await m.client.post("session_heartbeat", {"session_id": m.client.session})
            await _until(lambda: sessions.get(there).last_seen > before)  # type: ignore[arg-type]
            found = await m.client.get(f"sessions/{m.client.session}")
            assert found["training_run_ids"] == [theirs]
            await m.client.request("POST", f"sessions/{m.client.session}/finish", {"reason": {"type": "success"}})
            await _until(lambda: str(sessions.get(there).state) == "finished")  # type: ignore[arg-type]

    asyncio.run(check())


async def _until(condition: Any) -> None:
    for _ in range(200):
        if condition():
            return
        await asyncio.sleep(0.02)
    raise AssertionError


def test_the_counterpart_is_made_like_the_session_and_only_when_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def check() -> None:
        async with mixed(tmp_path, monkeypatch) as m:
            body = {"sdk_version": "0.38.0", "tags": ["a"], "user_metadata": {"k": "v"}, "project_id": "p"}
            m.client.session = (await m.client.post("create_session", body))["session_id"]
            assert not (await m.far.harness.daemon.rest.sessions(10, 0))
            new = {"session_id": m.client.session, "base_model": FAR_BASE, "lora_config": {"rank": 8}}
            both = [m.client.promise("create_model", new | {"model_seq_id": number}) for number in (0, 1)]
            made = [(await m.client.result(request))["model_id"] for request in await asyncio.gather(*both)]
            assert len({run.partition(":")[0] for run in made}) == 1
            (there,) = await m.far.harness.daemon.rest.sessions(10, 0)
            content = await m.far.harness.daemon.rest.session(there)
            assert content.session.user_metadata == {"k": "v"}
            assert content.session.project_id == "p"

    asyncio.run(check())


def test_a_stranger_s_session_is_not_carried_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def check() -> None:
        async with mixed(tmp_path, monkeypatch) as m:
            body = {"session_id": "nobody", "model_seq_id": 0, "base_model": FAR_BASE, "lora_config": {"rank": 8}}
            assert (await m.client.once("create_model", body)).status_code == 404
            assert not (await m.far.harness.daemon.rest.sessions(10, 0))

    asyncio.run(check())


# ---- lists ----


def test_lists_show_both(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def check() -> None:
        async with mixed(tmp_path, monkeypatch) as m:
            runs = [await m.client.open_run(n, base) for n, base in enumerate((BASE, FAR_BASE, BASE, FAR_BASE))]
            for run in runs:
                save = {"model_id": run, "seq_id": 1, "path": "x"}
                await m.client.result(await m.client.promise("save_weights", save))
            models = (await m.client.get("get_server_capabilities"))["supported_models"]
            assert {model["model_name"]: model.get("remote") for model in models} == {BASE: None, FAR_BASE: "far"}
            listed = await m.client.get("training_runs", limit="3", offset="0")
            assert [run["training_run_id"] for run in listed["training_runs"]] == runs[:0:-1]
            assert listed["cursor"] == {"offset": 0, "limit": 3, "total_count": 4}
            rest = await m.client.get("training_runs", limit="3", offset="3")
            assert [run["training_run_id"] for run in rest["training_runs"]] == runs[:1]
            found = await m.client.get("checkpoints", limit="10")
            assert {c["tinker_path"] for c in found["checkpoints"]} == {f"tinker://{run}/weights/x" for run in runs}
            assert (await m.client.get("sessions"))["sessions"] == [m.client.session]
            events = (await m.client.get("audit", event_type="checkpoints"))["entries"]
            assert {event["model_id"] for event in events} == set(runs)
            status = await m.client.get("status")
            assert status["remotes"][0]["state"] == "connected"
            assert status["routes"] == {"alias/*": "far"}

    asyncio.run(check())


def test_without_the_remote_the_rest_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def check() -> None:
        far = await FarServer(tmp_path / "far").start()
        async with mixed(tmp_path, monkeypatch, far) as m:
            ours = await m.client.open_run()
            await far.kill()
            link = m.mixed.links[0]
            link.suspect()
            await _until(lambda: not link.state.connected)
            assert await m.step(ours, 1, [5]) == expected_weight(5)
            listed = await m.client.get("training_runs")
            assert [run["training_run_id"] for run in listed["training_runs"]] == [ours]
            assert listed["unreachable"] == ["far"]
            models = await m.client.get("get_server_capabilities")
            assert [model["model_name"] for model in models["supported_models"]] == [BASE]

    asyncio.run(check())


def test_flags_for_clients(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ids in bodies are replaced, which compression would hide; a loss would have to be known in two places."""

    async def check() -> None:
        async with mixed(tmp_path, monkeypatch) as m:
            flags = await m.client.post("client/config", {"sdk_version": "0.38.0"})
            assert flags["proto_compress_fwdbwd"] is False
            assert flags["custom_loss_server_side"] is False
            assert flags["parallel_fwdbwd_chunks"] is True

    asyncio.run(check())


def test_external_weights_of_a_remote_can_be_fetched_through_this_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def check() -> None:
        async with mixed(tmp_path, monkeypatch) as m:
            theirs = await m.client.open_run(0, FAR_BASE)
            answer = await m.client.request("GET", f"sessions/{theirs.partition(':')[0]}/trace_export")
            url = answer.json()["url"]
            assert "/remote-files/far/signed/traces/" in url
            async with httpx.AsyncClient(trust_env=False) as plain:
                assert (await plain.get(url)).json()
                assert (await plain.get(url.replace("signature=", "signature=0"))).status_code == 403

    asyncio.run(check())

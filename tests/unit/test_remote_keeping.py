"""What becomes of requests while the remote is away: sent again, joined, failed in words, withdrawn, replayed."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from typing import Any

import httpcore
import httpx
import pytest

from openrl.backends.remote import keeper
from support.http import Http
from support.remotes import Near, answer, lost, near, ok, unreachable

RUN = "s1:train:0"


def step(seq: int = 1) -> dict[str, Any]:
    return {"model_id": RUN, "seq_id": seq, "adam_params": {}}


def sample(seq: int = 1) -> dict[str, Any]:
    return {"sampling_session_id": "s1:sample:0", "seq_id": seq, "prompt": {"chunks": []}}


async def until(condition: Callable[[], object], seconds: float = 5.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)


def paths(n: Near) -> list[str]:
    return [call.url.path.rpartition("/")[2] for call in n.remote.calls]


# ---- sent again ----


def test_a_request_whose_answer_was_lost_is_sent_again_as_it_was(tmp_path: Path) -> None:
    async def check() -> None:
        async with near(tmp_path, lost(), answer(502, "<html>bad gateway"), ok({"request_id": "r1"})) as n:
            given = await n.send("optim_step", step())
            assert given.json() == {"request_id": "r1"}
            assert [call.content for call in n.remote.calls] == [json.dumps(step()).encode()] * 3

    asyncio.run(check())


def test_repetitions_join_the_first(tmp_path: Path) -> None:
    """The same number is the same request, whatever the body says (4.7): also once it is accepted."""

    async def check() -> None:
        async with near(tmp_path, slow, ok({"request_id": "other"})) as n:
            both = await asyncio.gather(n.send("optim_step", step()), n.send("optim_step", step()))
            again = await n.send("optim_step", step())
            assert [given.json()["request_id"] for given in (*both, again)] == ["r1"] * 3
            assert len(n.remote.calls) == 1

    async def slow(_request: httpx.Request) -> httpx.Response:
        await asyncio.sleep(0.1)
        return ok({"request_id": "r1"})

    asyncio.run(check())


def test_a_client_that_waits_long_is_told_to_come_again_and_finds_the_answer(tmp_path: Path) -> None:
    async def check() -> None:
        async with near(tmp_path, ok({"request_id": "r1"})) as n:
            n.remote.alive = False
            given = await n.send("optim_step", step())
            assert given.status_code == 503
            assert given.headers["retry-after"] == "1"
            n.remote.alive = True
            assert (await n.send("optim_step", step())).json() == {"request_id": "r1"}
            sent = [call for call in n.remote.calls if call.url.path.endswith("optim_step")]
            assert len(sent) <= 3

    asyncio.run(check())


def test_a_refusal_is_not_kept(tmp_path: Path) -> None:
    async def check() -> None:
        async with near(tmp_path, answer(400, {"detail": "no"}), ok({"request_id": "r1"})) as n:
            assert (await n.send("create_model", {"session_id": "s1", "model_seq_id": 0})).status_code == 400
            assert (await n.send("create_model", {"session_id": "s1", "model_seq_id": 0})).status_code == 200

    asyncio.run(check())


def test_back_pressure_of_the_remote_reaches_the_client_at_once(tmp_path: Path) -> None:
    """429 on a sample is a signal, not an error (6.4)."""

    async def check() -> None:
        async with near(tmp_path, answer(429, {"detail": "busy"}, retry_after="1"), ok({"request_id": "r"})) as n:
            assert (await n.send("asample", sample())).status_code == 429
            assert (await n.send("asample", sample())).status_code == 200

    asyncio.run(check())


def test_a_full_room_is_back_pressure_too(tmp_path: Path) -> None:
    async def check() -> None:
        async with near(tmp_path, unreachable(), memory_bytes=1000, disk_bytes=1000) as n:
            n.remote.alive = False
            body = {**step(), "padding": "x" * 700}
            await asyncio.gather(*[n.send("optim_step", body | {"seq_id": seq}) for seq in (1, 2)])
            assert (await n.send("optim_step", body | {"seq_id": 3})).status_code == 503
            refused = await n.send("asample", sample() | {"padding": "x" * 700})
            assert refused.status_code == 429
            assert "fill their room" in refused.json()["detail"]
            picture = (await n.acall("GET", "status")).json()["remote"]
            assert picture["kept_requests"] == picture["unanswered"] == 2
            assert picture["bytes_on_disk"] > 700

    asyncio.run(check())


# ---- the end of patience ----


def test_a_training_request_that_never_got_there_fails_as_a_future_and_is_withdrawn(tmp_path: Path) -> None:
    """A hole in the numbers would hold up the run for half an hour (O7). A refused request uses its number up (O5)."""

    async def check() -> None:
        async with near(tmp_path, ok({"request_id": "x"}), patience=0.2) as n:
            n.remote.alive = False
            given = await n.send("optim_step", step(4))
            assert given.status_code == 200
            ended = (await n.poll(given.json()["request_id"])).json()
            assert ended["category"] == "server"
            assert "has not answered for" in ended["error"]
            assert "five minutes" in ended["error"]
            assert "never arrived" in ended["error"]
            assert (tmp_path / "withdrawals.json").exists()
            n.remote.alive = True
            n.remote.calls.clear()
            await until(lambda: n.remote.calls)
            (told,) = n.remote.bodies()
            assert (told["model_id"], told["seq_id"]) == (RUN, 4)
            assert isinstance(told["adam_params"], str)  # which no server can carry out
            await until(lambda: not (tmp_path / "withdrawals.json").exists())

    asyncio.run(check())


def test_a_training_request_that_may_have_run_says_so(tmp_path: Path) -> None:
    async def check() -> None:
        async with near(tmp_path, lost(), patience=0.2) as n:
            given = await n.send("optim_step", step())
            ended = (await n.poll(given.json()["request_id"])).json()
            assert ended["category"] == "unknown"
            assert "may have been carried out" in ended["error"]

    asyncio.run(check())


def test_in_a_long_outage_new_requests_do_not_wait_all_over_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first chunk of a parallel group is sent when the others are answered, the step after it: each would wait."""
    monkeypatch.setattr(keeper, "_GRACE_S", 0.1)

    async def check() -> None:
        async with near(tmp_path, unreachable(), patience=1.0, server={"long_poll_seconds": 5.0}) as n:
            n.remote.alive = False
            started = time.monotonic()
            await n.send("optim_step", step(1))
            assert time.monotonic() - started > 0.9
            started = time.monotonic()
            ended = (await n.poll((await n.send("optim_step", step(2))).json()["request_id"])).json()
            assert time.monotonic() - started < 0.9
            assert "has not answered for 1 s" in ended["error"]

    asyncio.run(check())


def test_withdrawals_outlast_a_restart(tmp_path: Path) -> None:
    async def check() -> None:
        async with near(tmp_path, unreachable(), patience=0.1) as n:
            n.remote.alive = False
            await n.send("optim_step", step(7))
        async with near(tmp_path, ok({"request_id": "x"})) as n:
            await until(lambda: n.remote.calls)
            assert n.remote.bodies()[0]["seq_id"] == 7

    asyncio.run(check())


@pytest.mark.parametrize("path", ["create_model", "create_sampling_session", "asample"])
def test_other_requests_end_with_a_503(tmp_path: Path, path: str) -> None:
    """Nothing waits for their numbers."""

    async def check() -> None:
        body = {"session_id": "s1", "model_seq_id": 0, "sampling_session_seq_id": 0} | sample()
        async with near(tmp_path, lost(), patience=0.1) as n:
            given = await n.send(path, body)
            assert given.status_code == 503
            assert "five minutes" in given.json()["detail"]
            assert not (tmp_path / "withdrawals.json").exists()
            assert (await n.acall("GET", "status")).json()["remote"]["kept_requests"] == 0

    asyncio.run(check())


@pytest.mark.parametrize("status", [401, 403, 413])
def test_a_gate_s_refusal_of_a_training_request_is_a_future_that_fails(tmp_path: Path, status: int) -> None:
    """A 4xx would hang a client that sends chunks in parallel (O6, T1). A gateway's page is quoted."""

    async def check() -> None:
        page = httpx.Response(status, html="<h1>Request Entity   Too Large</h1>")
        async with near(tmp_path, page, ok({"request_id": "x"})) as n:
            given = await n.send("forward_backward", {"model_id": RUN, "seq_id": 2})
            assert given.status_code == 200
            ended = (await n.poll(given.json()["request_id"])).json()
            assert ended["category"] == "user"
            assert "<h1>Request Entity Too Large</h1>" in ended["error"]
            await until(lambda: len(n.remote.calls) == 2)
            assert n.remote.bodies()[1]["seq_id"] == 2

    asyncio.run(check())


def test_a_body_beyond_our_own_limit_fails_as_the_daemon_s_does(tmp_path: Path) -> None:
    async def check() -> None:
        async with near(tmp_path, ok({"request_id": "x"}), server={"max_body_bytes": 1000}) as n:
            headers = {"content-type": "application/x-protobuf"}
            given = await n.acall("POST", "forward_backward", content=parts(), headers=headers)
            ended = (await n.poll(given.json()["request_id"])).json()
            assert "over 1000 bytes" in ended["error"]
            assert (await n.send("asample", sample() | {"padding": "x" * 2000})).status_code == 413

    async def parts() -> AsyncGenerator[bytes]:
        yield b"\x0a\x0as1:train:0\x10\x05" + b"\x1a\x00" * 100
        yield b"\x1a\x00" * 1000

    asyncio.run(check())


# ---- polls ----


@pytest.mark.parametrize("away", [unreachable(), lost(), answer(503, {"detail": "stopping"}), answer(524, "slow")])
def test_a_poll_is_never_told_of_an_outage_but_to_ask_again(tmp_path: Path, away: httpx.Response | Exception) -> None:
    """A 5xx is asked again at once and without end (T5), an error is final: 408 is neither (4.4)."""

    async def check() -> None:
        async with near(tmp_path, away) as n:
            n.remote.alive = not isinstance(away, httpcore.ConnectError)
            started = time.monotonic()
            given = await n.poll("r1")
            assert time.monotonic() - started > 0.25  # held: an answer at once would be a hot loop (T6)
            assert given.status_code == 408
            body = given.json()
            assert (body["type"], body["request_id"], body["queue_state"]) == ("try_again", "r1", "paused_capacity")
            if not n.remote.alive:
                assert "the remote has been unreachable for 0 s; retrying" in body["queue_state_reason"]

    asyncio.run(check())


def test_news_of_samples_is_empty_while_the_remote_is_away(tmp_path: Path) -> None:
    """An error would end the poller for good (T41)."""

    async def check() -> None:
        async with near(tmp_path, unreachable()) as n:
            n.remote.alive = False
            target = {"type": "sampling_session", "sampling_session_id": "s1:sample:0", "cloned_sampler_id": 0}
            given = await n.send("retrieve_futures", {"target": target, "prev_cursor": 17})
            assert given.status_code == 200
            assert given.json() == {"completions": [], "cursor": 17}

    asyncio.run(check())


@pytest.mark.parametrize("lost_as", [404, 410])
def test_what_the_remote_has_forgotten_is_sent_again(tmp_path: Path, lost_as: int) -> None:
    async def check() -> None:
        done = ok({"metrics": {}})
        answers = (ok({"request_id": "r1"}), answer(lost_as, {"detail": "unknown"}), ok({"request_id": "r1"}), done)
        async with near(tmp_path, *answers) as n:
            await n.send("optim_step", step())
            assert (await n.poll("r1")).json() == {"metrics": {}}
            assert paths(n) == ["optim_step", "retrieve_future", "optim_step", "retrieve_future"]

    asyncio.run(check())


def test_what_was_never_ours_stays_gone(tmp_path: Path) -> None:
    """The SDK then submits a sample anew (4.4)."""

    async def check() -> None:
        async with near(tmp_path, answer(410, {"detail": "expired"})) as n:
            given = await n.poll("r9")
            assert given.status_code == 410
            assert given.json() == {"detail": "expired"}
            assert len(n.remote.calls) == 1

    asyncio.run(check())


def test_a_request_that_is_taken_anew_under_another_id_is_still_found_under_the_first(tmp_path: Path) -> None:
    async def check() -> None:
        answers = (ok({"request_id": "r1"}), answer(410, {}), ok({"request_id": "r2"}), ok({"metrics": {}}))
        async with near(tmp_path, *answers) as n:
            await n.send("optim_step", step())
            assert (await n.poll("r1")).json() == {"metrics": {}}
            assert n.remote.bodies()[-1] == {"request_id": "r2"}

    asyncio.run(check())


# ---- the remote starts anew ----


def test_a_restart_brings_everything_back_that_may_be_lost(tmp_path: Path) -> None:
    """In order, also what the client has had a moment ago, and without being asked: a poller for samples would wait
    for ever (4.5)."""

    async def check() -> None:
        async with near(tmp_path, promise) as n:
            for seq in (2, 1, 10):
                await n.send("optim_step", step(seq))
            await n.send("asample", sample())
            assert (await n.poll(f"{RUN}:1")).status_code == 200
            n.remote.calls.clear()
            n.remote.boot = "second"
            await n.poll(f"{RUN}:2")
            await until(lambda: len(n.remote.calls) >= 5)
            again = [body for body in n.remote.bodies() if "seq_id" in body]
            assert [body["seq_id"] for body in again if "model_id" in body] == [1, 2, 10]
            assert [body["seq_id"] for body in again if "sampling_session_id" in body] == [1]
            assert (await n.acall("GET", "status")).json()["remote"]["replayed"] == 4

    asyncio.run(check())


def promise(request: httpx.Request) -> httpx.Response:
    body = json.loads(request.content or b"{}")
    if "seq_id" in body:
        return ok({"request_id": f"{body.get('model_id') or body['sampling_session_id']}:{body['seq_id']}"})
    return ok({"metrics": {}})


def test_a_remote_without_a_name_for_its_lives_is_asked_after_each_outage(tmp_path: Path) -> None:
    async def check() -> None:
        async with near(tmp_path, promise, boot="") as n:
            await n.send("optim_step", step(1))
            n.remote.alive = False
            await n.send("get_info", {"model_id": RUN})
            n.remote.calls.clear()
            n.remote.alive = True
            await until(lambda: "optim_step" in paths(n))

    asyncio.run(check())


def test_an_outage_alone_repeats_nothing(tmp_path: Path) -> None:
    """The remote is the same as before: what it has accepted, it has."""

    async def check() -> None:
        async with near(tmp_path, promise) as n:
            await n.send("optim_step", step(1))
            n.remote.alive = False
            await n.send("get_info", {"model_id": RUN})
            n.remote.calls.clear()
            n.remote.alive = True
            await until(lambda: n.proxy.link.state.connected)
            await asyncio.sleep(0.1)
            assert "optim_step" not in paths(n)

    asyncio.run(check())


# ---- the end of this server ----


def test_whoever_waits_is_let_go_when_this_server_stops(tmp_path: Path) -> None:
    async def check() -> None:
        async with near(tmp_path, forever, server={"long_poll_seconds": 20.0}) as n:
            waiting = [asyncio.create_task(n.poll("r1")), asyncio.create_task(n.send("optim_step", step()))]
            plain = asyncio.create_task(Http(n.app).acall("GET", "training_runs"))
            await until(lambda: len(n.remote.calls) == 3)
            n.proxy.link.let_go()
            assert [(await task).status_code for task in (*waiting, plain)] == [408, 503, 503]

    async def forever(_request: httpx.Request) -> httpx.Response:
        await asyncio.sleep(60)
        raise AssertionError

    asyncio.run(check())

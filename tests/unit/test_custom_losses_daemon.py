"""5.9 in the daemon: losses of a session, made once, found by trainers and replays, and after a restart."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable
from pathlib import Path
from typing import Any

from openrl.types import RunId
from openrl.workers import messages
from support import losses
from support.daemons import Harness
from support.wired import Wired

Json = dict[str, Any]


def run_async(test: Awaitable[None]) -> None:
    async def main() -> None:
        await asyncio.wait_for(test, 60)

    asyncio.run(main())


def loss_body(session: str, seq: int = 0, name: str = "weighted") -> Json:
    return losses.body(*losses.LOSSES[name], session=session, seq=seq)


def train_body(run: str, seq: int, loss_id: Any, **more: Any) -> Json:
    tensors = {
        "target_tokens": {"data": [3, 4], "dtype": "int64", "shape": [2]},
        "weights": {"data": [1, 0], "dtype": "int64", "shape": [2]},
    }
    datum = {"model_input": {"chunks": [{"tokens": [1, 2]}]}, "loss_fn_inputs": tensors}
    given = {"data": [datum], "loss_fn": "custom", "loss_fn_config": {"loss_id": loss_id}, **more}
    return {"model_id": run, "seq_id": seq, "forward_backward_input": given}


async def create(w: Wired, body: Json) -> Json:
    return (await w.result(await w.promise("create_custom_loss", body))).json()


def test_a_loss_is_made_once_and_reaches_the_worker(tmp_path: Path) -> None:
    """4.7: the same numbers, the same Promise. The worker gets the program, and the inputs as they were sent."""

    async def test() -> None:
        h = await Harness(tmp_path).start()
        w = Wired(h)
        run = await w.open_run()
        body = loss_body(w.session)
        promise = await w.promise("create_custom_loss", body)
        answer = (await w.result(promise)).json()
        assert answer["type"] == "create_custom_loss"
        assert await w.promise("create_custom_loss", loss_body(w.session, name="shaped")) == promise
        done = await w.result(await w.promise("forward_backward", train_body(run, 1, answer["loss_id"])), "*/*")
        assert done.status_code == 200, done.text
        (passed,) = [call for call in h.worker.calls if isinstance(call, messages.TrainPass)]
        program = passed.items[0].program
        assert program is not None
        assert program.name == "weighted"
        assert passed.items[0].payload.data[0].inputs["weights"].dtype == "int64"
        await h.daemon.stop()

    run_async(test())


def test_what_is_refused_is_a_failed_future_of_the_user(tmp_path: Path) -> None:
    """5.9, O5: a graph that is not accepted, an id that is unknown or of another session, a config that is wrong."""

    async def test() -> None:
        h = await Harness(tmp_path).start()
        w = Wired(h)
        run = await w.open_run()
        evil = losses.graph(("call_function", "evil", "torch.load", ["x"]), result="x") | {"session_id": w.session}
        failed = await create(w, evil)
        assert failed["category"] == "user"
        assert "'evil'" in failed["error"]
        assert "torch.load" in failed["error"]
        cut = {"session_id": w.session, "custom_loss_seq_id": 1}
        assert (await create(w, cut))["category"] == "user"
        assert (await w.post("create_custom_loss", loss_body("nobody"))).status_code == 404
        assert (await w.post("create_custom_loss", {"session_id": w.session})).status_code == 400
        other = Wired(h)
        await other.open_run()
        foreign = (await create(other, loss_body(other.session)))["loss_id"]
        mine = (await create(w, loss_body(w.session, 2)))["loss_id"]
        wrong = [
            train_body(run, 1, f"{w.session}:loss:0"),
            train_body(run, 2, foreign),
            train_body(run, 3, 7),
            train_body(run, 4, mine, loss_fn_config={"loss_id": mine, "beta": 1.0}),
            train_body(run, 5, mine, loss_fn_config=None),
        ]
        for body in wrong:
            answer = (await w.result(await w.promise("forward_backward", body))).json()
            assert answer["category"] == "user", answer
            assert "loss_id" in answer["error"]
        ranks = train_body(run, 6, mine)
        ranks["forward_backward_input"]["data"][0]["loss_fn_inputs"]["weights"]["shape"] = [1, 2]
        answer = (await w.result(await w.promise("forward_backward", ranks))).json()
        assert "rank" in answer["error"]
        good = await w.result(await w.promise("forward_backward", train_body(run, 7, mine)), "*/*")
        assert "metrics" in good.json(), "refused numbers are used up, and the run goes on"
        await h.daemon.stop()

    run_async(test())


def test_a_restart_still_knows_the_losses(tmp_path: Path) -> None:
    """What was trained is replayed with its loss, what was queued runs with it, and the old promise has its answer."""

    async def test() -> None:
        h = await Harness(tmp_path).start()
        w = Wired(h)
        run = await w.open_run()
        promise = await w.promise("create_custom_loss", loss_body(w.session))
        loss_id = (await w.result(promise)).json()["loss_id"]
        await w.result(await w.promise("forward_backward", train_body(run, 1, loss_id)))
        h.worker.hold = asyncio.Event()
        queued = await w.promise("forward_backward", train_body(run, 2, loss_id))
        await h.kill()
        await h.start()
        w = Wired(h)
        assert (await w.result(promise)).json()["loss_id"] == loss_id
        assert (await w.result(queued)).status_code == 200
        later = await w.result(await w.promise("forward_backward", train_body(run, 3, loss_id)), "*/*")
        assert "metrics" in later.json()
        passes = [call for call in h.worker.calls if isinstance(call, messages.TrainPass)]
        assert [call.items[0].program is not None for call in passes] == [True, True, True]
        await h.daemon.stop()

    run_async(test())


def test_a_backend_without_custom_losses_says_so(tmp_path: Path) -> None:
    """The flag is off, nothing is accepted, and `custom` is refused in words."""

    async def test() -> None:
        h = await Harness(tmp_path).start()
        h.daemon.losses.served = False
        w = Wired(h)
        run = await w.open_run()
        config = (await w.post("client/config", {"sdk_version": "0.38.0"})).json()
        assert config["custom_loss_server_side"] is False
        models = (await w.get("get_server_capabilities")).json()["supported_models"]
        assert [model["custom_losses"] for model in models] == [False] * len(models)
        refused = await create(w, loss_body(w.session))
        assert "backend" in refused["error"]
        answer = (await w.result(await w.promise("forward_backward", train_body(run, 1, "any")))).json()
        assert "backend" in answer["error"]
        h.daemon.losses.served = True
        assert (await w.post("client/config", {})).json()["custom_loss_server_side"] is True
        await h.daemon.stop()

    run_async(test())


def test_a_body_that_is_too_large_is_not_stored(tmp_path: Path) -> None:
    async def test() -> None:
        h = await Harness(tmp_path).start()
        w = Wired(h, max_body_bytes=1 << 22)
        run = await w.open_run()
        assert run == RunId(f"{w.session}:train:0")
        body = loss_body(w.session) | {"padding": "x" * 2**20}
        answer = await w.result(await w.promise("create_custom_loss", json.dumps(body).encode()))
        assert "bytes" in answer.json().get("error", "")
        await h.daemon.stop()

    run_async(test())

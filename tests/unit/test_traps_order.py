"""Traps of order, retries and polling (tinker-protocol 10), met over HTTP with a real daemon and a scalar worker."""

from __future__ import annotations

import asyncio
import time
from typing import get_args

import pytest

from openrl import errors
from openrl.daemon.work import Pending
from openrl.errors import OpenRLError
from openrl.server.errors import STATUS
from openrl.settings import load
from openrl.workers import messages
from support.daemons import expected_weight
from support.scalar_worker import BAD, POISON
from support.wired import Wired, over_http, sample_body


@over_http()
async def test_t1_a_bad_chunk_is_accepted_and_its_future_fails(w: Wired) -> None:
    """T1: the second of three parallel chunks is bad; all three are acknowledged, and later calls go on."""
    run = await w.open_run()
    bad, third, first = await w.train(run, 2, 5000), await w.train(run, 3, 4), await w.train(run, 1, 3)
    assert (await w.result(bad)).json()["category"] == "user"
    for request in (first, third):
        assert (await w.result(request)).headers["content-type"] == "application/x-protobuf"
    assert await w.weight(await w.step(run, 4)) == expected_weight(7)


@over_http(long_poll_seconds=0.1)
async def test_t2_a_later_chunk_is_acknowledged_before_the_first_one_arrives(w: Wired) -> None:
    """T2, O2: the client posts chunk 1 only after all others were acknowledged."""
    run = await w.open_run()
    second = await asyncio.wait_for(w.train(run, 2, 4), 5)
    assert (await w.retrieve(second)).status_code == 408
    await w.train(run, 1, 3)
    assert (await w.result(second)).status_code == 200


@over_http()
async def test_t4_a_name_that_exists_is_a_failed_future_and_no_409(w: Wired) -> None:
    """T4, 7.2: 409 means "try again soon" to the SDK."""
    run = await w.open_run()
    await w.result(await w.promise("save_weights", {"model_id": run, "seq_id": 1, "path": "a"}))
    again = await w.result(await w.promise("save_weights", {"model_id": run, "seq_id": 2, "path": "a"}))
    assert again.status_code == 200
    assert again.json()["category"] == "user"
    assert 409 not in STATUS.values()


@over_http()
async def test_t5_t9_work_that_failed_for_good_is_a_200_with_error_and_category(w: Wired) -> None:
    """T5: a 500 would be polled again without end. T9: the category is lower case."""
    run, other = await w.open_run(), await w.open_run(1)
    poisoned, refused = await w.train(run, 1, POISON), await w.train(other, 1, BAD)
    assert (await w.result(poisoned)).json().keys() == {"error", "category"}
    assert (await w.result(poisoned)).json()["category"] == "server"
    assert (await w.result(refused)).json()["category"] == "user"
    assert (await w.result(poisoned)).status_code == 200


def test_t9_every_error_has_a_category_that_the_sdk_knows() -> None:
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, OpenRLError)]
    assert len(kinds) > 10
    assert {kind.category for kind in kinds} == set(get_args(errors.Category)) == {"user", "server"}


@over_http(long_poll_seconds=0.4)
async def test_t6_not_done_yet_is_answered_after_holding(w: Wired) -> None:
    """T6: 408 at once would be a hot loop in the client."""
    run = await w.open_run()
    waiting = await w.step(run, 2)
    started = time.monotonic()
    answer = await w.retrieve(waiting)
    assert time.monotonic() - started > 0.35
    assert answer.status_code == 408
    assert answer.json()["type"] == "try_again"


def test_t7_a_poll_is_held_for_less_than_the_clients_timeout() -> None:
    """T7: 45 s with the httpx transport; legal settings stay at 30 or below."""
    assert load({}, None).settings.server.long_poll_seconds <= 30
    with pytest.raises(errors.SettingsError, match="at most 30"):
        load({"server.long_poll_seconds": 31}, None)


@over_http()
async def test_t8_t13_a_result_has_no_error_key_and_is_never_metadata_only(w: Wired) -> None:
    """T8: the key `error` alone means failure. T13: though every poll here allows metadata, none is sent."""
    run = await w.open_run()
    sampler = await w.open_sampler(5)
    promises = [
        await w.step(run, 1),
        await w.promise("save_weights", {"model_id": run, "seq_id": 2, "path": "a"}),
        await w.promise("save_weights_for_sampler", {"model_id": run, "seq_id": 3, "path": "a"}),
        await w.promise("save_weights_for_sampler", {"model_id": run, "seq_id": 4, "sampling_session_seq_id": 0}),
        await w.promise("load_weights", {"model_id": run, "seq_id": 5, "path": f"tinker://{run}/weights/a"}),
        await w.train(run, 6, 1),
        await w.promise("asample", sample_body(sampler, 0)),
        await w.promise("unload_model", {"model_id": run}),
    ]
    for accept in ("application/x-protobuf", "application/json"):
        for request in promises:
            answer = await w.result(request, accept)
            assert answer.status_code == 200
            if answer.headers["content-type"] == "application/json":
                assert not {"error", "status", "response_payload_size"} & answer.json().keys()


@over_http()
async def test_t10_protobuf_is_sent_for_samples_and_passes_and_for_nothing_else(w: Wired) -> None:
    """T10: although every poll accepts it."""
    run = await w.open_run()
    sampler = await w.open_sampler(5)
    kinds = {
        await w.train(run, 1, 3): "application/x-protobuf",
        await w.promise("asample", sample_body(sampler, 0)): "application/x-protobuf",
        await w.step(run, 2): "application/json",
        await w.train(run, 3, BAD): "application/json",  # an error is JSON, whatever it is the error of
        await w.promise("save_weights", {"model_id": run, "seq_id": 4, "path": "a"}): "application/json",
    }
    for request, kind in kinds.items():
        assert (await w.result(request)).headers["content-type"] == kind


@over_http()
async def test_t14_a_sample_is_promised_as_many_ids_as_sequences_all_different(w: Wired) -> None:
    """T14: and a retry is promised the same ones (4.7)."""
    await w.open_run()
    sampler = await w.open_sampler()
    answers = [(await w.post("asample", sample_body(sampler, seq, num_samples=3))).json() for seq in (0, 1, 0)]
    ids = [answer["sample_sequence_ids"] for answer in answers]
    assert [len(promised) for promised in ids] == [3, 3, 3]
    assert len({*ids[0], *ids[1]}) == 6
    assert answers[0] == answers[2]


@over_http()
async def test_t19_a_run_is_named_by_its_session_and_number(w: Wired) -> None:
    """T19: create-from-checkpoint computes the name and never reads it."""
    run = await w.open_run()
    path = (await w.result(await w.promise("save_weights", {"model_id": run, "seq_id": 1, "path": "a"}))).json()["path"]
    body = {"session_id": w.session, "model_seq_id": 7, "path": path, "optimizer": True}
    assert (await w.result(await w.promise("load_weights", body))).json()["model_id"] == f"{w.session}:train:7"
    assert (await w.post("get_info", {"model_id": f"{w.session}:train:7"})).status_code == 200


@over_http()
async def test_t20_a_retry_with_new_keys_runs_once(w: Wired) -> None:
    """T20: an outer retry has a new X-Idempotency-Key, and of an ephemeral save also a new sampling_session_seq_id."""
    run = await w.open_run()
    first = await w.train(run, 1, 3, x_idempotency_key="stainless-1")
    assert await w.train(run, 1, 3, x_idempotency_key="stainless-2") == first
    assert await w.weight(await w.step(run, 2)) == expected_weight(3)
    saves = [
        await w.promise("save_weights_for_sampler", {"model_id": run, "seq_id": 3, "sampling_session_seq_id": number})
        for number in (0, 1, 2)
    ]
    assert len(set(saves)) == 1
    assert (await w.result(saves[0])).json()["sampling_session_id"] == f"{w.session}:sample:0"
    assert len([call for call in w.h.worker.calls if isinstance(call, messages.Save)]) == 1


@over_http()
async def test_t21_a_refused_number_is_used_up(w: Wired) -> None:
    """T21, O5: whatever is wrong with a request whose run and number can be read, the next number is taken up."""
    run = await w.open_run()
    for seq, body in enumerate(
        [{"adam_params": 3}, {"adam_params": {"eps": -1}}, {"optimizer_params": {"type": "x"}}], 1
    ):
        failed = await w.result(await w.promise("optim_step", {"model_id": run, "seq_id": seq, **body}))
        assert failed.json()["category"] == "user"
    assert await w.weight(await w.step(run, 4)) == expected_weight(0)


@over_http()
async def test_t22_samples_wait_for_no_other_number(w: Wired) -> None:
    """T22: numbers of clones are far apart, and some never come."""
    await w.open_run()
    sampler = await w.open_sampler()
    for seq in (10**18 + 7, 3, 1_000_000_000):
        assert (await w.result(await w.promise("asample", sample_body(sampler, seq)))).status_code == 200


@over_http()
async def test_t43_a_result_can_be_read_again(w: Wired) -> None:
    """T43: the connection may break while it is sent."""
    run = await w.open_run()
    request = await w.train(run, 1, 3)
    bodies = {(await w.result(request)).content for _ in range(3)}
    assert len(bodies) == 1


@over_http()
async def test_t41_an_unknown_result_is_410(w: Wired) -> None:
    """T41: 404 would be final, also for whatever else the client waits for."""
    assert (await w.retrieve("s:train:0:1")).status_code == 410


@over_http({"session_timeout": 0.05})
async def test_t50_a_silent_sessions_run_leaves_the_device_and_comes_back_unharmed(w: Wired) -> None:
    """T50: silence is no end; the next request finds the run as it was, its gradient included."""
    assert load({}, None).settings.daemon.session_timeout >= 300
    run = await w.open_run()
    await w.step(run, 1)
    await w.result(await w.train(run, 2, 3))
    await asyncio.sleep(0.1)
    await w.h.daemon._housekeeping.once()
    assert run not in w.h.worker.runs
    assert (await w.post("session_heartbeat", {"session_id": w.session})).status_code == 200
    assert await w.weight(await w.step(run, 3)) == expected_weight(0, 3)


@over_http(long_poll_seconds=0.1)
async def test_t6_the_queue_state_is_one_that_the_sdk_knows(w: Wired) -> None:
    """T6, 4.3."""
    run = await w.open_run()
    waiting = await w.step(run, 2)
    assert isinstance(await w.h.daemon.wait(waiting, 0.01), Pending)  # type: ignore[arg-type]
    assert (await w.retrieve(waiting)).json()["queue_state"] in {"active", "paused_capacity", "paused_rate_limit"}

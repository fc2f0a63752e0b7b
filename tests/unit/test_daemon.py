"""The daemon over a scalar worker: order, retries, refusals, joining, samplers and checkpoints."""

from __future__ import annotations

import asyncio
import json

import pytest

from openrl.daemon.work import NewRun, NewSession, Pending, Raw
from openrl.errors import BadRequest, Busy, Gone, NotFound, NotReady
from openrl.types import Op, RequestId, RunId, SamplerId
from openrl.workers import messages
from support.daemons import BASE, Harness, expected_weight, scenario
from support.scalar_worker import BAD, POISON


@scenario
async def test_o1_o2_later_requests_wait_for_earlier_ones(h: Harness) -> None:
    """O1, O2, O3: all are acknowledged at once; they run in the order of their numbers."""
    run = await h.open_run()
    step = await h.step(run, 3)
    await h.train(run, 2, 5)
    assert isinstance(await h.daemon.wait(step, 0.05), Pending)
    await h.train(run, 1, 3)
    assert await h.weight(step) == expected_weight(8)


@scenario
async def test_g8_a_retry_runs_once_and_gets_the_same_answer(h: Harness) -> None:
    """G8 and 4.7: the same (run, seq) is executed once, whatever the second body says."""
    run = await h.open_run()
    first = await h.train(run, 1, 3)
    assert await h.train(run, 1, 900) == first
    step = await h.step(run, 2)
    assert await h.weight(step) == expected_weight(3)
    assert await h.step(run, 2) == step
    assert await h.weight(step) == expected_weight(3)


@scenario
async def test_o6_o9_g6_a_refused_request_uses_its_number_and_leaves_the_run(h: Harness) -> None:
    """O5, O6, O9, G6, G7: failures end their futures with category user; later requests go on."""
    run = await h.open_run()
    bad = await h.daemon.submit(run, 1, Op.FORWARD_BACKWARD, BadRequest("no such loss"), Raw("x", b"x"))
    out_of_range = await h.train(run, 2, 5000)
    failing = await h.train(run, 3, BAD)
    await h.train(run, 4, 4)
    step = await h.step(run, 5)
    for request, text in ((bad, "no such loss"), (out_of_range, "5000"), (failing, "a bad datum")):
        done = await h.result(request)
        assert done.category == "user"
        assert text in (done.error or "")
    assert await h.weight(step) == expected_weight(4)


@scenario
async def test_t21_a_refused_number_ahead_of_the_cursor_is_stepped_over(h: Harness) -> None:
    """T1, T21: chunk 2 is refused before chunk 1 arrives; nothing hangs."""
    run = await h.open_run()
    await h.daemon.submit(run, 2, Op.FORWARD_BACKWARD, BadRequest("bad"), Raw("x", b"x"))
    await h.train(run, 1, 7)
    assert await h.weight(await h.step(run, 3)) == expected_weight(7)


@scenario
async def test_o8_a_number_in_the_past_is_never_executed(h: Harness) -> None:
    """O8: a number below the next one that is not in the table."""
    run = await h.open_run()
    await h.result(await h.train(run, 1, 7))
    h.daemon._db.submit(lambda c: c.execute("DELETE FROM requests WHERE id = ?", (f"{run}:1",)).rowcount).result()
    done = await h.result(await h.train(run, 1, 7))
    assert "in the past" in (done.error or "")
    assert await h.weight(await h.step(run, 2)) == expected_weight(7)


@scenario
async def test_g6_a_poisoned_pass_fails_alone(h: Harness) -> None:
    """Two runs joined in one pass that fails as a whole: each is run alone, and only the culprit fails."""
    one, two = await h.open_run(0), await h.open_run(1)
    three = await h.open_run(2)
    h.worker.hold = asyncio.Event()
    await h.step(three, 1)  # keeps the device, so that the next two wait and are joined
    good, poisoned = await h.train(one, 1, 5), await h.train(two, 1, POISON)
    h.worker.hold.set()
    assert (await h.result(good)).error is None
    assert "poisoned" in ((await h.result(poisoned)).error or "")
    passes = [op for op in h.worker.calls if isinstance(op, messages.TrainPass)]
    assert [len(op.items) for op in passes] == [2, 1, 1]
    assert await h.weight(await h.step(one, 2)) == expected_weight(5)


@scenario
async def test_a_save_is_ordered_and_immutable(h: Harness) -> None:
    """C2, S15: a sampler has the weights of its moment, whatever comes later; overwriting a name keeps it so."""
    run = await h.open_run()
    await h.train(run, 1, 3)
    await h.step(run, 2)
    sampler = await h.save_sampler(run, 3, 0)
    await h.result(await h.save(run, 4, "a"))
    fixed = await h.daemon.create_sampler(h.session, 7, None, f"tinker://{run}/weights/a")
    await h.train(run, 5, 4)
    await h.step(run, 6)
    await h.result(await h.save(run, 7, "a", overwrite=True))
    for identity in (sampler, fixed):
        await h.result(await h.sample(identity, 0))
        folder = h.worker.jobs[-1].adapter
        assert folder is not None
        assert json.loads((folder.folder / "scalar.json").read_text())["weight"] == expected_weight(3)


@scenario
async def test_s15_each_save_under_a_name_has_a_key_of_its_own(h: Harness) -> None:
    """What backends keep of a checkpoint, they keep by its key: so it must never come again."""
    run = await h.open_run()
    keys: list[str] = []
    for i in range(3):
        await h.result(await h.save(run, 1 + i, "a", overwrite=True))
        sampler = await h.daemon.create_sampler(h.session, i, None, f"tinker://{run}/weights/a")
        await h.result(await h.sample(sampler, 0))
        adapter = h.worker.jobs[-1].adapter
        assert adapter is not None
        keys.append(adapter.key)
    assert len(set(keys)) == 3


@scenario
async def test_c1_an_existing_name_fails_unless_overwritten(h: Harness) -> None:
    run = await h.open_run()
    await h.result(await h.save(run, 1, "a"))
    again = await h.result(await h.save(run, 2, "a"))
    assert again.category == "user"
    assert "exists" in (again.error or "")
    assert (await h.result(await h.save(run, 3, "a", overwrite=True))).error is None
    while len(list(h.settings.data_dir.glob("checkpoints/*/weights/a--*"))) > 1:  # the old folder goes after the answer
        await asyncio.sleep(0.01)


@scenario
async def test_c3_load_restores_with_or_without_optimizer(h: Harness) -> None:
    run = await h.open_run()
    await h.train(run, 1, 3)
    await h.step(run, 2)
    path = json.loads((await h.result(await h.save(run, 3, "a"))).body)["path"]
    await h.train(run, 4, 100)
    assert (await h.result(await h.load(run, 5, path))).error is None
    assert h.worker.runs[run].steps == 1
    assert await h.weight(await h.step(run, 6)) == expected_weight(3, 0)
    await h.result(await h.load(run, 7, path, optimizer=False))
    assert h.worker.runs[run].steps == 0


@scenario
async def test_c3_wrong_kinds_and_unknown_paths_fail_the_future(h: Harness) -> None:
    run = await h.open_run()
    await h.save_sampler(run, 1, 0)
    kind = await h.result(await h.load(run, 2, f"tinker://{run}/sampler_weights/ephemeral-0"))
    unknown = await h.result(await h.load(run, 3, f"tinker://{run}/weights/none"))
    malformed = await h.result(await h.load(run, 4, "weights/none"))
    assert "no optimizer state" in (kind.error or "")
    assert "does not exist" in (unknown.error or "")
    assert "tinker://<run id>" in (malformed.error or "")
    assert {kind.category, unknown.category, malformed.category} == {"user"}


@scenario
async def test_bad_runs_fail_their_future_and_unknown_things_are_not_found(h: Harness) -> None:
    await h.open_run()
    for rank in (-1, 65):
        new = NewRun(h.session, 5 + rank, BASE, rank, 1, True, True, True, {"type": "adamw"}, {})
        done = await h.result(await h.daemon.create_run(new, Raw("application/json", b"{}")))
        assert done.category == "user"
        assert "rank" in (done.error or "")
    with pytest.raises(BadRequest, match="test/scalar"):
        await h.daemon.create_run(
            NewRun(h.session, 9, "no/model", 8, 1, True, True, True, {"type": "adamw"}, {}), Raw("x", b"x")
        )
    with pytest.raises(NotFound):
        await h.train(RunId("nobody:train:0"), 1, 1)
    with pytest.raises(NotFound):
        await h.sample(SamplerId("nobody:sample:0"), 0)
    with pytest.raises(Gone):
        await h.daemon.wait(RequestId("nobody:train:0:1"), 0.1)


@scenario
async def test_samples_are_idempotent_and_unordered(h: Harness) -> None:
    """T22: sampling numbers are no order; the same number is drawn once."""
    await h.open_run()
    base = await h.daemon.create_sampler(h.session, 3, BASE, None)
    assert await h.daemon.create_sampler(h.session, 3, BASE, None) == base
    late, early = await h.sample(base, 1_000_000_007), await h.sample(base, 2)
    assert await h.sample(base, 2) == early
    await h.result(late)
    await h.result(early)
    assert len(h.worker.jobs) == 2


@scenario
async def test_busy_above_the_limit(h: Harness) -> None:
    await h.open_run()
    base = await h.daemon.create_sampler(h.session, 3, BASE, None)
    h.worker.hold = asyncio.Event()
    for seq in range(100):
        await h.sample(base, seq)
    with pytest.raises(Busy):
        await h.sample(base, 100)
    h.worker.hold.set()
    await h.result(RequestId(f"{base}:99"))


@scenario
async def test_a_finished_session_takes_no_new_work(h: Harness) -> None:
    """2.6: idempotent; heartbeats answer 410, new work 404; its run leaves the device."""
    run = await h.open_run()
    await h.daemon.finish_session(h.session, "success", None)
    await h.daemon.finish_session(h.session, "errored", None)
    with pytest.raises(Gone):
        await h.daemon.heartbeat(h.session)
    with pytest.raises(NotFound):
        await h.train(run, 1, 1)
    await h.daemon._housekeeping.once()
    assert run not in h.worker.runs


@scenario
async def test_sessions_are_recognised_by_their_key(h: Harness) -> None:
    one = await h.daemon.create_session(NewSession("0.38.0"), "key-1")
    assert await h.daemon.create_session(NewSession("0.38.0"), "key-1") == one
    assert await h.daemon.create_session(NewSession("0.38.0"), "key-2") != one


@scenario
async def test_o7_a_request_that_never_arrives_breaks_the_run(h: Harness) -> None:
    """O7: the buffered requests fail as `server`; the run is not continued with a hole in its gradient."""
    run = await h.open_run()
    waiting = await h.step(run, 2)
    await h.daemon._housekeeping.once()
    assert isinstance(await h.daemon.wait(waiting, 0.01), Pending)
    h.daemon._runs.get(run).gap_since = 0.1
    await h.daemon._housekeeping.once()
    done = await h.result(waiting)
    assert done.category == "server"
    assert "never arrived" in (done.error or "")
    late = await h.result(await h.train(run, 3, 1))
    assert "broken" in (late.error or "")


@scenario
async def test_stopping_lets_go_of_those_who_wait(h: Harness) -> None:
    run = await h.open_run()
    h.worker.hold = asyncio.Event()
    request = await h.train(run, 1, 1)
    waiting = asyncio.create_task(h.daemon.wait(request, 25))
    await asyncio.sleep(0.05)
    h.daemon.begin_stop()
    assert isinstance(await asyncio.wait_for(waiting, 1), Pending)
    with pytest.raises(NotReady):
        await h.step(run, 2)
    h.worker.hold.set()

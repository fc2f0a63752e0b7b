"""Several base models: loaded as far as they fit, put to sleep and woken by turns; nothing accepted is ever lost."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from openrl.daemon.work import Pending
from openrl.errors import BadRequest, ModelError, NoRoom
from openrl.types import RequestId, RunId
from openrl.workers import messages
from support.scalar_worker import ScalarWorker
from support.several import A, AllowedHere, B, C, Several


def over(*models: str, **options: object) -> Callable[[Callable[[Several], Awaitable[None]]], Callable[[Path], None]]:
    """Run a test on a started daemon of these models."""

    def decorate(test: Callable[[Several], Awaitable[None]]) -> Callable[[Path], None]:
        def wrapped(tmp_path: Path) -> None:
            async def main() -> None:
                h = await Several(tmp_path, *models, **options).start()  # type: ignore[arg-type]
                await test(h)
                await h.daemon.stop()

            asyncio.run(asyncio.wait_for(main(), 120))

        wrapped.__doc__ = test.__doc__
        return wrapped

    return decorate


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.01)


@over(A, B, room=2)
async def test_models_that_fit_are_loaded_at_the_start_and_stay(h: Several) -> None:
    await until(lambda: h.states() == {A: "ready", B: "ready"})
    runs = await h.open_on(A, B, A)
    steps = [await h.push(run, gradient) for gradient in (3, 4) for run in runs]
    for step, run in zip(steps[3:], runs, strict=True):
        assert await h.weight(step) == h.expected(run)
    assert len(h.workers) == 2


@over(A, B, room=1)
async def test_what_does_not_fit_is_loaded_on_its_first_use_and_the_other_comes_back(h: Several) -> None:
    await until(lambda: h.states() == {A: "ready", B: "asleep"})
    (a,) = await h.open_on(A)
    await h.train(a, 1, 5)  # a gradient that is not applied yet
    await h.result(await h.step(a, 2))
    await h.result(await h.train(a, 3, 7))
    b = await h.open_run(2, base_model=B)
    assert h.states() == {A: "asleep", B: "ready"}
    assert not h.by_model[A][0].alive
    assert h.daemon._runs.get(a).worker is None
    await h.train(b, 1, 1)
    assert await h.weight(await h.step(b, 2)) == 3
    assert await h.weight(await h.step(a, 4)) == (2 + 5) * 2 + 7
    kinds = [type(op) for op in h.by_model[A][1].calls]
    assert kinds == [messages.Load, messages.OptimStep], "the snapshot holds all, so nothing is replayed"


@over(A, B, C, room=1)
async def test_models_with_work_take_turns(h: Several) -> None:
    """Nobody waits until another has ended: each has its turn, in the order in which they came to wait."""
    runs = await h.open_on(A, B, C)
    ended = dict.fromkeys(runs, 0)

    async def job(run: RunId) -> None:
        for number in range(30):
            step = await h.push(run, 1 + number % 9)
            assert await h.weight(step) == h.expected(run)
            ended[run] += 1
            await asyncio.sleep(0.01)
        assert all(ended.values()), ended

    await asyncio.gather(*map(job, runs))
    assert min(len(workers) for workers in h.by_model.values()) > 1


@over(A, B, room=1, turn=3600.0)
async def test_an_idle_model_gives_way_before_its_turn_is_over(h: Several) -> None:
    a, b = await h.open_on(A, B)
    assert await h.weight(await h.push(a, 3)) == h.expected(a)
    assert await h.weight(await h.push(b, 3)) == h.expected(b)


@over(A, B, room=1, turn=3600.0)
async def test_whoever_waits_is_told_why(h: Several) -> None:
    await until(lambda: h.model(A).open)
    (a,) = await h.open_on(A)
    h.by_model[A][0].hold = asyncio.Event()
    held = await h.push(a, 3)
    sampler = await h.daemon.create_sampler(h.session, 9, B, None)
    sample = await h.sample(sampler, 0)
    await until(lambda: h.states()[B] == "waiting")
    told = await h.daemon.wait(sample, 0.01)
    assert isinstance(told, Pending)
    assert told.state == "paused_capacity"
    assert f"model {B} is waiting: it needs 0.0 GiB" in told.reason
    assert A in told.reason
    h.by_model[A][0].hold.set()
    assert await h.weight(held) == h.expected(a)
    assert (await h.result(sample)).error is None


@over(A, B, room=1)
async def test_samples_that_have_not_begun_wait_for_the_next_turn(h: Several) -> None:
    (b,) = await h.open_on(B)
    sampler = await h.daemon.create_sampler(h.session, 9, A, None)
    await until(lambda: h.model(B).open)
    first = [await h.sample(sampler, seq) for seq in range(3)]
    await until(lambda: h.model(A).open)
    worker = h.by_model[A][-1]
    worker.hold = asyncio.Event()
    held = [await h.sample(sampler, seq) for seq in range(3, 6)]
    other = await h.push(b, 3)
    assert await h.weight(other) == h.expected(b), "samples that nobody has begun do not keep another model waiting"
    for request in first + held:
        assert (await h.result(request)).error is None


@over(A, B, room=1)
async def test_a_sample_that_has_begun_ends_before_its_model_leaves(h: Several) -> None:
    await until(lambda: h.model(A).open)
    (b,) = await h.open_on(B)
    sampler = await h.daemon.create_sampler(h.session, 9, A, None)
    await h.result(await h.sample(sampler, 0))
    worker = h.by_model[A][-1]
    worker.hold = asyncio.Event()
    begun = await h.sample(sampler, 1)
    await until(lambda: worker.jobs[-1].request == begun)
    h.daemon._sampling.counts.begin(begun)
    other = await h.push(b, 3)
    await until(lambda: h.states()[A] == "suspending")
    assert worker.alive
    worker.hold.set()
    assert (await h.result(begun)).error is None
    assert await h.weight(other) == h.expected(b)
    assert len(worker.jobs) == 2, "it was not drawn again"


@over(A, B, room=1)
async def test_a_worker_that_dies_while_it_is_put_to_sleep_loses_nothing(h: Several) -> None:
    (a,) = await h.open_on(A)
    await h.result(await h.push(a, 3))
    h.by_model[A][-1].die_on = lambda op: isinstance(op, messages.Save)
    b = await h.open_run(2, base_model=B)
    assert h.states() == {A: "asleep", B: "ready"}
    assert await h.weight(await h.push(a, 4)) == h.expected(a)
    assert next(op for op in h.by_model[B][0].calls if isinstance(op, messages.CreateRun)).run == b


@over(A, B, room=1)
async def test_a_batch_that_is_on_its_way_ends_before_its_model_leaves(h: Several) -> None:
    (a,) = await h.open_on(A)
    worker = h.by_model[A][-1]
    worker.hold = asyncio.Event()
    step = await h.push(a, 3)
    await until(lambda: len(worker.calls) > 1)
    opening = asyncio.create_task(h.open_run(2, base_model=B))
    await until(lambda: h.states()[A] == "suspending")
    worker.hold.set()
    await opening
    assert [type(op) for op in worker.calls[1:]] == [messages.TrainPass, messages.Save, messages.DropRun]
    assert await h.weight(step) == h.expected(a)


@over(A, B, room=2, idle=0.1)
async def test_a_model_that_nobody_uses_is_put_to_sleep_by_the_clock(h: Several) -> None:
    (a,) = await h.open_on(A)
    await h.result(await h.push(a, 3))
    await until(lambda: h.states() == {A: "asleep", B: "asleep"})
    assert await h.weight(await h.push(a, 4)) == h.expected(a)


def test_a_model_that_never_fits_is_refused_with_the_numbers(tmp_path: Path) -> None:
    async def main() -> None:
        h = await Several(tmp_path, A, room=0).start()
        await until(lambda: h.states()[A] == "failed")
        with pytest.raises(AssertionError, match=f"{A} needs 1 bytes of 0"):
            await h.open_on(A)
        await h.daemon.stop()

    asyncio.run(main())


@over(A, B, room=1)
async def test_a_model_that_was_loaded_before_waits_when_memory_has_become_short(h: Several) -> None:
    """What it has accepted must not fail because another program has the memory for a while."""
    (a,) = await h.open_on(A)
    await h.open_run(2, base_model=B)
    await until(lambda: h.states()[A] == "asleep")
    h.room = 0
    step = await h.push(a, 3)
    await until(lambda: "needs 1 bytes of 0" in h.model(A).detail)
    h.room = 1
    assert await h.weight(step) == h.expected(a)


@over(A, B, room=1)
async def test_a_worker_that_finds_no_room_is_tried_again(h: Several) -> None:
    (a,) = await h.open_on(A)
    await h.open_run(2, base_model=B)
    await until(lambda: h.states()[A] == "asleep")

    def short(worker: ScalarWorker) -> None:
        worker.fail_start = NoRoom("it needs 9 bytes of 1.")

    h.prepare = short
    step = await h.push(a, 3)
    await until(lambda: h.model(A).detail == "it needs 9 bytes of 1.")
    h.prepare = lambda _: None
    assert await h.weight(step) == h.expected(a)


@over(A, B, room=2)
async def test_the_cpu_is_divided_among_the_models_that_work(h: Several) -> None:
    await until(lambda: h.states() == {A: "ready", B: "ready"})
    total = h.daemon.residents._threads
    shares = {h.model(A).threads, h.model(B).threads}
    assert shares == {max(1, total // 2), max(1, (total + 1) // 2)}
    (b,) = await h.open_on(B)
    h.model(A).used_at -= 3600  # it has had no work for long
    h.model(B).used_at -= 3600
    assert await h.weight(await h.push(b, 3)) == h.expected(b)
    await until(lambda: h.model(B).threads == total)
    assert h.by_model[B][0].told[-1] == total


# -- models that clients name --


def allowing(*names: str, on_disk: tuple[str, ...] = (), models: tuple[str, ...] = (A,)) -> Callable[[Path], Several]:
    def make(tmp_path: Path) -> Several:
        h = Several(tmp_path, *models, room=1)
        h.allowed = AllowedHere(*names, on_disk=on_disk)
        h.absent = set(names) - set(on_disk)
        return h

    return make


def test_a_model_that_matches_is_fetched_and_loaded_when_a_client_first_uses_it(tmp_path: Path) -> None:
    async def main() -> None:
        h = await allowing("org/new", "org/here", on_disk=("org/here",))(tmp_path).start()
        assert [status.name for status in h.daemon.models()] == [A, "org/here"]
        assert h.fetched == []
        (run,) = await h.open_on("org/new")
        assert h.fetched == ["org/new"]
        assert await h.weight(await h.push(run, 3)) == h.expected(run)
        assert [status.name for status in h.daemon.models()] == [A, "org/here", "org/new"]
        assert h.states()["org/here"] == "asleep"
        await h.daemon.stop()

    asyncio.run(main())


def test_a_model_that_does_not_match_is_refused_with_what_is_served(tmp_path: Path) -> None:
    async def main() -> None:
        h = await allowing("org/new")(tmp_path).start()
        with pytest.raises(BadRequest) as refused:
            await h.open_on("other/model")
        assert "'other/model' is not served here" in str(refused.value)
        assert A in str(refused.value)
        assert "org/*" in str(refused.value)
        await h.daemon.stop()

    asyncio.run(main())


def test_a_sampler_of_a_new_model_can_be_made_before_it_is_fetched(tmp_path: Path) -> None:
    async def main() -> None:
        h = await allowing("org/new")(tmp_path).start()
        await h.open_on()
        sampler = await h.daemon.create_sampler(h.session, 1, "org/new", None)
        await until(lambda: h.model("org/new").info is not None)
        assert (await h.result(await h.sample(sampler, 0))).error is None
        await h.daemon.stop()

    asyncio.run(main())


def test_a_model_that_cannot_be_fetched_is_one_clear_error_and_may_be_tried_again(tmp_path: Path) -> None:
    async def main() -> None:
        h = allowing("org/new")(tmp_path)
        h.fetching = lambda name: ModelError(f"the hub has no model {name}.")
        await h.start()
        with pytest.raises(AssertionError, match="the hub has no model org/new"):
            await h.open_on("org/new")
        h.fetching = lambda _: None
        with pytest.raises(AssertionError, match="the hub has no model org/new"):  # not asked for at every call
            await h.open_on("org/new")
        h.model("org/new").failed_at -= 3600
        (run,) = await h.open_on("org/new")
        assert await h.weight(await h.push(run, 3)) == h.expected(run)
        assert h.fetched == ["org/new"] * 2
        await h.daemon.stop()

    asyncio.run(main())


def test_a_server_of_patterns_alone_is_ready(tmp_path: Path) -> None:
    async def main() -> None:
        h = await allowing("org/new", models=())(tmp_path).start()
        assert (await h.daemon.health.readiness()).reasons == ()
        (run,) = await h.open_on("org/new")
        assert await h.weight(await h.push(run, 3)) == h.expected(run)
        await h.daemon.stop()

    asyncio.run(main())


# -- random arrivals --

WORK = st.lists(st.tuples(st.integers(0, 3), st.integers(1, 9), st.sampled_from([0.0, 0.01, 0.06])), max_size=25)


@settings(deadline=None, max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(room=st.integers(1, 2), arrivals=WORK, kills=st.integers(0, 1))
def test_no_accepted_request_is_lost_or_starves(
    tmp_path_factory: pytest.TempPathFactory, room: int, arrivals: list[tuple[int, int, float]], kills: int
) -> None:
    """Four runs on three models get steps at random moments; once the daemon is killed in between. Each step gives the
    weight that it would have given alone and in order."""

    async def main() -> None:
        h = await Several(tmp_path_factory.mktemp("several"), A, B, C, room=room).start()
        runs = await h.open_on(A, B, C, A)
        steps: list[tuple[RequestId, int]] = []
        for place, (number, gradient, pause) in enumerate(arrivals):
            run = runs[number]
            steps.append((await h.push(run, gradient), h.expected(run)))
            await asyncio.sleep(pause)
            if kills and place == len(arrivals) // 2:
                await h.kill()
                await h.start()
        for step, expected in steps:
            assert await h.weight(step) == expected
        for run in runs:
            assert await h.weight(await h.push(run, 1)) == h.expected(run)
        await h.daemon.stop()

    asyncio.run(asyncio.wait_for(main(), 120))

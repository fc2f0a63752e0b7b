"""How the worker's loop shares a device: training beside sampling, pass beside pass, session beside session."""

from __future__ import annotations

from collections import Counter

import pytest

from openrl.errors import OpenRLError
from openrl.types import AdamParams, RunId
from openrl.workers.messages import Call, Kind, OptimStep, Sampled
from support import loops
from support.loops import Clock, cancel, sample, tell, train

clock = loops.clock


# ---- sampling between sessions ----


def test_a_flood_of_one_session_does_not_hold_up_anothers_sample(clock: Clock) -> None:
    """The single sample begins as soon as a row is free, though hundreds came before it."""
    flood = [(0.0, sample(f"flood:{i}", 20)) for i in range(500)]
    story = tell(clock, *flood, (5.5, sample("small:0", 1)), rows=8)
    first_free = min(at for request, at in story.at.items() if request != "small:0")
    assert story.at["small:0"] <= first_free + 2
    assert len(story.at) == 501


def test_sessions_with_work_get_equal_tokens_whatever_they_send(clock: Clock) -> None:
    """Long samples against short ones: until the shorter work is done, neither has drawn much more than the other."""
    long = [(0.0, sample(f"long:{i}", 40)) for i in range(40)]
    short = [(0.0, sample(f"short:{i}", 5)) for i in range(320)]
    story = tell(clock, *long, *short, rows=8)
    ended = story.clock.now - 100
    tokens: Counter[str] = Counter()
    for request, at in story.at.items():
        if at - 100 < ended / 2:
            session = str(request).partition(":")[0]
            tokens[session] += {"long": 40, "short": 5}[session]
    assert 0.7 < tokens["long"] / tokens["short"] < 1.4


def test_a_session_of_double_weight_gets_double(clock: Clock) -> None:
    heavy = [(0.0, sample(f"heavy:{i}", 5, weight=2.0)) for i in range(300)]
    light = [(0.0, sample(f"light:{i}", 5)) for i in range(300)]
    story = tell(clock, *heavy, *light, rows=9)
    first = [str(request).partition(":")[0] for request in story.order()[:240]]
    assert 1.7 < first.count("heavy") / first.count("light") < 2.3


def test_a_session_that_was_idle_has_no_credit(clock: Clock) -> None:
    """It comes back after the other drew alone for long; from then on they take turns."""
    alone = [(0.0, sample(f"busy:{i}", 5)) for i in range(200)]
    back = [(0.0, sample("idle:x", 1)), *((60.0, sample(f"idle:{i}", 5)) for i in range(100))]
    story = tell(clock, *alone, *back, rows=4)
    after = [str(r).partition(":")[0] for r, at in story.at.items() if at > 166][:60]
    assert 24 <= after.count("idle") <= 36


def test_the_sampler_is_kept_full_but_not_overfull(clock: Clock) -> None:
    story = tell(clock, *((0.0, sample(f"s:{i}", 10)) for i in range(64)), rows=8)
    assert story.clock.now - 100 == 64 * 10 / 8, "no row is ever empty while someone waits"
    assert story.samples.most_waiting <= 8
    assert story.order() == [f"s:{i}" for i in range(64)], "of one session, in the order in which they came"


def test_cancelled_samples_leave_whether_they_wait_or_run(clock: Clock) -> None:
    adds = [(0.0, sample(f"s:{i}", 10)) for i in range(30)]
    cancels = [(4.0, cancel(f"s:{i}")) for i in (0, 29, 28, 77)]
    story = tell(clock, *adds, *cancels, rows=2)
    assert set(story.at) == {f"s:{i}" for i in range(1, 28)}


def test_a_sample_that_the_sampler_refuses_fails_alone(clock: Clock) -> None:
    story = tell(clock, (0, sample("s:0", 3)), (0, sample("s:1", 0)), (0, sample("s:2", 3)))
    results = {m.request: m.result for m in story.sent if isinstance(m, Sampled)}
    assert isinstance(results.pop("s:1"), OpenRLError)  # type: ignore[arg-type]
    assert len(results) == 2


# ---- sampling beside training ----


def longest_wait(story: loops.Story, asked: dict[str, float]) -> float:
    return max(story.at[request] - 100 - at for request, at in asked.items())  # type: ignore[index]


def test_a_one_token_sample_waits_for_the_micro_batch_under_way_and_no_more(clock: Clock) -> None:
    """Under 1.5 times the longest micro-batch, while a session trains without a pause."""
    asked = {f"s:{i}": 7.3 * i for i in range(50)}
    passes = [(0.0, train(n, 50, "r:1")) for n in range(4)]
    story = tell(clock, *passes, *((at, sample(r)) for r, at in asked.items()), turn=0.1)
    assert longest_wait(story, asked) <= 2.0 + 0.1


def test_a_newcomer_goes_next_even_where_sampling_had_its_share(clock: Clock) -> None:
    """Long turns of one session's sampling have put sampling ahead; another's sample still goes right after the
    micro-batch under way, and training gets its time back."""
    drawing = [(0.0, sample(f"busy:{i}", 200)) for i in range(2)]
    asked = {f"new{i}:0": 30 + 11.3 * i for i in range(20)}
    story = tell(
        clock,
        (0.0, train(1, 2000, "r:1")),
        *drawing,
        *((at, sample(r)) for r, at in asked.items()),
        rows=4,
        turn=0.9,
        micro_batch=0.1,
    )
    waits = sorted(story.at[r] - 100 - at for r, at in asked.items())  # type: ignore[index]
    assert waits[-1] <= 0.9 + 0.9 + 0.2
    both = [span for span in story.spans if span.end <= story.at["busy:0"]]  # type: ignore[index]
    seconds = {kind: sum(s.seconds for s in both if s.kind is kind) for kind in Kind}
    assert seconds[Kind.TRAIN] == pytest.approx(seconds[Kind.SAMPLE], rel=0.05)


def test_a_stream_of_newcomers_does_not_starve_training(clock: Clock) -> None:
    stream = [(0.5 * i, sample(f"s{i}:0")) for i in range(400)]
    story = tell(clock, (0.0, train(1, 100, "r:1")), *stream, rows=1, turn=1.0, micro_batch=1.0)
    assert story.at[1] - 100 <= 205, "100 seconds of training took no more than as much again of sampling"


# ---- pass beside pass ----


def test_a_short_pass_goes_right_after_the_micro_batch_under_way(clock: Clock) -> None:
    story = tell(clock, (0, train(1, 30, "long:1")), (5, train(2, 1, "short:1")))
    assert story.at[2] == 108.0
    assert story.at[1] == 162.0


def test_passes_in_hand_take_turns_by_weight(clock: Clock) -> None:
    story = tell(clock, (0, train(1, 30, "a:1")), (0, train(2, 10, "b:1")), micro_batch=1.0)
    assert 118 <= story.at[2] <= 121
    start = clock.now
    story = tell(clock, (0, train(1, 30, "a:1", weight=2.0)), (0, train(2, 10, "b:1")), micro_batch=1.0)
    assert 27 <= story.at[2] - start <= 31


def test_steps_and_saves_go_before_the_next_micro_batch(clock: Clock) -> None:
    step = Call(2, OptimStep(RunId("b:1"), AdamParams()))
    story = tell(clock, (0, train(1, 30, "a:1")), (3, step))
    assert story.at[2] == 109.0


def test_a_pass_is_answered_with_its_last_micro_batch(clock: Clock) -> None:
    """No turn of the sampler comes between the last micro-batch and the answer."""
    story = tell(clock, (0, sample("s:0", 50)), (0.5, train(1, 2, "r:1")), micro_batch=1.0)
    span = [s for s in story.spans if s.kind is Kind.TRAIN][-1]
    assert story.at[1] == span.end

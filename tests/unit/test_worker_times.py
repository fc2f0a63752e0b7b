"""Device seconds as the worker's loop measures them: who shares a turn shares its seconds, who waits has none."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest

from openrl.errors import OpenRLError
from openrl.types import AdamParams, RunId
from openrl.workers.messages import Call, Kind, OptimStep, Returned, Sampled, Save
from support import loops
from support.loops import Clock, sample, tell, train

clock = loops.clock


def test_samples_share_the_turns_that_they_have_rows_in(clock: Clock) -> None:
    """a and b share two turns, then b and c one, then c has one for itself; c waited until the third."""
    story = tell(clock, (0, sample("s:a", 2)), (0, sample("s:b", 3)), (0, sample("s:c", 2)))
    times = {m.request[2:]: (m.watch.started_at, m.watch.seconds) for m in story.sent if isinstance(m, Sampled)}
    assert times == {"a": (100.0, 1.0), "b": (100.0, 1.5), "c": (102.0, pytest.approx(1.5))}


def test_a_pass_has_the_seconds_of_its_micro_batches_and_not_of_the_samples_between(clock: Clock) -> None:
    story = tell(clock, (0, train(1, 3, "r:1")), (0, sample("s:a", 4)))
    watch = next(m.watch for m in story.sent if isinstance(m, Returned))
    assert (watch.started_at, watch.seconds) == (101.0, 6.0)
    assert next(m.watch.seconds for m in story.sent if isinstance(m, Sampled)) == 4.0
    assert clock.now == 110.0


def test_single_operations_are_timed_also_when_they_fail(clock: Clock) -> None:
    step, save = OptimStep(RunId("run"), AdamParams()), Save(RunId("run"), Path(), True, False)
    sent = [m for m in tell(clock, (0, Call(1, step)), (0, Call(2, save))).sent if isinstance(m, Returned)]
    assert [(m.watch.started_at, m.watch.seconds) for m in sent] == [(100.0, 5.0), (105.0, 1.0)]
    assert isinstance(sent[1].result, OpenRLError)


def test_the_record_of_the_device_is_in_order_and_whole(clock: Clock) -> None:
    """Spans never overlap, gaps are gaps, and the sessions' seconds add up to the spans'."""
    step = OptimStep(RunId("r:1"), AdamParams())
    story = tell(clock, (0, train(1, 3, "r:1", "q:1")), (0, sample("s:a", 4)), (50, Call(2, step)))
    assert sum(span.seconds for span in story.spans) == 4 + 6 + 5
    for span, after in pairwise(story.spans):
        assert span.end <= after.start
    for span in story.spans:
        assert sum(span.sessions.values()) == pytest.approx(span.seconds)
        assert span.seconds <= span.end - span.start
        assert span.longest == {Kind.SAMPLE: 1, Kind.TRAIN: 2}.get(span.kind) or span.start == 150
    assert {span.kind for span in story.spans if "r" in span.sessions} == {Kind.TRAIN}
    assert (story.spans[-1].start, story.spans[-1].rows) == (150.0, 1)
    assert story.begun == ["s:a"]


def test_quick_turns_of_one_kind_become_one_span(clock: Clock) -> None:
    story = tell(clock, (0, sample("s:a", 1000)), turn=0.01)
    assert 9 <= len(story.spans) <= 11
    assert sum(span.turns for span in story.spans) == 1000
    assert all(span.longest == pytest.approx(0.01) for span in story.spans)

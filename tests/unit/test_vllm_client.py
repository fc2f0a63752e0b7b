"""The sampler over vLLM's child process, against a fake of that process: frames, adapters, crashes, hangs, routes."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from openrl.backends.common.stops import Stops
from openrl.errors import BackendFault, BadRequest, ModelError
from openrl.types import RequestId, SamplePayload
from support.vllm_stage import MakeStage, ask, stages, tokens


@pytest.fixture
def stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[MakeStage]:
    yield from stages(tmp_path, monkeypatch)


def test_samples_are_sequences_of_their_own_with_seeds_s_plus_i_s11(stage: MakeStage) -> None:
    one = stage()
    output = one.driver.draw(ask(3, topk=2))
    assert tokens(output) == [[10, 11, 12], [11, 12, 13], [12, 13, 14]]
    assert {s.stop_reason for s in output.sequences} == {"length"}
    assert output.sequences[0].topk is not None
    assert output.sequences[0].topk.ids.shape == (3, 2)
    frames = one.sent(0, "draw")
    assert [frame["seed"] for frame in frames] == [10, 11, 12]
    assert len({frame["key"] for frame in frames}) == 3


def test_without_a_seed_all_differ_s12(stage: MakeStage) -> None:
    one = stage()
    one.driver.draw_all([(ask(seed=None), None), (ask(seed=None), None)])
    seeds = [frame["seed"] for frame in one.sent(0, "draw")]
    assert len(set(seeds)) == 2
    assert all(0 <= seed < 1 << 63 for seed in seeds)  # -1 would mean none to vLLM


def test_stops_are_ours_s8_s9(stage: MakeStage) -> None:
    """Token ids, the model's own end where `stop` is None, and none at all where it is []; the last one is included."""
    one = stage()
    asks = [ask(seed=3, max_tokens=6, stop=stop) for stop in (None, (), (4,), (8,))]
    outputs = one.driver.draw_all([(asked, None) for asked in asks])
    assert [tokens(output)[0] for output in outputs] == [[3, 4, 5], [*range(3, 9)], [3, 4], [*range(3, 9)]]
    assert [output.sequences[0].stop_reason for output in outputs] == ["stop", "length", "stop", "stop"]


def test_stop_strings_are_seen_in_the_stream_and_the_rest_is_cancelled(
    stage: MakeStage, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = stage()
    monkeypatch.setattr(Stops, "_load", lambda self: lambda ids: "".join(chr(97 + i % 26) for i in ids))
    output = one.driver.draw(ask(max_tokens=20, stop=("zb",)))
    frame = one.sent(0, "draw")[0]
    assert (frame["stream"], frame["stop"]) == (True, [])
    assert output.sequences[0].stop_reason == "length"
    output = one.driver.draw(ask(max_tokens=20, stop=("mn",)))
    assert output.sequences[0].stop_reason == "stop"
    assert tokens(output) == [[10, 11, 12, 13]]
    one.driver.draw(ask())
    assert len(one.sent(0, "cancel")) == 1


@pytest.mark.parametrize(
    "asked",
    [
        ask(max_tokens=1, prompt_logprobs=True),  # compute_logprobs
        ask(temperature=0.005),  # vLLM would take 0.01
    ],
)
def test_what_vllm_answers_otherwise_is_our_engines(stage: MakeStage, asked: SamplePayload) -> None:
    one = stage()
    one.driver.draw(asked)
    assert [job.payload for job in one.engine.seen] == [asked]
    assert one.sent(0, "draw") == []


@pytest.mark.parametrize(
    ("skill", "params"),
    [("truncated", {"top_p": 0.9}), ("truncated", {"top_k": 5}), ("temperature", {"temperature": 0.7})],
)
def test_what_the_probe_finds_wrong_is_our_engines_s1_s2(stage: MakeStage, skill: str, params: dict[str, Any]) -> None:
    one = stage({"can": {skill: False}})
    one.driver.draw(ask(**params))
    one.driver.draw(ask(temperature=1.0))
    one.driver.draw(ask(temperature=0.0))
    assert len(one.engine.seen) == 1
    assert len(one.sent(0, "draw")) == 2
    assert {"truncated": "top-p and top-k"}.get(skill, skill) in one.sampler.report.detail


def test_an_adapter_of_the_head_goes_where_it_is_applied(stage: MakeStage) -> None:
    one = stage({"can": {"head": False}})
    one.driver.draw(ask(), one.adapter("head", head=True))
    one.driver.draw(ask(), one.adapter("layers"))
    assert [job.adapter.key for job in one.engine.seen if job.adapter] == ["head"]
    assert [frame["name"] for frame in one.sent(0, "adapter")] == ["layers"]


def test_prompts_are_scored_by_our_engine_beside_vllms_tokens_s5(stage: MakeStage) -> None:
    one = stage()
    output = one.driver.draw(ask(2, prompt_logprobs=True))
    assert tokens(output) == [[10, 11, 12], [11, 12, 13]]
    assert output.prompt_logprobs is not None
    assert output.prompt_logprobs.tolist() == [-2.0, -2.0]
    assert [job.payload.num_samples for job in one.engine.seen] == [1]


def test_adapters_have_numbers_that_are_never_used_twice(stage: MakeStage) -> None:
    """Two fit; the least recently used makes room, and comes back under another number."""
    one = stage()
    refs = [one.adapter(name) for name in "abc"]
    for ref in [refs[0], refs[1], refs[0], refs[2], refs[1]]:
        one.driver.draw(ask(), ref)
    loaded = one.sent(0, "adapter")
    assert [frame["name"] for frame in loaded] == ["a", "b", "c", "b"]
    assert len({frame["id"] for frame in loaded}) == 4
    forgotten = [frame["id"] for frame in one.sent(0, "forget")]
    assert forgotten == [loaded[1]["id"], loaded[0]["id"]]


def test_more_adapters_at_once_than_fit_wait_their_turn(stage: MakeStage) -> None:
    one = stage()
    refs = [one.adapter(name) for name in "abcd"]
    outputs = one.driver.draw_all([(ask(), ref) for ref in refs])
    numbers = {frame["name"]: frame["id"] for frame in one.sent(0, "adapter")}
    assert [tokens(output)[0][0] for output in outputs] == [10 + 1000 * numbers[name] for name in "abcd"]


def test_an_adapter_whose_checkpoint_is_gone_is_unloaded(stage: MakeStage) -> None:
    one = stage()
    gone, other = one.adapter("gone"), one.adapter("other")
    one.driver.draw(ask(), gone)
    gone.folder.rename(gone.folder.with_name("away"))
    one.driver.draw(ask(), other)
    assert [frame["id"] for frame in one.sent(0, "forget")] == [one.sent(0, "adapter")[0]["id"]]


def test_an_adapter_that_vllm_cannot_load_is_our_engines(stage: MakeStage) -> None:
    one = stage({"refuse": True})
    ref = one.adapter("a")
    one.driver.draw(ask(2), ref)
    one.driver.draw(ask(2), ref)
    assert len(one.engine.seen) == 2
    assert len(one.sent(0, "adapter")) == 1


def test_a_higher_rank_starts_vllm_again_with_room_for_it(stage: MakeStage) -> None:
    one = stage()
    output = one.driver.draw(ask(), one.adapter("wide", rank=20))
    assert one.lives() == 2
    opened = json.loads((one.folder / "frames-1.jsonl").read_text().splitlines()[0])
    assert opened["rank"] == 32
    assert tokens(output)[0][0] == 10 + 1000 * one.sent(1, "adapter")[0]["id"]
    assert one.sampler.report.state == "ready"


def test_a_crash_is_noticed_and_what_was_in_hand_is_drawn_again(stage: MakeStage) -> None:
    one = stage({"crash": 3}, {})
    outputs = one.driver.draw_all([(ask(), None), (ask(2, seed=20), one.adapter("a"))])
    assert tokens(outputs[0]) == [[10, 11, 12]]
    number = one.sent(1, "adapter")[0]["id"]
    assert number not in [frame["id"] for frame in one.sent(0, "adapter")]
    assert tokens(outputs[1])[1] == [1000 * number + token for token in (21, 22, 23)]
    assert one.sampler.report.restarts == 1


def test_a_hang_is_noticed(stage: MakeStage) -> None:
    one = stage({"hang": 1}, {}, hang_seconds=2.0)
    assert tokens(one.driver.draw(ask())) == [[10, 11, 12]]
    assert one.lives() == 2


def test_a_request_that_kills_vllm_each_time_fails_alone(stage: MakeStage) -> None:
    one = stage({"crash": 1}, {"crash": 1}, {"crash": 1}, {})
    one.driver.add("deadly", ask())
    one.driver.until("deadly")
    assert isinstance(one.driver.results["deadly"], BackendFault)
    assert tokens(one.driver.draw(ask())) == [[10, 11, 12]]


def test_a_vllm_that_starts_no_more_refuses_and_says_why(stage: MakeStage) -> None:
    one = stage({"crash": 1}, {"unusable": "out of memory"})
    one.driver.add("first", ask())
    one.driver.until("first")
    failed = one.driver.results["first"]
    assert isinstance(failed, BackendFault)
    assert "out of memory" in failed.message
    assert "--sampler engine" in failed.hint
    assert one.sampler.report.state == "failed"
    with pytest.raises(BackendFault, match="again and again"):
        one.driver.add("second", ask())
    one.driver.draw(ask(max_tokens=1, prompt_logprobs=True))  # what the engine does goes on


def test_a_first_start_that_fails_shows_the_end_of_the_log(stage: MakeStage) -> None:
    one = stage({"unusable": "RuntimeError: no memory"}, opened=False)
    with pytest.raises(ModelError, match="RuntimeError: no memory") as caught:
        one.life.open()
    assert "no such device" in caught.value.hint
    assert "--sampler engine" in caught.value.hint


def test_a_first_start_that_dies_without_a_word(stage: MakeStage, tmp_path: Path) -> None:
    one = stage(opened=False)
    (tmp_path / "python").write_text("#!/bin/sh\necho broken libraries >&2\nexit 4\n")
    with pytest.raises(ModelError, match="exit code 4") as caught:
        one.life.open()
    assert "broken libraries" in caught.value.hint


def test_a_slow_start_is_waited_for_however_short_a_silence_is_allowed(stage: MakeStage) -> None:
    one = stage({"slow": 1.5}, hang_seconds=1.0)
    assert one.sampler.report.state == "ready"


def test_a_cancelled_request_is_given_up(stage: MakeStage) -> None:
    one = stage({"mute": 7})
    one.driver.add("one", ask(2, prompt_logprobs=True))
    assert one.sampler.active == ["one", "one"]
    one.sampler.cancel(RequestId("one"))
    assert one.sampler.active == []
    assert one.sampler.waiting == 0
    assert one.engine.jobs == []


def test_rows_beyond_vllms_wait(stage: MakeStage) -> None:
    one = stage({"mute": 7})
    one.driver.add("many", ask(7))
    assert one.sampler.active == ["many"] * 4
    assert one.sampler.waiting == 3


def test_a_sequence_that_vllm_ends_early_is_a_fault_and_no_result(stage: MakeStage) -> None:
    one = stage({"stray": True})
    one.driver.add("short", ask())
    one.driver.until("short")
    assert isinstance(one.driver.results["short"], BackendFault)


def test_time_is_counted_for_who_had_it(stage: MakeStage) -> None:
    one = stage()
    one.driver.draw(ask(2))
    spent = one.sampler.spent()
    assert {request for part in spent for request in part.rows} == {RequestId("0-0")}
    assert sum(part.steps for part in spent) == 6
    assert one.sampler.spent() == []


def test_illegal_values_are_refused_s10(stage: MakeStage) -> None:
    one = stage()
    with pytest.raises(BadRequest, match="64"):
        one.driver.add("long", ask(max_tokens=63))
    with pytest.raises(BadRequest, match="top_p"):
        one.driver.add("wrong", ask(top_p=0.0))
    assert len(tokens(one.driver.draw(ask(max_tokens=None)))[0]) == 62


def test_the_child_ends_with_its_worker(stage: MakeStage) -> None:
    """Its stdin ends: nothing is left, even of one that was stopped."""
    one = stage()
    assert one.life._child is not None  # pyright: ignore[reportPrivateUsage]
    process = psutil.Process(one.life._child.pid)  # pyright: ignore[reportPrivateUsage]
    os.kill(process.pid, signal.SIGCONT)
    start = time.monotonic()
    one.sampler.close()
    assert time.monotonic() - start < 4
    assert not process.is_running() or process.status() == psutil.STATUS_ZOMBIE

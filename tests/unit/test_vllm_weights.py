"""Checkpoints of whole models, sampled by vLLM in turns with the base model: against a fake of its process."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from openrl.backends.vllm.wholes import Wholes
from openrl.errors import BackendFault
from openrl.types import RequestId
from support.vllm_stage import SHAPES, MakeStage, Stage, ask, stages, tokens

ABLE = {"able": True, "whole": True}


@pytest.fixture
def stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[MakeStage]:
    yield from stages(tmp_path, monkeypatch)


def exchanges(one: Stage, life: int = 0) -> list[str | None]:
    """The folders that a vLLM was told to take, by name; None: its own."""
    return [frame["folder"] and Path(frame["folder"]).name for frame in one.sent(life, "weights")]


def first_tokens(one: Stage, *names: str) -> list[int]:
    """Of requests that have ended."""
    return [tokens(one.driver.results[name])[0][0] for name in names]


def test_each_draws_from_its_own_weights_s15(stage: MakeStage) -> None:
    """The base model, its adapters and whole models at once: nobody gets another's weights, and each set is loaded
    once, but for the base model's, which had the first turn."""
    one = stage()
    refs = [None, one.whole("whole-a"), one.adapter("layers"), one.whole("whole-b"), None, one.whole("second-a")]
    outputs = one.driver.draw_all([(ask(), ref) for ref in [*refs, refs[1], refs[3]]])
    number = one.sent(0, "adapter")[0]["id"]
    drawn = [tokens(output)[0][0] for output in outputs]
    assert drawn == [10, 10_010, 10 + 1000 * number, 20_010, 10, 10_010, 10_010, 20_010]
    assert exchanges(one) == ["whole-a", None, "whole-b", "second-a"]
    assert one.engine.seen == []


def test_adapters_are_loaded_anew_after_other_weights(stage: MakeStage) -> None:
    """vLLM forgets them with the base model's weights; their numbers are never used again."""
    one = stage()
    ref, whole = one.adapter("layers"), one.whole("whole-a")
    for one_ref in (ref, whole, ref):
        one.driver.draw(ask(), one_ref)
    loaded = [frame["id"] for frame in one.sent(0, "adapter")]
    assert len(set(loaded)) == 2
    assert exchanges(one) == ["whole-a", None]


def test_nothing_is_sent_while_weights_are_loaded_and_others_need_not_wait(stage: MakeStage) -> None:
    one = stage({"mute": 1, "loads": 0.3})
    one.driver.add("base", ask())
    one.driver.add("whole", ask(2), one.whole("whole-a"))
    assert one.sampler.waiting == 0, "what waits for other weights keeps nobody from the rows"
    assert one.sampler.active == ["base"]
    one.sampler.cancel(RequestId("base"))
    one.sampler.step()
    assert one.sampler.active == []
    assert one.sampler.waiting == 2
    one.driver.until("whole")
    kinds = [json.loads(line).get("op") for line in (one.folder / "frames-0.jsonl").read_text().splitlines()]
    assert kinds == [None, "draw", "cancel", "weights", "draw", "draw"]


def test_a_long_load_is_no_hang(stage: MakeStage) -> None:
    one = stage({"loads": 2.0}, hang_seconds=1.0)
    assert tokens(one.driver.draw(ask(), one.whole("whole-a")))[0][0] == 10_010
    assert one.lives() == 1


def test_after_a_crash_the_weights_are_loaded_before_requests_run_again(stage: MakeStage) -> None:
    one = stage({"crash": 2}, {})
    ref = one.whole("whole-a")
    one.driver.draw(ask(), ref)
    outputs = one.driver.draw_all([(ask(2), ref), (ask(), None)])
    assert [tokens(output)[0][0] for output in outputs] == [10_010, 10]
    assert exchanges(one, 0) == ["whole-a"]
    assert exchanges(one, 1) == ["whole-a", None]


def test_weights_that_kill_vllm_each_time_fail_their_requests_alone(stage: MakeStage) -> None:
    one = stage(*[{"exchange": ["crash"]}] * 3, {})
    one.driver.add("deadly", ask(), one.whole("whole-a"))
    one.driver.add("base", ask())
    one.driver.until("deadly", "base")
    assert isinstance(one.driver.results["deadly"], BackendFault)
    assert first_tokens(one, "base") == [10]


def test_weights_that_vllm_refuses_are_our_engines_and_the_base_comes_back(stage: MakeStage) -> None:
    one = stage({"exchange": [{"error": "KeyError: 'norm'"}]})
    bad = one.whole("whole-a")
    one.driver.add("bad", ask(), bad)
    one.driver.add("base", ask())
    one.driver.add("good", ask(), one.whole("whole-b"))
    one.driver.until("bad", "base", "good")
    assert first_tokens(one, "bad", "base", "good") == [1, 10, 20_010]
    assert [job.request for job in one.engine.seen] == ["bad"]
    one.driver.draw(ask(), bad)
    assert exchanges(one) == ["whole-a", "whole-b"], "it is not tried twice"
    assert one.lives() == 1


def test_a_model_that_is_spoiled_is_opened_again(stage: MakeStage) -> None:
    one = stage({"exchange": [{"error": "RuntimeError: half way", "whole": False}]}, {})
    one.driver.add("bad", ask(), one.whole("whole-a"))
    one.driver.add("base", ask())
    one.driver.until("bad", "base")
    assert first_tokens(one, "bad", "base") == [1, 10]
    assert one.lives() == 2


def test_a_vllm_that_gets_other_weights_wrong_says_so_and_takes_none(stage: MakeStage) -> None:
    """All whole models are our engine's then, also those that wait, and after a restart."""
    one = stage({"exchange": [{"able": False, "whole": False}]}, {"crash": 2}, {})
    names = ["one", "two", "base"]
    for name, ref in zip(names, [one.whole("whole-a"), one.whole("whole-b"), None], strict=True):
        one.driver.add(name, ask(), ref)
    one.driver.until(*names)
    assert first_tokens(one, *names) == [1, 1, 10]
    assert "whole models" in one.sampler.report.detail
    one.driver.draw(ask())
    assert tokens(one.driver.draw(ask(), one.whole("whole-c")))[0][0] == 1
    assert "whole models" in one.sampler.report.detail
    assert [exchanges(one, life) for life in range(one.lives())] == [["whole-a"], [], []]


def test_a_checkpoint_that_goes_while_it_waits_is_left_to_our_engine(stage: MakeStage) -> None:
    """Which says what is wrong with it."""
    one = stage({"mute": 1})
    one.driver.add("base", ask())
    ref = one.whole("whole-a")
    one.driver.add("gone", ask(), ref)
    shutil.rmtree(ref.folder)
    one.sampler.cancel(RequestId("base"))
    one.driver.until("gone")
    assert [job.request for job in one.engine.seen] == ["gone"]
    assert exchanges(one) == []


def test_prompts_of_whole_models_are_scored_by_our_engine_s5(stage: MakeStage) -> None:
    one = stage()
    ref = one.whole("whole-a")
    output = one.driver.draw(ask(prompt_logprobs=True), ref)
    assert tokens(output)[0][0] == 10_010
    assert output.prompt_logprobs is not None
    assert [job.adapter for job in one.engine.seen] == [ref]


@pytest.mark.parametrize(
    ("shapes", "why"),
    [
        ({**SHAPES, "model.norm.weight": (3,)}, "another shape"),
        ({**SHAPES, "model.other.weight": (2,)}, "another name"),
        ({"model.embed_tokens.weight": (5, 2)}, "10 of 12"),
    ],
)
def test_only_what_fits_is_given_to_vllm(stage: MakeStage, shapes: dict[str, tuple[int, ...]], why: str) -> None:
    """vLLM would keep the old values of what is missing."""
    one = stage()
    ref = one.whole("whole-a", shapes)
    assert why in Wholes(one.base, 12).misfit(ref.folder)
    one.driver.draw(ask(), ref)
    assert [job.adapter for job in one.engine.seen] == [ref]


def test_damaged_files_and_adapters_do_not_fit(stage: MakeStage) -> None:
    one = stage(opened=False)
    wholes = Wholes(one.base, 12)
    assert wholes.misfit(one.base) == ""
    damaged = one.whole("whole-a").folder
    (damaged / "model.safetensors").write_bytes(b"nothing")
    assert "not a readable" in wholes.misfit(damaged)
    assert "no whole model" in wholes.misfit(one.adapter("layers").folder)

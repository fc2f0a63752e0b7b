"""How sampled sequences end (S8, S9), with token ids on tiny models and stop strings on a tiny tokenizer."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from openrl.errors import BadRequest
from support.sampling import Ask, World, open_world, payload, run, worlds
from support.tokenizers import save_byte_tokenizer

PROMPT = [5, 9, 33, 60]


@pytest.fixture(scope="module", params=worlds("llama"))
def world(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> World:
    return open_world(request.param, tmp_path_factory.mktemp("stops"))


def greedy(world: World, length: int = 20) -> list[int]:
    ask = Ask(payload(PROMPT, max_tokens=length, temperature=0.0, stop=()), "a")
    return run(world.sampler(), [ask])[0].sequences[0].tokens.tolist()


def seeded(world: World, length: int = 30) -> list[int]:
    ask = Ask(payload(PROMPT, max_tokens=length, seed=5, stop=()), "a")
    return run(world.sampler(), [ask])[0].sequences[0].tokens.tolist()


def test_a_stop_token_is_included_with_its_logprob_s8(world: World) -> None:
    tokens = seeded(world)
    stop = tokens[6]
    end = tokens.index(stop)
    (result,) = run(world.sampler(), [Ask(payload(PROMPT, max_tokens=30, seed=5, stop=(96, stop)), "a")])
    assert result.sequences[0].tokens.tolist() == tokens[: end + 1]
    assert result.sequences[0].logprobs.shape == (end + 1,)
    assert np.isfinite(result.sequences[0].logprobs).all()
    assert result.sequences[0].stop_reason == "stop"


def test_a_stop_on_the_last_allowed_token_is_stop_s9(world: World) -> None:
    tokens = seeded(world)
    end = tokens.index(tokens[6])
    (result,) = run(world.sampler(), [Ask(payload(PROMPT, max_tokens=end + 1, seed=5, stop=(tokens[6],)), "a")])
    assert (len(result.sequences[0].tokens), result.sequences[0].stop_reason) == (end + 1, "stop")


def test_none_stops_at_eos_and_empty_never_s9(world: World) -> None:
    """The first seed whose samples meet the end-of-sequence id (2): kept whole with stop=[], cut after it without."""
    eos = 2
    for seed in range(200):
        free = Ask(payload(PROMPT, max_tokens=40, seed=seed, stop=()), "a")
        tokens = run(world.sampler(), [free])[0].sequences[0].tokens.tolist()
        if eos in tokens[:-1]:
            break
    assert len(tokens) == 40
    (cut,) = run(world.sampler(), [Ask(payload(PROMPT, max_tokens=40, seed=seed), "a")])
    assert cut.sequences[0].tokens.tolist() == tokens[: tokens.index(eos) + 1]
    assert cut.sequences[0].stop_reason == "stop"


def test_integers_replace_eos_s9(world: World) -> None:
    """With token ids given, the model's own end-of-sequence id no longer stops."""
    for seed in range(200):
        free = Ask(payload(PROMPT, max_tokens=40, seed=seed, stop=()), "a")
        tokens = run(world.sampler(), [free])[0].sequences[0].tokens.tolist()
        if 2 in tokens[:-1]:
            break
    absent = next(i for i in range(3, 97) if i not in tokens)
    (result,) = run(world.sampler(), [Ask(payload(PROMPT, max_tokens=40, seed=seed, stop=(absent,)), "a")])
    assert result.sequences[0].tokens.tolist() == tokens


def test_strings_without_a_tokenizer_are_refused(world: World) -> None:
    with pytest.raises(BadRequest, match="tokenizer"):
        world.sampler().add(Ask(payload(PROMPT, max_tokens=4, stop=("x",))).job("r"))


def test_an_empty_string_is_refused(world: World) -> None:
    with pytest.raises(BadRequest, match="empty string"):
        world.sampler().add(Ask(payload(PROMPT, max_tokens=4, stop=("",))).job("r"))


@pytest.mark.parametrize("name", worlds("llama"))
def test_strings_stop_after_the_whole_token_s8(tmp_path: Path, name: str) -> None:
    """A stop string that begins and ends inside tokens: the completing token is kept whole."""
    world = open_world(name, tmp_path)
    decode = save_byte_tokenizer(tmp_path)
    tokens = greedy(world)
    text = decode(tokens)
    assert len(text) > 8
    stop = text[3:6]
    end = next(i for i in range(1, 21) if stop in decode(tokens[:i]))
    asks = [
        Ask(payload(PROMPT, max_tokens=20, temperature=0.0, stop=("absent", stop)), "a"),
        Ask(payload(PROMPT, max_tokens=20, temperature=0.0, stop=("absent",)), "a", at=1),
    ]
    results = run(world.sampler(), asks)
    assert results[0].sequences[0].tokens.tolist() == tokens[:end]
    assert results[0].sequences[0].stop_reason == "stop"
    assert results[1].sequences[0].tokens.tolist() == tokens
    assert results[1].sequences[0].stop_reason == "length"

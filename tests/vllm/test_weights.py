"""Checkpoints of whole models: the real vLLM takes their weights in place of the base model's, and gives them up again.

What is drawn is compared with transformers' full forward over the same folder.
"""

from __future__ import annotations

import shutil
import time

import numpy as np
import pytest

from openrl.checkpoints.full import MODEL_FILE
from openrl.errors import BadRequest
from openrl.types import AdapterRef, RequestId
from support.sampling import Ask, payload
from support.vllm import VllmWorld, check, draw, scaled

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1200)]

# Longer than a block of vLLM's cache, so that a prompt that comes again is found there.
PROMPT = [3 + (7 * i) % 90 for i in range(150)]


def greedy(name: str | None) -> Ask:
    return Ask(payload(PROMPT, max_tokens=8, temperature=0.0, stop=()), name)


def random(name: str | None) -> Ask:
    return Ask(payload(PROMPT, 3, max_tokens=8, seed=4, temperature=1.0, stop=()), name)


def test_each_request_draws_from_its_own_weights_s6_s15(llama: VllmWorld) -> None:
    """Greedy tokens and logprobs, one after another and all at once: keys and values of the same prompt under other
    weights are never used (prefix cache), and the base model comes back as it was, adapters included."""
    names = [None, "whole-a", "whole-b", None, "a", "whole-a", "b", None]
    found: dict[str | None, list[int]] = {}
    for name in names:
        ((sequence,),) = draw(llama, [greedy(name)])
        check(llama, greedy(name), sequence)
        assert sequence.tokens.tolist() == scaled(llama, greedy(name), sequence).argmax(-1).tolist()
        assert found.setdefault(name, sequence.tokens.tolist()) == sequence.tokens.tolist()
    assert len({tuple(tokens) for tokens in found.values()}) == 5, "weights that draw the same show nothing"
    asks = [ask for name in names for ask in (random(name), greedy(name))]
    for ask, sequences in zip(asks, draw(llama, asks), strict=True):
        for sequence in sequences:
            check(llama, ask, sequence)
    assert llama.sampler.report.restarts == 0
    assert "engine does" not in llama.sampler.report.detail
    assert {"whole-a", "whole-b"} <= {*llama.taken}, "vLLM drew them"


def test_our_engine_says_the_same(llama: VllmWorld) -> None:
    """Its prompt logprobs of what vLLM drew, both in float32."""
    for name in ("whole-a", None, "whole-b"):
        ((sequence, *_),) = draw(llama, [random(name)])
        tokens = [*PROMPT, *sequence.tokens.tolist()]
        scored = llama.driver.draw(payload(tokens, max_tokens=1, prompt_logprobs=True), llama.ref(name))
        assert scored.prompt_logprobs is not None
        np.testing.assert_allclose(sequence.logprobs, scored.prompt_logprobs[len(PROMPT) :], atol=1e-4)


def test_what_was_given_up_leaves_nothing_behind(llama: VllmWorld) -> None:
    """Other weights come while sequences that somebody gave up are still under way."""
    for name, other in (("a", "whole-b"), ("whole-b", None)):
        llama.driver.add(f"given up {name}", payload(PROMPT, 4, max_tokens=90, seed=1, stop=()), llama.ref(name))
        time.sleep(0.3)
        llama.sampler.cancel(RequestId(f"given up {name}"))
        ((sequence,),) = draw(llama, [greedy(other)])
        check(llama, greedy(other), sequence)
    assert llama.sampler.report.restarts == 0


def test_a_damaged_checkpoint_fails_alone_and_the_base_comes_back(llama: VllmWorld) -> None:
    good = llama.wholes["whole-a"]
    folder = good.folder.with_name("damaged")
    shutil.copytree(good.folder, folder)
    weights = (folder / MODEL_FILE).read_bytes()
    (folder / MODEL_FILE).write_bytes(weights[: len(weights) // 2])  # the header is whole: it seems to fit
    llama.driver.add("damaged", greedy(None).payload, AdapterRef("damaged", folder))
    sequences = draw(llama, [greedy(None), greedy("whole-b"), greedy("a")])
    for name, (sequence,) in zip((None, "whole-b", "a"), sequences, strict=True):
        check(llama, greedy(name), sequence)
    llama.driver.until("damaged")
    assert isinstance(llama.driver.results["damaged"], BadRequest)
    assert llama.sampler.report.restarts == 0


def test_a_dead_vllm_has_the_right_weights_again_before_it_draws(llama: VllmWorld) -> None:
    draw(llama, [greedy("whole-a")])
    before = llama.sampler.report.restarts
    llama.driver.add("long", payload(PROMPT, 4, max_tokens=90, seed=1, stop=()), llama.ref("whole-a"))
    time.sleep(0.1)
    llama.kill()
    sequences = draw(llama, [greedy("whole-a"), greedy(None)])
    for name, (sequence,) in zip(("whole-a", None), sequences, strict=True):
        check(llama, greedy(name), sequence)
    llama.driver.until("long")
    assert llama.sampler.report.restarts == before + 1

"""The sampling part of the contract with the real vLLM (its build for CPUs), against transformers' own full forward.

Seeds are vLLM's own, so tokens are not compared with our engine's; every logprob and every choice that has no chance
in it is.
"""

from __future__ import annotations

import numpy as np
import pytest

from support.sampling import Ask, log_softmax, payload
from support.vllm import VllmWorld, check, draw, scaled, vllm_python, write

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1200)]

PROMPT = [5, 17, 40, 3, 22]


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.3])
def test_logprobs_are_scaled_by_temperature_alone_s1_s2(llama: VllmWorld, temperature: float) -> None:
    """Also beside top-p and top-k, which do not renormalise them, and in one batch with others."""
    asks = [
        Ask(payload(PROMPT, 4, max_tokens=8, seed=1, temperature=temperature, top_p=0.9, stop=()), "a"),
        Ask(payload(PROMPT, 2, max_tokens=8, seed=1, temperature=temperature, top_k=5, stop=())),
        Ask(payload(PROMPT, 2, max_tokens=8, seed=1, temperature=temperature, stop=()), "b"),
        Ask(payload(PROMPT, max_tokens=8, temperature=0.0, stop=()), "b"),
    ]
    for ask, sequences in zip(asks, draw(llama, asks), strict=True):
        assert len(sequences) == ask.payload.num_samples
        for sequence in sequences:
            check(llama, ask, sequence)


def test_top_p_and_top_k_cut_s13(llama: VllmWorld) -> None:
    """No token outside the smallest set with that mass, or outside the k likeliest, is ever drawn."""
    cut = Ask(payload(PROMPT, 8, max_tokens=16, seed=3, temperature=1.3, top_p=0.5, stop=()), "a")
    few = Ask(payload(PROMPT, 8, max_tokens=16, seed=3, temperature=1.3, top_k=2, stop=()), "b")
    drawn = draw(llama, [cut, few])
    for sequence in drawn[0]:
        table = scaled(llama, cut, sequence)
        for row, token in zip(table, sequence.tokens, strict=True):
            before = np.exp(row[row > row[token]]).sum()
            assert before < 0.5 + 1e-3
    for sequence in drawn[1]:
        ranks = (scaled(llama, few, sequence) > sequence.logprobs[:, None] + 1e-3).sum(-1)
        assert ranks.max() < 2


def test_greedy_is_argmax_at_temperature_1_s3(llama: VllmWorld) -> None:
    asks = [Ask(payload(PROMPT, max_tokens=10, temperature=0.0, stop=()), name) for name in (None, "a", "b")]
    for ask, (sequence,) in zip(asks, draw(llama, asks), strict=True):
        assert sequence.tokens.tolist() == scaled(llama, ask, sequence).argmax(-1).tolist()
        check(llama, ask, sequence)


def test_seeds_s11(llama: VllmWorld) -> None:
    """The same seed draws the same; sample i is a lone request with seed s + i; without a seed all differ (S12)."""
    again = [Ask(payload(PROMPT, 3, max_tokens=12, seed=7, stop=()), "a") for _ in range(2)]
    alone = [Ask(payload(PROMPT, max_tokens=12, seed=7 + i, stop=()), "a") for i in range(3)]
    fresh = [Ask(payload(PROMPT, 2, max_tokens=12, stop=()), "a")]
    first, second, *rest = draw(llama, again + alone + fresh)
    texts = [tuple(s.tokens.tolist()) for s in first]
    assert texts == [tuple(s.tokens.tolist()) for s in second]
    assert texts == [tuple(one.tokens.tolist()) for (one,) in rest[:3]]
    others = [tuple(s.tokens.tolist()) for s in rest[3]]
    assert len({*texts, *others}) == 5


def test_stops_s8_s9(llama: VllmWorld) -> None:
    """The stop token is included and has a logprob; a stop at the last allowed token is `stop`; [] never stops."""
    free = Ask(payload(PROMPT, max_tokens=20, temperature=0.0, stop=()), "a")
    ((whole,),) = draw(llama, [free])
    assert (len(whole.tokens), whole.stop_reason) == (20, "length")
    stop = int(whole.tokens[6])
    at = whole.tokens.tolist().index(stop)
    asks = [
        Ask(payload(PROMPT, max_tokens=20, temperature=0.0, stop=(stop,)), "a"),
        Ask(payload(PROMPT, max_tokens=at + 1, temperature=0.0, stop=(stop,)), "a"),
    ]
    for ask, (sequence,) in zip(asks, draw(llama, asks), strict=True):
        assert sequence.tokens.tolist() == whole.tokens[: at + 1].tolist()
        assert sequence.stop_reason == "stop"
        check(llama, ask, sequence)


def test_end_of_sequence_is_a_stop_unless_told_otherwise_s9(llama: VllmWorld) -> None:
    """A hot request draws the end soon: the last token where `stop` is None, and one like others where it is []."""
    usual, never = (payload(PROMPT, 8, max_tokens=120, seed=5, temperature=3.0, stop=stop) for stop in (None, ()))
    stopped, endless = draw(llama, [Ask(usual), Ask(never)])
    assert any(s.stop_reason == "stop" for s in stopped)
    for sequence in stopped:
        assert (sequence.stop_reason == "stop") == (sequence.tokens[-1] == 2)
        assert 2 not in sequence.tokens[:-1]
    assert all((len(s.tokens), s.stop_reason) == (120, "length") for s in endless)
    assert any(2 in s.tokens for s in endless)


def test_top_tokens_of_samples(llama: VllmWorld) -> None:
    ask = Ask(payload(PROMPT, 2, max_tokens=6, seed=1, temperature=0.7, top_p=0.9, topk_sample_logprobs=4), "a")
    for sequence in draw(llama, [ask])[0]:
        assert sequence.topk is not None
        table = scaled(llama, ask, sequence)
        np.testing.assert_allclose(sequence.topk.logprobs, -np.sort(-table, -1)[:, :4], atol=2e-4)
        np.testing.assert_allclose(
            np.take_along_axis(table, sequence.topk.ids.astype(np.int64), -1), sequence.topk.logprobs, atol=2e-4
        )


def test_prompts_are_scored_with_the_adapter_of_the_head_s5(llama: VllmWorld) -> None:
    """vLLM leaves the head's adapter out of prompt logprobs: they are our engine's, beside tokens that vLLM drew."""
    asked = payload(PROMPT, 2, max_tokens=4, seed=1, stop=(), prompt_logprobs=True, topk_prompt_logprobs=2)
    scored = payload(PROMPT, max_tokens=1, prompt_logprobs=True)
    both = llama.driver.draw_all([(asked, llama.adapters["a"]), (scored, llama.adapters["a"])])
    table = log_softmax(llama.reference.logits(PROMPT, "a"))
    for output in both:
        assert output.prompt_logprobs is not None
        assert np.isnan(output.prompt_logprobs[0])
        np.testing.assert_allclose(output.prompt_logprobs[1:], table[np.arange(len(PROMPT) - 1), PROMPT[1:]], atol=2e-5)
    assert both[0].topk_prompt is not None
    for sequence in both[0].sequences:
        check(llama, Ask(asked, "a"), sequence)


def test_adapters_come_and_go(llama: VllmWorld) -> None:
    """More adapters than vLLM has room for, among them one under new weights: each request draws from its own, and
    those of the base model from none."""
    for seed in range(3, 14):
        name = f"adapter-{seed}"
        llama.reference.adapters[name] = llama.reference.make_adapter(seed)
        folder = llama.adapters["a"].folder.parent / name
        llama.adapters[name] = write(llama.reference.adapters[name], folder)
    names = [None, *(f"adapter-{seed}" for seed in range(3, 14)), None]
    asks = [Ask(payload(PROMPT, max_tokens=4, temperature=0.0, stop=()), name) for name in names]
    for ask, (sequence,) in zip(asks, draw(llama, asks), strict=True):
        check(llama, ask, sequence)
    ((sequence,),) = draw(llama, asks[:1])
    check(llama, asks[0], sequence)  # alone, when there is an adapter in every place


@pytest.mark.parametrize(("family", "tied"), [("llama", False), ("qwen3", True), ("gemma3", True)])
def test_families(tmp_path_factory: pytest.TempPathFactory, family: str, tied: bool) -> None:
    """Adapters of all layers and of the head are in what is drawn, whoever draws it; so are whole models' weights,
    which vLLM takes in place (tied heads, packed matrices, norms)."""
    world = VllmWorld(tmp_path_factory.mktemp(family), family, vllm_python(), tied=tied, head_dim=32)
    try:
        asks = [
            Ask(payload(PROMPT, 2, max_tokens=30, seed=1, temperature=0.7, top_p=0.9, stop=()), name)
            for name in (None, "whole-a", "a", "b", "whole-b")
        ]
        for ask, sequences in zip(asks, draw(world, asks), strict=True):
            for sequence in sequences:
                check(world, ask, sequence)
        assert world.sampler.report.restarts == 0
        assert world.taken == ["whole-a", "whole-b"]
    finally:
        world.close()

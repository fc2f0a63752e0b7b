"""Probes of `SamplingClient`."""

from __future__ import annotations

from typing import Any

import numpy as np
import tinker
from tinker import types
from tinker.lib.api_future_impl import QueueState

from compat.registry import Call, probe, settled
from compat.stage import MODEL, PROMPT, TIMEOUT, Stage, close, prompt


@probe("SamplingClient", "sample", "sample_async")
def sample(stage: Stage, call: Call) -> None:
    params = types.SamplingParams(max_tokens=4, seed=11, stop=[])
    drawn = call(prompt(), 2, params, topk_sample_logprobs=2)
    assert [len(sequence.tokens) for sequence in drawn.sequences] == [4, 4]
    assert len({sequence.sequence_id for sequence in drawn.sequences}) == 2
    again = call(prompt(), 2, params)
    assert [s.tokens for s in again.sequences] == [s.tokens for s in drawn.sequences]
    _check_drawn(stage, drawn.sequences[0])
    stopping = types.SamplingParams(max_tokens=4, seed=11, stop=[drawn.sequences[0].tokens[1]])
    stopped = call(prompt(), 1, stopping).sequences[0]
    assert (stopped.tokens, str(stopped.stop_reason)) == (drawn.sequences[0].tokens[:2], "stop")
    _check_prompt_fields(stage, call)


def _check_drawn(stage: Stage, sequence: types.SampledSequence) -> None:
    """The logprobs of drawn tokens are those that they have as a prompt; top-k holds the likeliest."""
    whole = types.ModelInput.from_ints([*PROMPT, *sequence.tokens])
    assert sequence.logprobs is not None
    close(sequence.logprobs, stage.sampler.compute_logprobs(whole).result(TIMEOUT)[len(PROMPT) :])
    assert sequence.topk_logprobs is not None
    for token, logprob, best in zip(sequence.tokens, sequence.logprobs, sequence.topk_logprobs, strict=True):
        assert best is not None
        assert best[0][1] >= best[1][1] >= (logprob if token not in dict(best) else best[1][1]) - 1e-5


def _check_prompt_fields(stage: Stage, call: Call) -> None:
    """6.3: what can be asked about the prompt, each against the plain prompt logprobs."""
    plain = stage.weights_logprobs
    one = types.SamplingParams(max_tokens=1, seed=1)
    topk = call(prompt(), 1, one, include_prompt_logprobs=True, topk_prompt_logprobs=3)
    assert topk.prompt_logprobs[0] is None
    close(topk.prompt_logprobs[1:], plain)
    assert topk.topk_prompt_logprobs[0] is None
    for token, logprob, best in zip(PROMPT[1:], plain, topk.topk_prompt_logprobs[1:], strict=True):
        assert len(best) == 3
        close(dict(best).get(token, logprob), logprob)
    targets = np.array([[PROMPT[1], 7], [PROMPT[2], -1]], np.int64)
    wanted = tinker.TensorData(data=targets, dtype="int64", shape=[2, 2])
    answer = call(prompt(), 1, one, target_prompt_logprobs=wanted).target_prompt_logprobs
    found = np.array(answer.data, np.float32).reshape(2, 2)
    close(found[:, 0], plain)
    assert found[1, 1] == 0
    alternatives: Any = call(prompt(), 1, one, prompt_alt_tokens_k=2).prompt_alt_tokens
    assert list(alternatives.tokens.shape) == [2, 2]
    scored = call(prompt(), 1, one, target_prompt_logprobs=alternatives.tokens).target_prompt_logprobs
    close(alternatives.logprobs.data, scored.data)
    last = call(prompt(), 1, one, include_prompt_logprobs=True, prompt_logprobs_last_n=1).prompt_logprobs
    assert last[:2] == [None, None]
    close(last[2:], plain[1:])


@probe("SamplingClient", "compute_logprobs", "compute_logprobs_async")
def compute_logprobs(stage: Stage, call: Call) -> None:
    """Those of a training pass over the same tokens, and in part if so asked."""
    found = call(prompt(), on=stage.base)
    assert found[0] is None
    fresh = stage.new_trainer()
    inputs = {"target_tokens": PROMPT[1:], "weights": [1.0, 1.0]}
    datum = types.Datum(model_input=types.ModelInput.from_ints(PROMPT[:-1]), loss_fn_inputs=inputs)
    output = fresh.forward([datum], "cross_entropy").result(TIMEOUT)
    close(found[1:], output.loss_fn_outputs[0]["logprobs"].data)
    close(call(prompt(), 1, on=stage.base)[-1], found[-1])


@probe("SamplingClient", "create")
def create(stage: Stage, call: Call) -> None:
    client = call(stage.service.holder, model_path=stage.trained.weights)
    close(client.compute_logprobs(prompt()).result(TIMEOUT)[1:], stage.weights_logprobs)


@probe("SamplingClient", "get_sampler_handle")
def get_sampler_handle(stage: Stage, call: Call) -> None:
    assert stage.server.endpoint.api_key not in call()


@probe("SamplingClient", "from_sampler_handle")
def from_sampler_handle(stage: Stage, call: Call) -> None:
    """Clones of one handle draw on their own, and never get each other's tokens."""
    handle = stage.sampler.get_sampler_handle()
    clones = [call(handle, api_key=stage.server.endpoint.api_key) for _ in range(2)]
    params = [types.SamplingParams(max_tokens=6, seed=seed, stop=[]) for seed in (1, 2)]
    drawn = [settled(clone.sample(prompt(), 1, p)).sequences[0] for clone, p in zip(clones, params, strict=True)]
    expected = [settled(stage.sampler.sample(prompt(), 1, p)).sequences[0].tokens for p in params]
    assert [sequence.tokens for sequence in drawn] == expected
    assert drawn[0].sequence_id != drawn[1].sequence_id


@probe("SamplingClient", "get_base_model", "get_base_model_async")
def get_base_model(stage: Stage, call: Call) -> None:
    assert call() == MODEL


@probe("SamplingClient", "get_tokenizer")
def get_tokenizer(stage: Stage, call: Call) -> str:
    assert call().decode([65, 66]) == "ab"
    return "from the local cache, which the server has filled"


@probe("SamplingClient", "on_queue_state_change")
def on_queue_state_change(stage: Stage, call: Call) -> str:
    assert call(QueueState.ACTIVE, None) is None
    return "called by the SDK with the queue state that the server sends"


@probe("SamplingClient", "get_telemetry")
def get_telemetry(stage: Stage, call: Call) -> None:
    assert call() is not None

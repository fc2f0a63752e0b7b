"""Content checks: each refusal names the field, the datum, what was given and what is legal."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from openrl.errors import BadRequest
from openrl.types import AdamParams, Cells, Datum, ModelInfo, SamplePayload, SamplingParams, TrainPayload
from openrl.validation import (
    check_adam,
    check_checkpoint_name,
    check_full,
    check_lora,
    check_optimizer,
    check_sample,
    check_train,
    check_ttl,
)

INFO = ModelInfo(vocab_size=100, max_context=32, max_lora_rank=64, parameters=1, family="llama")
F32 = np.float32


def datum(n: int = 3, **changes: Any) -> Datum:
    """A cross_entropy datum; None as a change drops the input."""
    inputs: dict[str, Any] = {"target_tokens": np.arange(n, dtype=np.int64), "weights": np.ones(n, F32)}
    given = {name: value for name, value in (inputs | changes).items() if value is not None}
    return Datum(np.arange(n, dtype=np.int32), given)


def rl_datum(n: int = 3, **changes: Any) -> Datum:
    return datum(n, **({"weights": None, "logprobs": -np.ones(n, F32), "advantages": np.ones(n, F32)} | changes))


def payload(*data: Datum, loss: str = "cross_entropy", **config: Any) -> TrainPayload:
    return TrainPayload(data, loss, config)


def refused(call: Callable[[], None]) -> str:
    with pytest.raises(BadRequest) as caught:
        call()
    assert caught.value.category == "user"
    return str(caught.value)


LEGAL = [
    payload(datum()),
    payload(datum(weights=None)),
    payload(datum(weights=np.asarray([-1.5, 0, 2], F32))),
    payload(
        datum(target_tokens=np.ones((3, 2), np.int64), weights=np.ones((3, 2), F32)),
        datum(target_tokens=np.ones((3, 4), np.int64), weights=np.ones((3, 4), F32)),  # L20
    ),
    payload(rl_datum(), loss="importance_sampling"),
    payload(rl_datum(weights=np.ones(3, F32)), loss="importance_sampling"),  # L17
    payload(
        rl_datum(
            target_tokens=np.ones((3, 2), np.int64),
            logprobs=-np.ones((3, 2), F32),
            advantages=np.ones((3, 2), F32),
        ),
        loss="importance_sampling",
    ),
    payload(rl_datum(), loss="ppo", clip_low_threshold=0.5, clip_high_threshold=2),
    payload(rl_datum(clip_low_threshold=np.asarray([0.5], F32)), loss="ppo"),  # L16
    payload(rl_datum(clip_high_threshold=np.full(3, 1.5, F32)), rl_datum(2), loss="cispo"),
    payload(rl_datum(), loss="dro", beta=0.0),
    payload(rl_datum(sequence_ratio_mask=np.asarray([0, 1, 1], F32)), loss="gspo"),
]


@pytest.mark.parametrize("good", LEGAL, ids=range(len(LEGAL)))
def test_legal_payloads_pass(good: TrainPayload) -> None:
    check_train(good, INFO)


BAD = [
    # G11
    ("no datums", payload(), "data must hold at least one datum"),
    # 1.2
    ("unknown loss", payload(datum(), loss="ppo2"), "loss_fn 'ppo2' is unknown; legal: cross_entropy"),
    ("stable_reinforce", payload(datum(), loss="stable_reinforce"), 'Use loss_fn="importance_sampling"'),
    ("custom", payload(datum(), loss="custom", loss_id="x"), 'loss_fn="importance_sampling"'),
    (
        "unknown config",
        payload(datum(), foo=1.0),
        "loss_fn_config.foo is unknown to loss_fn 'cross_entropy'; legal: no",
    ),
    ("other loss's config", payload(rl_datum(), loss="ppo", beta=1.0), "legal: clip_low_threshold, clip_high"),
    # L15
    ("string config", payload(rl_datum(), loss="dro", beta="x"), "beta must be a finite number, got 'x'"),
    ("nan config", payload(rl_datum(), loss="dro", beta=math.nan), "beta must be a finite number, got nan"),
    ("negative beta", payload(rl_datum(), loss="dro", beta=-1.0), "beta must be >= 0, got -1.0"),
    ("low above 1", payload(rl_datum(), loss="ppo", clip_low_threshold=1.1), "0 <= low <= 1, got 1.1"),
    ("low below 0", payload(rl_datum(), loss="ppo", clip_low_threshold=-0.1), "0 <= low <= 1, got -0.1"),
    ("high as epsilon", payload(rl_datum(), loss="ppo", clip_high_threshold=0.2), "high >= 1, got 0.2"),
    # L12
    ("missing key", payload(rl_datum(advantages=None), loss="ppo"), "data[0].loss_fn_inputs lacks advantages"),
    ("two missing", payload(datum(), loss="ppo"), "lacks advantages, logprobs"),
    ("unknown key", payload(datum(), datum(mask=np.ones(3, F32))), "data[1].loss_fn_inputs.mask is unknown to loss_fn"),
    ("key of another loss", payload(datum(advantages=np.ones(3, F32))), "legal: target_tokens, weights"),
    ("short weights", payload(datum(weights=np.ones(2, F32))), "weights has shape [2]; it must be [3], as target"),
    ("short targets", payload(datum(target_tokens=np.ones(2, np.int64))), "must be model_input's length, 3"),
    ("rank 0", payload(datum(target_tokens=np.ones((), np.int64))), "takes [3] or [3, K]"),
    ("rank 3", payload(datum(target_tokens=np.ones((3, 1, 1), np.int64))), "takes [3] or [3, K]"),
    ("rank 2 in ppo", payload(rl_datum(target_tokens=np.ones((3, 2), np.int64)), loss="ppo"), "takes [3]"),
    ("K of 0", payload(datum(target_tokens=np.ones((3, 0), np.int64))), "K must be at least 1"),
    (
        "K differs",
        payload(datum(target_tokens=np.ones((3, 2), np.int64), weights=np.ones((3, 1), F32))),
        "be [3, 2], as",
    ),
    ("flat weights of rank-2 targets", payload(datum(target_tokens=np.ones((3, 2), np.int64))), "must be [3, 2], as"),
    ("no tokens", payload(datum(0)), "data[0].model_input has 0 tokens"),
    ("too long", payload(datum(), datum(33)), "data[1].model_input has 33 tokens; the model takes 1..32 tokens"),
    # token ids
    (
        "target id",
        payload(datum(), datum(target_tokens=np.asarray([1, 2, 100]))),
        "data[1].loss_fn_inputs.target_tokens: token id 100 at position 2; legal: 0..99",
    ),
    ("negative id", payload(datum(target_tokens=np.asarray([-1, 2, 3]))), "token id -1 at position 0"),
    (
        "id in rank 2",
        payload(datum(target_tokens=np.asarray([[1, 2], [3, 4], [5, 999]]), weights=None)),
        "token id 999 at position 2",
    ),
    (
        "input id",
        payload(datum(), Datum(np.asarray([1, 500], np.int32), datum(2).inputs)),
        "data[1].model_input: token id 500 at position 1",
    ),
    # L10
    (
        "nan advantage",
        payload(rl_datum(), rl_datum(advantages=np.asarray([1, np.nan, 1], F32)), loss="ppo"),
        "data[1].loss_fn_inputs.advantages: nan at position 1; all numbers must be finite",
    ),
    ("-inf weight", payload(datum(weights=np.asarray([1, 1, -np.inf], F32))), "weights: -inf at position 2"),
    ("inf logprob", payload(rl_datum(logprobs=np.asarray([np.inf, 0, 0], F32)), loss="ppo"), "logprobs: inf"),
    # L16
    (
        "threshold shape",
        payload(rl_datum(clip_low_threshold=np.ones(2, F32)), loss="ppo"),
        "clip_low_threshold has shape [2]; it must be [1] or [3]",
    ),
    (
        "threshold range",
        payload(rl_datum(clip_high_threshold=np.asarray([0.5], F32)), loss="ppo"),
        "high >= 1, got 0.5",
    ),
    # 1.8
    (
        "empty gspo mask",
        payload(rl_datum(sequence_ratio_mask=np.zeros(3, F32)), loss="gspo"),
        "data[0].loss_fn_inputs.sequence_ratio_mask is zero everywhere",
    ),
]


@pytest.mark.parametrize(("bad", "message"), [case[1:] for case in BAD], ids=[case[0] for case in BAD])
def test_bad_payloads_are_named(bad: TrainPayload, message: str) -> None:
    assert message in refused(lambda: check_train(bad, INFO))


def test_a_thousand_datums_take_milliseconds() -> None:
    big = payload(*(rl_datum(32) for _ in range(1000)), loss="importance_sampling")
    started = time.perf_counter()
    check_train(big, INFO)
    assert time.perf_counter() - started < 0.1  # about 6 ms; the rest is for a busy machine


# ---- sampling ----


def sample(prompt: int = 3, **fields: Any) -> SamplePayload:
    known = SamplePayload.__dataclass_fields__
    ours = {name: value for name, value in fields.items() if name in known}
    params = SamplingParams(**{name: value for name, value in fields.items() if name not in known})
    return SamplePayload(np.arange(prompt, dtype=np.int32), params=params, **ours)


def targets(*ids: int, rows: int = 2, dtype: type = np.int64) -> Cells:
    return Cells(np.asarray(ids, dtype), (rows, len(ids) // rows))


@pytest.mark.parametrize(
    "good",
    [
        sample(),
        sample(31, max_tokens=1),
        sample(31),
        sample(temperature=0.0, top_p=0.01, top_k=1, seed=-1),
        sample(stop=()),
        sample(stop=("a",)),
        sample(stop=(0, 99)),
        sample(num_samples=64, topk_prompt_logprobs=5),
        sample(target_prompt_logprobs=targets(0, 99, -1, 5)),
        sample(1, target_prompt_logprobs=Cells(np.zeros(0, np.int64), (0, 2)), prompt_alt_tokens_k=1),
        sample(prompt_logprobs=True, prompt_logprobs_last_n=2),
        sample(target_prompt_logprobs=Cells(np.array([4]), (2, 7), np.array([0, 0, 1]), np.array([6]))),
    ],
    ids=range(12),
)
def test_legal_samples_pass(good: SamplePayload) -> None:
    check_sample(good, INFO)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (sample(0), "prompt must hold at least one token"),
        (sample(num_samples=0), "num_samples must lie in 1..4096, got 0"),
        (sample(topk_prompt_logprobs=-1), "topk_prompt_logprobs must lie in 0..100, got -1"),
        (sample(topk_sample_logprobs=101), "topk_sample_logprobs must lie in 0..100, got 101"),
        # 6.3
        (sample(prompt_alt_tokens_k=-1), "prompt_alt_tokens_k must lie in 0..1024, got -1"),
        (sample(prompt_logprobs_last_n=1), "prompt_logprobs_last_n says how many prompt_logprobs are wanted, but none"),
        (sample(prompt_logprobs=True, prompt_logprobs_last_n=0), "prompt_logprobs_last_n is 0; legal: 1..2"),
        (sample(prompt_logprobs=True, prompt_logprobs_last_n=3), "prompt_logprobs_last_n is 3; legal: 1..2"),
        (sample(1, prompt_logprobs=True, prompt_logprobs_last_n=1), "legal: none for a prompt of 1 token"),
        (
            sample(target_prompt_logprobs=targets(1, 2, 3, rows=3)),
            "has shape [3, 1]; a prompt of 3 tokens takes [2",
        ),
        (sample(target_prompt_logprobs=targets(1, 2, 3, 100)), "token id 100 for prompt token 2; legal: 0..99, or -1"),
        (sample(target_prompt_logprobs=targets(1, -2)), "token id -2 for prompt token 2"),
        (sample(target_prompt_logprobs=targets(1, 2, dtype=np.float32)), "must be int64, got float32"),
        # S3
        (sample(temperature=-0.1), "temperature must be a finite number >= 0, got -0.1"),
        (sample(temperature=math.nan), "temperature must be a finite number >= 0, got nan"),
        (sample(top_p=0.0), "top_p must lie in (0, 1], got 0.0"),
        (sample(top_p=1.1), "top_p must lie in (0, 1], got 1.1"),
        (sample(top_k=0), "top_k must be -1 (all) or at least 1, got 0"),
        (sample(top_k=-2), "top_k must be -1 (all) or at least 1, got -2"),
        # S9
        (sample(stop=("",)), "must not hold an empty string"),
        (sample(stop=(100,)), "sampling_params.stop must lie in 0..99, got 100"),
        # S10
        (sample(max_tokens=0), "max_tokens must be at least 1, got 0"),
        (sample(30, max_tokens=3), "prompt (30 tokens) + max_tokens (3) is 33; the model's context holds 32"),
        (sample(32), "the model's context holds 32"),
        (SamplePayload(np.asarray([1, 100], np.int32)), "prompt: token id 100 at position 1; legal: 0..99"),
        (SamplePayload(np.asarray([-1], np.int32)), "token id -1 at position 0"),
    ],
)
def test_bad_samples_are_named(bad: SamplePayload, message: str) -> None:
    assert message in refused(lambda: check_sample(bad, INFO))


# ---- runs, steps and checkpoints ----


def test_a5_rank() -> None:
    flags = {"train_attn": True, "train_mlp": True, "train_unembed": True}
    check_lora(1, INFO, **flags)
    check_lora(64, INFO, **flags)
    assert "must lie in 1..64, got 0" in refused(lambda: check_lora(0, INFO, **flags))
    assert "must lie in 1..64, got 65" in refused(lambda: check_lora(65, INFO, **flags))
    assert "got -1" in refused(lambda: check_lora(-1, INFO, **flags))


def test_a6_something_must_be_trained() -> None:
    flags = {"train_attn": False, "train_mlp": False, "train_unembed": False}
    assert "at least one of train_attn" in refused(lambda: check_lora(8, INFO, **flags))


def test_f1_full_fine_tuning_trains_everything_or_nothing() -> None:
    """F1: flags are ignored when all are true; groups cannot be chosen, and some backends have LoRA only."""
    flags = {"train_attn": True, "train_mlp": True, "train_unembed": True}
    check_full(None, **flags)
    check_full(replace(INFO, full_tuning=True), **flags)
    assert "must be true or absent" in refused(lambda: check_full(INFO, **{**flags, "train_mlp": False}))
    lora_only = replace(INFO, full_tuning=False)
    told = refused(lambda: check_full(lora_only, **flags))
    assert "of this model the backend trains LoRA only; use rank 1..64" in told


def test_o10_only_adamw() -> None:
    check_optimizer({"type": "adamw"})
    check_optimizer({})
    assert "optimizer_config.type 'dimuon'" in refused(lambda: check_optimizer({"type": "dimuon", "version": 1}))


def test_adam_ranges() -> None:
    check_adam(AdamParams())
    check_adam(AdamParams(learning_rate=0, beta1=0, grad_clip_norm=-1))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("learning_rate", -1.0),
        ("learning_rate", math.nan),
        ("learning_rate", math.inf),
        ("beta1", 1.0),
        ("beta2", -0.1),
        ("beta2", math.nan),
        ("eps", 0.0),
        ("weight_decay", -1.0),
        ("grad_clip_norm", math.nan),
    ],
)
def test_bad_adam_params_are_named(field: str, value: float) -> None:
    message = refused(lambda: check_adam(AdamParams(**{field: value})))
    assert f"adam_params.{field} must be" in message
    assert str(value) in message


@pytest.mark.parametrize("name", ["0001", "a", "final.v2_x-1", "A" * 128])
def test_legal_checkpoint_names(name: str) -> None:
    check_checkpoint_name(name)


@pytest.mark.parametrize("name", ["", ".", "..", "-a", "a/b", "a b", "a\n", "é", "A" * 129, "a\x00", "_a"])
def test_bad_checkpoint_names(name: str) -> None:
    assert "is no checkpoint name; legal: 1..128" in refused(lambda: check_checkpoint_name(name))


def test_c1_ttl() -> None:
    for seconds in (None, 3600, 3650 * 86400):
        check_ttl(seconds)
    for seconds in (0, -1, 3599, 3660 * 86400):
        assert "ttl_seconds must lie in 3600.." in refused(lambda seconds=seconds: check_ttl(seconds))

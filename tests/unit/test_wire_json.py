"""JSON bodies of all SDK versions, results by content negotiation, and the strict codec below them."""

from __future__ import annotations

import json
import math
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from openrl.codec import decode_json, decode_object, encode_json, to_object
from openrl.daemon.work import LoadState, ModelStatus, OptimStep, SaveSampler, SaveState, Train, Unload
from openrl.errors import BadRequest
from openrl.types import (
    AdamParams,
    Op,
    OptimOutput,
    SampledSequence,
    SampleOutput,
    SamplePayload,
    SamplingParams,
    TrainOutput,
)
from openrl.wire import replies
from openrl.wire.bodies import (
    JSON,
    PROTOBUF,
    decode_new_run,
    decode_sample,
    decode_work,
    encode_result,
    negotiate,
    read_address,
)
from openrl.wire.messages import FinishSessionBody


def dump(value: object) -> bytes:
    return json.dumps(value).encode()


def work(op: Op, **fields: Any) -> Any:
    return decode_work(op, JSON, dump({"model_id": "s:train:0", "seq_id": 3} | fields))


def sample(**fields: Any) -> SamplePayload:
    body = {"sampling_session_id": "s:sample:0", "seq_id": 0, "prompt": {"chunks": [{"tokens": [1, 2]}]}} | fields
    return decode_sample(JSON, dump(body))


# [3, 5] with 7 at [0, 4] and 2 at [2, 0].
SPARSE_TARGETS: dict[str, Any] = {
    "data": [7, 2],
    "dtype": "int64",
    "shape": [3, 5],
    "sparse_crow_indices": [0, 1, 1, 2],
    "sparse_col_indices": [4, 0],
}

# ---- codec ----


@dataclass(frozen=True, slots=True)
class Inner:
    x: float
    names: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Outer:
    count: int
    inner: Inner | None = None


@given(
    st.builds(
        Outer,
        st.integers(-(2**63), 2**63 - 1),
        st.none() | st.builds(Inner, st.floats(allow_nan=False, allow_infinity=False), st.lists(st.text()).map(tuple)),
    )
)
def test_codec_round_trip(value: Outer) -> None:
    assert decode_json(Outer, encode_json(value)) == value
    assert decode_object(Outer, to_object(value)) == value


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"count": "3"}', "count should be a valid integer, got '3'"),
        ('{"count": true}', "count should be a valid integer, got True"),
        ('{"count": 1, "inner": {"x": "a"}}', "inner.x should be a valid number, got 'a'"),
        ('{"inner": null}', "count is required"),
        ("[1]", "body should be an object"),
        ("", "body is not valid JSON: EOF"),
        ('{"count": 1', "body is not valid JSON: EOF"),
        ("\x00", "body is not valid JSON"),
    ],
)
def test_codec_names_field_value_and_what_is_legal(text: str, message: str) -> None:
    with pytest.raises(BadRequest) as caught:
        decode_json(Outer, text)
    assert message in str(caught.value)


def test_codec_ignores_unknown_fields() -> None:
    assert decode_json(Outer, '{"count": 1, "newer": {"a": 1}}') == Outer(1)


def test_t11_no_bare_nan_leaves() -> None:
    """T11, T12: the SDK's parser dies of a bare NaN and of a null metric, and reads the strings as floats."""
    body = encode_result(Op.OPTIM_STEP, OptimOutput({"a": math.nan, "b": math.inf, "c": -math.inf, "d": 1.5}))
    assert body == (JSON, b'{"metrics":{"a":"NaN","b":"Infinity","c":"-Infinity","d":1.5}}')


# ---- training bodies ----


def datum(**changes: Any) -> dict[str, Any]:
    inputs = {
        "target_tokens": {"data": [2, 3], "dtype": "int64", "shape": [2]},
        "weights": {"data": [0, 1.5], "dtype": "float32"},
    }
    return {"model_input": {"chunks": [{"tokens": [1, 2]}]}, "loss_fn_inputs": inputs | changes}


@pytest.mark.parametrize(
    ("op", "key"), [(Op.FORWARD_BACKWARD, "forward_backward_input"), (Op.FORWARD, "forward_input")]
)
def test_training_body_of_old_sdks(op: Op, key: str) -> None:
    """L1 and T40: JSON without any `type`, nulls where nothing was set."""
    got = work(op, **{key: {"data": [datum()], "loss_fn": "cross_entropy", "loss_fn_config": None}})
    assert isinstance(got, Train)
    assert got.backward is (op is Op.FORWARD_BACKWARD)
    assert got.payload.loss_fn == "cross_entropy"
    assert got.payload.loss_config == {}
    first = got.payload.data[0]
    assert first.tokens.dtype == np.int32
    np.testing.assert_array_equal(first.tokens, [1, 2])
    assert first.inputs["target_tokens"].dtype == np.int64
    np.testing.assert_array_equal(first.inputs["weights"], np.asarray([0, 1.5], np.float32))


def test_csr_and_config_in_json() -> None:
    sparse = {
        "data": [4, 6],
        "dtype": "int64",
        "shape": [2, 4],
        "sparse_crow_indices": [0, 0, 2],
        "sparse_col_indices": [0, 2],
    }
    body = {"data": [datum(target_tokens=sparse)], "loss_fn": "ppo", "loss_fn_config": {"a": 1, "b": 0.5, "c": "x"}}
    got = work(Op.FORWARD_BACKWARD, forward_backward_input=body)
    np.testing.assert_array_equal(got.payload.data[0].inputs["target_tokens"], [[0, 0, 0, 0], [4, 0, 6, 0]])
    assert got.payload.loss_config == {"a": 1.0, "b": 0.5, "c": "x"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"weights": {"data": [1], "dtype": "bfloat16"}}, '"float32" or "int64", got \'bfloat16\''),
        ({"target_tokens": {"data": [1.5], "dtype": "int64"}}, "whole numbers, got 1.5"),
        ({"target_tokens": {"data": [1e300], "dtype": "int64"}}, "whole numbers, got 1e+300"),
        ({"weights": {"data": [1, 2, 3], "dtype": "float32", "shape": [2]}}, "does not hold its 3 values"),
        ({"weights": {"data": ["a"], "dtype": "float32"}}, "data.0 should be a valid number, got 'a'"),
        ({"weights": {"dtype": "float32"}}, "data is required"),
    ],
)
def test_bad_tensors_in_json_are_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(BadRequest) as caught:
        work(Op.FORWARD_BACKWARD, forward_backward_input={"data": [datum(**changes)], "loss_fn": "ppo"})
    assert message in str(caught.value)
    assert next(iter(changes)) in str(caught.value)


def test_address_is_readable_where_the_content_is_wrong() -> None:
    body = dump({"model_id": "s:train:0", "seq_id": 3, "adam_params": "nonsense"})
    assert (read_address(JSON, body).model_id, read_address(JSON, body).seq_id) == ("s:train:0", 3)
    with pytest.raises(BadRequest, match="adam_params"):
        decode_work(Op.OPTIM_STEP, JSON, body)
    with pytest.raises(BadRequest, match="seq_id is required"):
        read_address(JSON, dump({"model_id": "m"}))


def test_optim_step_fills_defaults() -> None:
    """5.8: 0.7 and 0.13 send only what the user set."""
    assert work(Op.OPTIM_STEP) == OptimStep(AdamParams())
    assert work(Op.OPTIM_STEP, adam_params={}) == OptimStep(AdamParams())
    got = work(Op.OPTIM_STEP, adam_params={"learning_rate": 1, "beta2": None, "grad_clip_norm": 0.5})
    assert got == OptimStep(AdamParams(learning_rate=1.0, grad_clip_norm=0.5))
    typed = work(Op.OPTIM_STEP, optimizer_params={"type": "adamw", "learning_rate": 0.25})
    assert typed == OptimStep(AdamParams(learning_rate=0.25))


def test_o10_dimuon_is_refused() -> None:
    with pytest.raises(BadRequest, match=r"optimizer_params\.type 'dimuon' is not served"):
        work(Op.OPTIM_STEP, optimizer_params={"type": "dimuon", "learning_rate": 0.1})


def test_saves_and_loads() -> None:
    assert work(Op.SAVE_STATE, path="a-1", overwrite=True, ttl_seconds=None) == SaveState("a-1", overwrite=True)
    assert work(Op.SAVE_SAMPLER, path="s1", ttl_seconds=3600) == SaveSampler("s1", ttl_seconds=3600)
    assert work(Op.SAVE_SAMPLER, sampling_session_seq_id=2, kind="inflight") == SaveSampler(None, 2)
    assert work(Op.LOAD_STATE, path="tinker://x/weights/a", optimizer=True) == LoadState("tinker://x/weights/a", True)
    assert work(Op.UNLOAD) == Unload()


@pytest.mark.parametrize(
    ("op", "fields", "message"),
    [
        (Op.SAVE_STATE, {}, "path is required"),
        (Op.SAVE_STATE, {"path": "../x"}, "no checkpoint name"),
        (Op.SAVE_STATE, {"path": "x", "ttl_seconds": 10}, "ttl_seconds must lie in 3600"),
        (Op.SAVE_SAMPLER, {}, "path (a name) or sampling_session_seq_id is required"),
        (Op.SAVE_SAMPLER, {"path": "x", "kind": "other"}, "kind should be 'snapshot' or 'inflight', got 'other'"),
        (Op.LOAD_STATE, {"optimizer": True}, "path is required"),
    ],
)
def test_bad_saves_and_loads_are_named(op: Op, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(BadRequest) as caught:
        work(op, **fields)
    assert message in str(caught.value)


def test_create_model_body() -> None:
    base = {"session_id": "s", "model_seq_id": 1, "base_model": "m"}
    new = decode_new_run(dump(base | {"lora_config": {"rank": 4, "seed": None, "train_mlp": False}}))
    assert (new.rank, new.seed, new.train_attn, new.train_mlp, new.train_unembed) == (4, None, True, False, True)
    assert new.optimizer == {"type": "adamw"}
    assert new.user_metadata == {}
    assert decode_new_run(dump(base)).rank == 0  # F1: no lora_config asks for full fine-tuning


def test_finish_reason_is_one_of_three() -> None:
    with pytest.raises(BadRequest, match="'success', 'errored' or 'interrupted', got 'bored'"):
        decode_json(FinishSessionBody, '{"reason": {"type": "bored"}}')


# ---- samples ----


def test_sample_fills_defaults() -> None:
    got = sample()
    assert got.params == SamplingParams()
    assert (got.num_samples, got.prompt_logprobs, got.topk_prompt_logprobs) == (1, False, 0)
    np.testing.assert_array_equal(got.prompt, [1, 2])
    nulls = sample(num_samples=None, prompt_logprobs=None, sampling_params={"temperature": None, "max_tokens": None})
    assert nulls.params == SamplingParams()


def test_t39_an_empty_stop_list_is_not_absent() -> None:
    assert sample(sampling_params={"stop": None}).params.stop is None
    assert sample(sampling_params={"stop": []}).params.stop == ()
    assert sample(sampling_params={"stop": "a"}).params.stop == ("a",)
    assert sample(sampling_params={"stop": ["a", "b"]}).params.stop == ("a", "b")
    assert sample(sampling_params={"stop": [7]}).params.stop == (7,)


def test_numbers_may_be_ints_or_floats() -> None:
    params = sample(sampling_params={"temperature": 1, "top_p": 1, "top_k": 5.0, "seed": -3}).params
    assert (params.temperature, params.top_p, params.top_k, params.seed) == (1.0, 1.0, 5, -3)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"sampling_params": {"stop": [1, "a"]}}, "stop must be a string, a list of strings or a list of token ids"),
        ({"sampling_params": {"stop": {}}}, "stop must be"),
        ({"sampling_params": {"stop": [True]}}, "stop must be"),
        ({"sampling_params": {"top_k": 1.5}}, "top_k must be a whole number, got 1.5"),
        ({"sampling_params": {"max_tokens": "many"}}, "sampling_params.max_tokens should be a valid integer"),
        ({"prompt": {"chunks": [{"tokens": [1.5]}]}}, "prompt.chunks.0.tokens.0 should be a valid integer, got 1.5"),
        ({"prompt": {"chunks": [{"tokens": [2**40]}]}}, "token id 1099511627776 does not fit"),
        ({"prompt": {"chunks": [{"tokens": [2**90]}]}}, "must fit in 64 bits"),
        ({"prompt": {"chunks": [{"type": "image", "data": "", "format": "png"}]}}, "of kind 'image'"),
        ({"prompt": {"chunks": [{"location": "x", "format": "png"}]}}, "of kind 'image_asset_pointer'"),
        ({"prompt": {"chunks": [{"type": "encoded_text"}]}}, "prompt.chunks[0].tokens is required"),
        ({"prompt": {"chunks": [{"type": "image_asset_pointer"}]}}, "of kind 'image_asset_pointer'"),
        ({"prompt": {"chunks": [{"type": "dmel", "dmel": "AA=="}]}}, "of kind 'dmel'"),
        ({"prompt": {"chunks": [{"dmel": "AA=="}]}}, "of kind 'dmel'"),
        ({"target_prompt_logprobs": {"data": [1]}}, "target_prompt_logprobs.dtype is required"),
        ({"target_prompt_logprobs": {"data": [1], "dtype": "int64"}}, "needs a shape [rows, columns], got shape [1]"),
        (
            {"target_prompt_logprobs": {"data": [1, 2], "dtype": "int64", "shape": [3, 1]}},
            "shape [3, 1] does not hold its 2 values",
        ),
        (
            {"target_prompt_logprobs": {**SPARSE_TARGETS, "sparse_col_indices": [0, 9]}},
            "target_prompt_logprobs: column indices must lie in 0..4",
        ),
        ({"prompt_alt_tokens_k": "2"}, "prompt_alt_tokens_k should be a valid integer"),
        ({"record_stability_info": 3}, "record_stability_info should be a valid boolean"),
    ],
)
def test_bad_samples_are_named(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(BadRequest) as caught:
        sample(**fields)
    assert message in str(caught.value)


def test_target_logprobs_keep_their_layout() -> None:
    """6.3: dense or sparse as they came; nothing is unfolded."""
    dense = sample(target_prompt_logprobs={"data": [1, -1, 7, 2], "dtype": "int64", "shape": [2, 2]})
    assert dense.target_prompt_logprobs is not None
    assert dense.target_prompt_logprobs.values.tolist() == [1, -1, 7, 2]
    assert dense.target_prompt_logprobs.rows().tolist() == [0, 0, 1, 1]
    sparse = sample(target_prompt_logprobs=SPARSE_TARGETS).target_prompt_logprobs
    assert sparse is not None
    assert (sparse.shape, sparse.values.dtype) == ((3, 5), np.int64)
    assert sparse.rows().tolist() == [0, 2]
    assert sparse.cols is not None
    assert sparse.cols.tolist() == [4, 0]


def test_what_else_is_asked_of_the_prompt() -> None:
    asked = sample(prompt_alt_tokens_k=3, prompt_logprobs_last_n=1, prompt_logprobs=True)
    assert (asked.prompt_alt_tokens_k, asked.prompt_logprobs_last_n) == (3, 1)
    plain = sample()
    assert (plain.prompt_alt_tokens_k, plain.prompt_logprobs_last_n, plain.target_prompt_logprobs) == (0, None, None)


def test_recording_for_stable_reinforce_is_taken_and_ignored() -> None:
    """1.9: nothing of it is in the answer, and the loss that would read it is refused with a word of what to use."""
    asked, plain = sample(record_stability_info=True), sample()
    assert asked.params == plain.params
    assert asked.prompt.tolist() == plain.prompt.tolist()


def test_a_long_prompt_decodes_in_milliseconds() -> None:
    prompt = {"chunks": [{"type": "encoded_text", "tokens": list(range(32_768))}]}
    body = dump({"sampling_session_id": "s", "seq_id": 0, "prompt": prompt})
    decode_sample(JSON, body)
    started = time.perf_counter()
    assert len(decode_sample(JSON, body).prompt) == 32_768
    assert time.perf_counter() - started < 0.05  # about 2 ms; the rest is for a busy machine


# ---- results ----


def test_results_are_stored_as_wire_bytes() -> None:
    train = encode_result(Op.FORWARD, TrainOutput((np.zeros(2, np.float32),), {"loss:sum": 1.0}))
    sequence = SampledSequence(np.asarray([1], np.int32), np.asarray([-1], np.float32), "stop")
    drawn = encode_result(Op.SAMPLE, SampleOutput((sequence,)))
    assert encode_result(Op.CREATE_RUN, {"model_id": "m"}) == (JSON, b'{"model_id":"m"}')
    for stored in (train, drawn):
        assert negotiate(*stored, PROTOBUF) == (PROTOBUF, stored[1])
        assert negotiate(*stored, f"{PROTOBUF}, application/json")[0] == PROTOBUF
        assert negotiate(*stored, "application/json")[0] == JSON
    assert decode_json(dict, negotiate(*train, "*/*")[1])["metrics"] == {"loss:sum": 1.0}
    assert decode_json(dict, negotiate(*drawn, "")[1])["sequences"][0]["tokens"] == [1]
    small = encode_result(Op.SAVE_STATE, {"path": "tinker://a/weights/b"})
    assert negotiate(*small, PROTOBUF) == small  # T10: protobuf only for passes and samples


def test_a_result_of_the_wrong_kind_is_a_bug() -> None:
    with pytest.raises(TypeError):
        encode_result(Op.SAMPLE, {"a": 1})


def test_capabilities_leave_out_what_is_not_known() -> None:
    """2.8: null is fatal in a field that has a type."""
    model = ModelStatus("m", None, "failed", "no such folder", None, "m")
    (entry,) = replies.capabilities([model], custom_losses=False)["supported_models"]
    assert entry == {
        "model_name": "m",
        "trainable": False,
        "sampleable": False,
        "state": "failed",
        "custom_losses": False,
    }


def test_t31_times_have_an_offset() -> None:
    assert replies.timestamp(0.5) == "1970-01-01T00:00:00.500000Z"

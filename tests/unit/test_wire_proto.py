"""Protobuf against the SDK's own conversion functions: what it builds we read, what we build it reads."""

from __future__ import annotations

import contextlib
import json
import math
from dataclasses import replace

import numpy as np
import pytest
import tinker
import zstandard
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from tinker.proto.request_conv import forward_backward_request_to_proto
from tinker.proto.response_conv import deserialize_forward_backward_output, deserialize_sample_response
from tinker.types.forward_backward_input import ForwardBackwardInput
from tinker.types.forward_backward_request import ForwardBackwardRequest

from openrl.codec import decode_json
from openrl.errors import BadRequest
from openrl.types import AltTokens, Cells, SampledSequence, SampleOutput, TopK, TrainOutput
from openrl.wire import tinker_pb2 as pb
from openrl.wire.compression import inflate
from openrl.wire.old_json import EMPTY_CELL, sample_output_json, train_output_json
from openrl.wire.proto import decode_train, encode_sample_output, encode_train_output, read_address

TensorData = tinker.TensorData


def sdk_datum(tokens: list[int], **inputs: object) -> tinker.Datum:
    return tinker.Datum(model_input=tinker.ModelInput.from_ints(tokens), loss_fn_inputs=inputs)


def sdk_body(
    *data: tinker.Datum,
    loss: str = "cross_entropy",
    config: dict[str, float | str] | None = None,
    seq_id: int = 7,
    forward_only: bool = False,
) -> bytes:
    content = ForwardBackwardInput(data=list(data), loss_fn=loss, loss_fn_config=config)  # type: ignore[arg-type]
    request = ForwardBackwardRequest(forward_backward_input=content, model_id="s:train:0", seq_id=seq_id)
    message = forward_backward_request_to_proto(request)
    message.forward_only = forward_only
    return message.SerializeToString()


def test_request_of_the_sdk_is_read_as_it_was_built() -> None:
    datum = sdk_datum([1, 2, 3], target_tokens=[2, 3, 4], weights=[0.0, 1.0, 0.5])
    body = sdk_body(datum, datum)
    address = read_address(body)
    assert (address.model_id, address.seq_id, address.forward_only) == ("s:train:0", 7, False)
    payload = decode_train(body)
    assert payload.loss_fn == "cross_entropy"
    assert len(payload.data) == 2
    first = payload.data[0]
    assert first.tokens.dtype == np.int32
    assert first.tokens.flags.writeable
    np.testing.assert_array_equal(first.tokens, [1, 2, 3])
    assert first.inputs["target_tokens"].dtype == np.int64  # T37: int32 in chunks, int64 here
    np.testing.assert_array_equal(first.inputs["target_tokens"], [2, 3, 4])
    np.testing.assert_array_equal(first.inputs["weights"], np.asarray([0, 1, 0.5], np.float32))


def test_forward_only_is_part_of_the_address() -> None:
    assert read_address(sdk_body(sdk_datum([1], target_tokens=[1]), forward_only=True)).forward_only


@pytest.mark.parametrize("seq_id", [1, 127, 128, 300_000, 2**31 - 1])
def test_seq_ids_of_every_varint_length(seq_id: int) -> None:
    assert read_address(sdk_body(sdk_datum([1], target_tokens=[1]), seq_id=seq_id)).seq_id == seq_id


def test_a_negative_seq_id_is_read_as_negative() -> None:
    body = pb.ForwardBackwardRequest(model_id="m", seq_id=-3).SerializeToString()
    assert read_address(body).seq_id == -3


def test_l19_csr_patterns_are_independent() -> None:
    """L19, T35: target id 0 is dropped from one pattern while its weight stays in the other."""
    torch = pytest.importorskip("torch")
    targets = torch.zeros((6, 8), dtype=torch.int64)
    weights = torch.zeros((6, 8))
    targets[3, :3] = torch.tensor([4, 0, 6])
    weights[3, :3] = torch.tensor([0.5, 0.3, 0.2])
    datum = sdk_datum([1, 2, 3, 4, 5, 6], target_tokens=targets, weights=weights)
    assert datum.loss_fn_inputs["target_tokens"].sparse_col_indices == [0, 2]
    inputs = decode_train(sdk_body(datum)).data[0].inputs
    np.testing.assert_array_equal(inputs["target_tokens"], targets.numpy())
    np.testing.assert_array_equal(inputs["weights"], weights.numpy())
    assert inputs["weights"].dtype == np.float32


def test_l19_worked_example() -> None:
    tensor = TensorData(
        data=[5, 9, 7], dtype="int64", shape=[4, 6], sparse_crow_indices=[0, 0, 2, 2, 3], sparse_col_indices=[0, 1, 0]
    )
    got = decode_train(sdk_body(sdk_datum([1, 1, 1, 1], target_tokens=tensor))).data[0].inputs["target_tokens"]
    expected = np.zeros((4, 6), np.int64)
    expected[1, :2], expected[3, 0] = [5, 9], 7
    np.testing.assert_array_equal(got, expected)


def test_l19_an_all_zero_tensor_has_no_values() -> None:
    tensor = TensorData(data=[], dtype="float32", shape=[2, 9], sparse_crow_indices=[0, 0, 0], sparse_col_indices=[])
    got = decode_train(sdk_body(sdk_datum([1, 1], weights=tensor))).data[0].inputs["weights"]
    np.testing.assert_array_equal(got, np.zeros((2, 9), np.float32))


def test_l18_shape_is_kept_and_an_absent_one_is_flat() -> None:
    """L18, T36."""
    dense = TensorData(data=np.arange(6).reshape(3, 2), dtype="int64", shape=[3, 2])
    flat = TensorData(data=[1.0, 2.0, 3.0], dtype="float32")
    inputs = decode_train(sdk_body(sdk_datum([1, 2, 3], target_tokens=dense, weights=flat))).data[0].inputs
    np.testing.assert_array_equal(inputs["target_tokens"], [[0, 1], [2, 3], [4, 5]])
    assert inputs["weights"].shape == (3,)


def test_l20_k_may_differ_between_datums() -> None:
    data = [
        sdk_datum([1, 2], target_tokens=TensorData(data=np.ones((2, k), np.int64), dtype="int64", shape=[2, k]))
        for k in (1, 3)
    ]
    shapes = [datum.inputs["target_tokens"].shape for datum in decode_train(sdk_body(*data)).data]
    assert shapes == [(2, 1), (2, 3)]


def test_l13_int64_becomes_float32_where_float32_is_due() -> None:
    advantages = TensorData(data=[1, -1], dtype="int64", shape=[2])
    inputs = decode_train(sdk_body(sdk_datum([1, 2], advantages=advantages))).data[0].inputs
    assert inputs["advantages"].dtype == np.float32
    np.testing.assert_array_equal(inputs["advantages"], [1, -1])


def test_l13_float_targets_are_refused() -> None:
    body = sdk_body(sdk_datum([1], target_tokens=TensorData(data=[1.0], dtype="float32", shape=[1])))
    with pytest.raises(BadRequest, match=r"data\[0\].loss_fn_inputs.target_tokens: must be int64, got float32"):
        decode_train(body)


def test_l21_the_newer_config_map_wins() -> None:
    body = sdk_body(sdk_datum([1]), loss="custom", config={"clip_low_threshold": 0.5, "loss_id": "abc"})
    assert decode_train(body).loss_config == {"clip_low_threshold": 0.5, "loss_id": "abc"}
    message = pb.ForwardBackwardRequest(model_id="m", seq_id=1, loss_fn_config={"beta": 0.1})
    assert decode_train(message.SerializeToString()).loss_config == {"beta": 0.1}
    message.loss_fn_config_v2["beta"].number = 0.2
    assert decode_train(message.SerializeToString()).loss_config == {"beta": 0.2}


def test_chunks_are_joined_in_order() -> None:
    model_input = tinker.ModelInput(
        chunks=[tinker.EncodedTextChunk(tokens=[1, 2]), tinker.EncodedTextChunk(tokens=[3])]
    )
    datum = tinker.Datum(model_input=model_input, loss_fn_inputs={"target_tokens": [1, 2, 3]})
    np.testing.assert_array_equal(decode_train(sdk_body(datum)).data[0].tokens, [1, 2, 3])


@pytest.mark.parametrize(
    ("chunk", "kind"),
    [
        (tinker.types.ImageChunk(data=b"\x89PNG", format="png"), "image"),
        (tinker.types.DmelChunk(dmel=b"abc"), "dmel"),
    ],
)
def test_images_and_audio_are_refused_by_name(chunk: object, kind: str) -> None:
    model_input = tinker.ModelInput(chunks=[tinker.EncodedTextChunk(tokens=[1]), chunk])  # type: ignore[list-item]
    body = sdk_body(tinker.Datum(model_input=model_input, loss_fn_inputs={}))
    with pytest.raises(BadRequest, match=rf"data\[0\].model_input\[1\] is of kind '{kind}'"):
        decode_train(body)


def tensor_body(tensor: pb.Tensor, tokens: int = 2) -> bytes:
    datum = pb.Datum(
        model_input=[pb.Chunk(encoded_text=pb.EncodedTextChunk(tokens=np.ones(tokens, "<i4").tobytes()))],
        loss_fn_inputs={"weights": tensor},
    )
    return pb.ForwardBackwardRequest(model_id="m", seq_id=1, data=[datum]).SerializeToString()


def csr(values: list[float], crow: list[int], cols: list[int]) -> pb.SparseCsr:
    return pb.SparseCsr(
        values=np.asarray(values, "<f4").tobytes(),
        crow_indices=np.asarray(crow, "<i8").tobytes(),
        col_indices=np.asarray(cols, "<i8").tobytes(),
    )


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (pb.Tensor(dense=b"12345", dtype=pb.DTYPE_FLOAT32), "5 bytes are not a whole number of float32"),
        (pb.Tensor(dense=b"12345678", dtype=pb.DTYPE_BFLOAT16), "got DTYPE_BFLOAT16"),
        (pb.Tensor(dense=b"12345678"), "got DTYPE_UNSPECIFIED"),
        (pb.Tensor(dense=b"12345678", dtype=pb.DTYPE_FLOAT32, shape=[3]), r"shape \[3\] does not hold its 2 values"),
        (pb.Tensor(dense=b"12345678", dtype=pb.DTYPE_FLOAT32, shape=[-2]), "does not hold"),
        (pb.Tensor(sparse_csr=csr([1], [0, 1], [0]), dtype=pb.DTYPE_FLOAT32), "no shape"),
        (pb.Tensor(sparse_csr=csr([1], [0, 1], [0]), dtype=pb.DTYPE_FLOAT32, shape=[1]), r"shape \[1\]"),
        (pb.Tensor(sparse_csr=csr([1], [0, 1], [0]), dtype=pb.DTYPE_FLOAT32, shape=[2, 2]), "2 rows need 3 row"),
        (pb.Tensor(sparse_csr=csr([1], [0, 2], [0]), dtype=pb.DTYPE_FLOAT32, shape=[1, 2]), "must rise from 0"),
        (pb.Tensor(sparse_csr=csr([1], [0, 1], [2]), dtype=pb.DTYPE_FLOAT32, shape=[1, 2]), r"lie in 0\.\.1"),
        (pb.Tensor(sparse_csr=csr([1], [0, 1], [-1]), dtype=pb.DTYPE_FLOAT32, shape=[1, 2]), r"lie in 0\.\.1"),
        (pb.Tensor(sparse_csr=csr([1], [0, 1], [0, 1]), dtype=pb.DTYPE_FLOAT32, shape=[1, 2]), "2 column indices"),
        (
            pb.Tensor(sparse_csr=csr([], [0, 0, 0], []), dtype=pb.DTYPE_FLOAT32, shape=[2, 2**40]),
            "unfold to more than",
        ),
    ],
)
def test_bad_tensors_are_named(tensor: pb.Tensor, message: str) -> None:
    with pytest.raises(BadRequest, match=message) as caught:
        decode_train(tensor_body(tensor))
    assert "data[0].loss_fn_inputs.weights" in str(caught.value)


@given(
    arrays.arrays(
        np.float32,
        arrays.array_shapes(min_dims=2, max_dims=2, max_side=6),
        elements=st.sampled_from([0.0, 0.0, 0.0, 1.5, -2.0]),
    )
)
def test_l19_any_matrix_survives_csr(dense: np.ndarray) -> None:
    rows, cols = np.nonzero(dense)
    crow = [0, *np.cumsum(np.count_nonzero(dense, axis=1)).tolist()]
    tensor = TensorData(
        data=dense[rows, cols],
        dtype="float32",
        shape=list(dense.shape),
        sparse_crow_indices=crow,
        sparse_col_indices=cols.tolist(),
    )
    got = decode_train(sdk_body(sdk_datum([1] * dense.shape[0], weights=tensor))).data[0].inputs["weights"]
    np.testing.assert_array_equal(got, dense)


# ---- damage ----


@given(st.integers(min_value=0, max_value=10_000))
def test_o6_a_message_cut_anywhere_is_addressed_or_refused(cut: int) -> None:
    body = sdk_body(sdk_datum([1, 2, 3], target_tokens=[2, 3, 4], weights=[0.0, 1.0, 0.5]))
    part = body[: cut % len(body)]
    try:
        address = read_address(part)
    except BadRequest:
        assert len(part) < 13  # fields 1 and 2 come first: 11 and 2 bytes
        return
    assert (address.model_id, address.seq_id) == ("s:train:0", 7)


@given(st.binary(max_size=200))
def test_any_bytes_are_addressed_or_refused_but_never_crash(body: bytes) -> None:
    for read in (read_address, decode_train):
        with contextlib.suppress(BadRequest):
            read(body)


def test_a_cut_message_says_so() -> None:
    body = sdk_body(sdk_datum([1, 2, 3], target_tokens=[2, 3, 4]))
    with pytest.raises(BadRequest, match="cut short or damaged"):
        decode_train(body[:-3])


def test_zstd_is_read_up_to_a_limit() -> None:
    body = b"a" * 100_000
    packed = zstandard.compress(body)
    assert inflate(packed, 200_000) == body
    assert len(inflate(packed, 1000)) == 1001  # one more than legal tells the caller
    assert body.startswith(inflate(packed[:-4], 200_000))
    with pytest.raises(BadRequest, match="not valid zstd"):
        inflate(b"plain text", 1000)


# ---- results ----


def test_train_output_as_the_sdk_reads_it() -> None:
    """5.6: order, shapes, dtype and metrics; NaN and inf pass."""
    logprobs = (np.asarray([-1, -2, -np.inf], np.float32), np.asarray([-4], np.float32))
    got = deserialize_forward_backward_output(
        encode_train_output(TrainOutput(logprobs, {"loss:sum": 1.5, "x:max": math.inf}))
    )
    assert got.metrics == {"loss:sum": 1.5, "x:max": math.inf}
    assert [output["logprobs"].shape for output in got.loss_fn_outputs] == [[3], [1]]
    for output, expected in zip(got.loss_fn_outputs, logprobs, strict=True):
        assert output["logprobs"].dtype == "float32"
        np.testing.assert_array_equal(output["logprobs"].to_numpy(), expected)


def test_l20_datums_with_different_k_share_one_result() -> None:
    """L20, T16: one record for each run of equal K, and `num_datums` set in all."""
    rng = np.random.default_rng(0)
    logprobs = tuple(rng.standard_normal(shape).astype(np.float32) for shape in [(3, 2), (1, 2), (4,), (2, 5), (3, 2)])
    body = encode_train_output(TrainOutput(logprobs, {"loss:sum": 0.0}))
    assert [record.num_datums for record in pb.ForwardBackwardOutput.FromString(body).loss_fn_outputs] == [2, 1, 1, 1]
    got = deserialize_forward_backward_output(body)
    for output, expected in zip(got.loss_fn_outputs, logprobs, strict=True):
        np.testing.assert_array_equal(output["logprobs"].to_numpy(), expected)


def sample_output() -> SampleOutput:
    topk = TopK(np.asarray([[5, 6], [7, 8]], np.int32), np.asarray([[-1, -2], [-3, -4]], np.float32))
    prompt_topk = TopK(
        np.asarray([[0, 0], [3, 4]], np.int32), np.asarray([[EMPTY_CELL, EMPTY_CELL], [-0.5, -1.5]], np.float32)
    )
    stopped = SampledSequence(np.asarray([5, 7], np.int32), np.asarray([-1, -3], np.float32), "stop", topk)
    cut = replace(stopped, stop_reason="length", topk=None)
    return SampleOutput((stopped, cut), np.asarray([np.nan, -0.5], np.float32), prompt_topk)


def test_sample_output_as_the_sdk_reads_it() -> None:
    """6.5."""
    got = deserialize_sample_response(encode_sample_output(sample_output()))
    assert [sequence.stop_reason for sequence in got.sequences] == ["stop", "length"]
    assert got.sequences[0].tokens == [5, 7]
    assert got.sequences[0].logprobs == [-1, -3]
    assert got.prompt_logprobs == [None, -0.5]
    assert got.topk_prompt_logprobs == [None, [(3, -0.5), (4, -1.5)]]  # T34
    np.testing.assert_array_equal(got.sequences[0].topk_logprobs_np.token_ids, [[5, 6], [7, 8]])
    assert got.sequences[1].topk_logprobs_np is None


def test_t33_what_else_was_asked_of_a_prompt_as_the_sdk_reads_it() -> None:
    """6.5, T33: target logprobs in the layout of the request, dense or sparse; alternatives dense; plain types."""
    dense = Cells(np.asarray([-1.5, 0.0, -2.0, -3.0], np.float32), (2, 2))
    crow, cols = np.asarray([0, 1, 1], np.int64), np.asarray([70_000], np.int64)
    sparse = Cells(np.asarray([-1.5], np.float32), (2, 100_000), crow, cols)
    drawn = AltTokens(np.asarray([[3, 4], [5, 6]]), np.asarray([[-1, -2], [-3, -4]], np.float32))
    for cells in (dense, sparse):
        output = replace(sample_output(), target_prompt=cells, alt_tokens=drawn)
        got = deserialize_sample_response(encode_sample_output(output))
        assert got.target_prompt_logprobs is not None
        assert got.target_prompt_logprobs.shape == list(cells.shape)
        assert got.target_prompt_logprobs.dtype == "float32"
        assert np.asarray(got.target_prompt_logprobs.data).tolist() == cells.values.tolist()
        indices = got.target_prompt_logprobs.sparse_crow_indices, got.target_prompt_logprobs.sparse_col_indices
        assert indices == ((None, None) if cells is dense else ([0, 1, 1], [70_000]))
        assert got.prompt_alt_tokens is not None
        np.testing.assert_array_equal(got.prompt_alt_tokens.tokens.to_numpy(), drawn.ids)
        np.testing.assert_array_equal(got.prompt_alt_tokens.logprobs.to_numpy(), drawn.logprobs)
        assert got.prompt_alt_tokens.tokens.dtype == "int64"
        told = json.loads(sample_output_json(encode_sample_output(output)))
        assert told["target_prompt_logprobs"]["data"] == cells.values.tolist()
        assert told["prompt_alt_tokens"]["tokens"] == {"data": [3, 4, 5, 6], "dtype": "int64", "shape": [2, 2]}


def test_a_bare_sample_has_no_prompt_parts() -> None:
    output = SampleOutput((SampledSequence(np.asarray([1], np.int32), np.asarray([-1], np.float32), "stop"),))
    got = deserialize_sample_response(encode_sample_output(output))
    assert got.prompt_logprobs is None
    assert got.topk_prompt_logprobs is None


# ---- the JSON forms ----


def test_train_output_json_is_what_old_sdks_parse() -> None:
    """5.7: TensorJSON without extra keys, and no bare NaN."""
    logprobs = (np.asarray([[-1, -np.inf]], np.float32), np.asarray([-4, np.nan], np.float32))
    body = train_output_json(encode_train_output(TrainOutput(logprobs, {"loss:sum": math.nan})))
    got = decode_json(dict, body)
    assert got["metrics"] == {"loss:sum": "NaN"}
    assert got["loss_fn_output_type"] == "ArrayRecord"
    assert got["loss_fn_outputs"] == [
        {"logprobs": {"data": [-1.0, "-Infinity"], "dtype": "float32", "shape": [1, 2]}},
        {"logprobs": {"data": [-4.0, "NaN"], "dtype": "float32", "shape": [2]}},
    ]


def test_sample_output_json_is_what_old_sdks_parse() -> None:
    """6.6."""
    got = decode_json(dict, sample_output_json(encode_sample_output(sample_output())))
    assert got == {
        "type": "sample",
        "sequences": [
            {"stop_reason": "stop", "tokens": [5, 7], "logprobs": [-1.0, -3.0]},
            {"stop_reason": "length", "tokens": [5, 7], "logprobs": [-1.0, -3.0]},
        ],
        "prompt_logprobs": [None, -0.5],
        "topk_prompt_logprobs": [None, [[3, -0.5], [4, -1.5]]],
    }

"""Protobuf bodies <-> types: `forward_backward` requests in, results of training passes and samples out.

The SDK sends and expects these messages (`tinker.proto`); numbers in them are raw little-endian arrays.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np
import numpy.typing as npt
from google.protobuf.message import DecodeError

from openrl.errors import BadRequest
from openrl.types import (
    AltTokens,
    Array,
    Cells,
    Datum,
    FloatArray,
    SampledSequence,
    SampleOutput,
    TopK,
    TrainOutput,
    TrainPayload,
)
from openrl.wire import tinker_pb2 as pb
from openrl.wire.tensors import Unfolder, as_input, join_tokens, refuse_chunk, shaped

_DTYPES: dict[int, np.dtype[np.float32] | np.dtype[np.int64]] = {
    int(pb.DTYPE_FLOAT32): np.dtype("<f4"),
    int(pb.DTYPE_INT64): np.dtype("<i8"),
}
_STOP_REASONS = {"stop": pb.STOP_REASON_STOP, "length": pb.STOP_REASON_LENGTH}


# ---- who is addressed ----


@dataclass(frozen=True, slots=True)
class Address:
    """Whom a training request is for, readable also where the rest of the message is damaged."""

    model_id: str
    seq_id: int
    forward_only: bool


def read_address(body: bytes) -> Address:
    """Fields 1, 2 and 6 of a `ForwardBackwardRequest`, by walking its top level only.

    Stops quietly where the message is cut short: a request whose run and seq are known must fail as a future, since a
    refusal over HTTP would wedge the client (O5, O6, T1). Raises `BadRequest` if those two are not there.
    """
    model_id, seq_id, forward_only = b"", 0, False
    for number, value in _walk(body):
        if number == 1 and isinstance(value, bytes):
            model_id = value
        elif number == 2 and isinstance(value, int):
            seq_id = _int32(value)
        elif number == 6 and isinstance(value, int):
            forward_only = bool(value)
    try:
        name = model_id.decode()
    except UnicodeDecodeError:
        name = ""
    if not name or not seq_id:
        raise BadRequest(
            f"the protobuf body ({len(body)} bytes) is unreadable: no model_id (field 1) and seq_id (field 2)"
        )
    return Address(name, seq_id, forward_only)


def _int32(varint: int) -> int:
    """A negative int32 travels as a 64-bit varint."""
    low = varint & 0xFFFFFFFF
    return low - 2**32 if low >= 2**31 else low


def _walk(body: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Top-level fields of a message, varints as ints and short byte strings as bytes, up to the first damage."""
    at = 0
    while at < len(body):
        tag, at = _varint(body, at)
        if tag & 7 == 0:
            value, at = _varint(body, at)
            if at <= len(body):
                yield tag >> 3, value
        elif tag & 7 == 2:
            size, at = _varint(body, at)
            if tag >> 3 == 1 and at + size <= len(body):  # the only string that is wanted; tensors are not copied
                yield 1, body[at : at + size]
            at += size
        elif tag & 7 in (1, 5):
            at += 8 if tag & 7 == 1 else 4
        else:
            return


def _varint(body: bytes, at: int) -> tuple[int, int]:
    """The varint at `at` and where it ends; past the end of the body if it is cut off or too long."""
    value = 0
    for shift in range(0, 70, 7):
        if at >= len(body):
            break
        byte = body[at]
        value |= (byte & 0x7F) << shift
        at += 1
        if byte < 0x80:
            return value, at
    return 0, len(body) + 1


# ---- requests ----


def decode_train(body: bytes) -> TrainPayload:
    """A `ForwardBackwardRequest`'s content. Raises `BadRequest` naming the part that is wrong."""
    message = pb.ForwardBackwardRequest()
    try:
        message.ParseFromString(body)
    except DecodeError:
        raise BadRequest(f"the protobuf body ({len(body)} bytes) is cut short or damaged") from None
    unfolder = Unfolder()
    data = tuple(_datum(datum, f"data[{i}]", message.loss_fn, unfolder) for i, datum in enumerate(message.data))
    return TrainPayload(data, message.loss_fn, _loss_config(message))


def _loss_config(message: pb.ForwardBackwardRequest) -> dict[str, float | str]:
    """The newer map alone if it is there, since strings exist only in it (L21, T38)."""
    if not message.loss_fn_config_v2:
        return dict(message.loss_fn_config.items())
    return {key: _loss_value(value) for key, value in message.loss_fn_config_v2.items()}


def _loss_value(message: pb.LossConfigValue) -> float | str:
    return message.text if message.WhichOneof("value") == "text" else message.number


def _datum(message: pb.Datum, where: str, loss: str, unfolder: Unfolder) -> Datum:
    chunks = [_chunk(chunk, f"{where}.model_input[{i}]") for i, chunk in enumerate(message.model_input)]
    inputs: dict[str, Array] = {}
    for name, tensor in message.loss_fn_inputs.items():
        at = f"{where}.loss_fn_inputs.{name}"
        inputs[name] = as_input(name, _tensor(tensor, at, unfolder), at, loss)
    return Datum(join_tokens(chunks), inputs)


def _chunk(message: pb.Chunk, where: str) -> npt.NDArray[np.int32]:
    kind = message.WhichOneof("chunk")
    if kind != "encoded_text":
        raise refuse_chunk(kind or "unknown", where)
    return _array(message.encoded_text.tokens, np.dtype("<i4"), where)


def _tensor(message: pb.Tensor, where: str, unfolder: Unfolder) -> Array:
    dtype = _DTYPES.get(int(message.dtype))
    if dtype is None:
        raise BadRequest(f"{where}: dtype must be FLOAT32 or INT64, got {_dtype_name(int(message.dtype))}")
    shape = list(message.shape) or None
    if message.WhichOneof("encoding") != "sparse_csr":
        return shaped(_array(message.dense, dtype, where), shape, where)
    csr = message.sparse_csr
    index = np.dtype("<i8")
    crow, cols = _array(csr.crow_indices, index, where), _array(csr.col_indices, index, where)
    return unfolder.unfold(_array(csr.values, dtype, where), crow, cols, shape, where)


def _dtype_name(number: int) -> str:
    return next((name for name, value in pb.DType.items() if int(value) == number), str(number))


def _array(raw: bytes, dtype: np.dtype[np.generic], where: str) -> npt.NDArray[Any]:
    """A writable copy in the machine's byte order."""
    if len(raw) % dtype.itemsize:
        raise BadRequest(f"{where}: {len(raw)} bytes are not a whole number of {dtype.name} values")
    return np.frombuffer(raw, dtype).astype(dtype.newbyteorder("="))


# ---- results ----


def encode_train_output(output: TrainOutput) -> bytes:
    """A `ForwardBackwardOutput`: one record for each run of datums that agree in K (5.6, L20)."""
    message = pb.ForwardBackwardOutput(loss_fn_output_type="ArrayRecord", metrics=dict(output.metrics))
    for trailing, group in groupby(output.logprobs, key=lambda array: array.shape[1:]):
        arrays = list(group)
        record = message.loss_fn_outputs.add(num_datums=len(arrays))
        record.fields["logprobs"].CopyFrom(_batched(arrays, trailing))
    return message.SerializeToString()


def _batched(arrays: Sequence[FloatArray], trailing: Sequence[int]) -> pb.BatchedTensor:
    flat = [np.ascontiguousarray(array, "<f4").reshape(-1) for array in arrays]
    offsets = np.cumsum([0, *(part.nbytes for part in flat)], dtype="<i8")
    return pb.BatchedTensor(
        data=np.concatenate(flat).tobytes(),
        offsets=offsets.tobytes(),
        dtype=pb.DTYPE_FLOAT32,
        trailing_shape=trailing,
    )


def encode_sample_output(output: SampleOutput) -> bytes:
    """A `SampleResponse` (6.5)."""
    message = pb.SampleResponse(sequences=[_sequence(sequence) for sequence in output.sequences])
    if output.prompt_logprobs is not None:
        message.prompt_logprobs = _floats(output.prompt_logprobs)
    if output.topk_prompt is not None:
        message.topk_prompt_logprobs.CopyFrom(_topk(output.topk_prompt))
    if output.target_prompt is not None:
        message.target_prompt_logprobs.CopyFrom(_cells(output.target_prompt))
    if output.alt_tokens is not None:
        message.prompt_alt_tokens.CopyFrom(_alt_tokens(output.alt_tokens))
    return message.SerializeToString()


def _sequence(sequence: SampledSequence) -> pb.SampledSequence:
    message = pb.SampledSequence(
        stop_reason=_STOP_REASONS[sequence.stop_reason],
        tokens=_int32s(sequence.tokens),
        logprobs=_floats(sequence.logprobs),
    )
    if sequence.topk is not None:
        message.topk_sampled_logprobs.CopyFrom(_topk(sequence.topk))
    return message


def _topk(topk: TopK) -> pb.TopkLogprobs:
    rows, k = topk.ids.shape
    return pb.TopkLogprobs(token_ids=_int32s(topk.ids), logprobs=_floats(topk.logprobs), k=k, length=rows)


def _cells(cells: Cells) -> pb.Tensor:
    """Float32, as dense or sparse as it is."""
    message = pb.Tensor(dtype=pb.DTYPE_FLOAT32, shape=cells.shape)
    if cells.crow is None or cells.cols is None:
        message.dense = _floats(cells.values)
    else:
        csr = pb.SparseCsr(
            values=_floats(cells.values), crow_indices=_int64s(cells.crow), col_indices=_int64s(cells.cols)
        )
        message.sparse_csr.CopyFrom(csr)
    return message


def _alt_tokens(drawn: AltTokens) -> pb.PromptAltTokens:
    shape = drawn.ids.shape
    return pb.PromptAltTokens(
        tokens=pb.Tensor(dtype=pb.DTYPE_INT64, shape=shape, dense=_int64s(drawn.ids)),
        logprobs=pb.Tensor(dtype=pb.DTYPE_FLOAT32, shape=shape, dense=_floats(drawn.logprobs)),
    )


def _floats(array: Array) -> bytes:
    return np.ascontiguousarray(array, "<f4").tobytes()


def _int32s(array: Array) -> bytes:
    return np.ascontiguousarray(array, "<i4").tobytes()


def _int64s(array: Array) -> bytes:
    return np.ascontiguousarray(array, "<i8").tobytes()

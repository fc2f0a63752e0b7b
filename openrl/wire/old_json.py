"""Stored protobuf results as JSON, for clients whose `Accept` does not name protobuf (SDK 0.18 and older; 5.7, 6.6).

Results are stored once, as protobuf; these forms are made when such a client asks. Non-finite floats become strings,
which their parsers read as floats; in lists where the SDK has a word for "none" they become null.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from openrl.codec import encode_json
from openrl.types import FloatArray
from openrl.wire import tinker_pb2 as pb

_STOP_REASONS = {int(pb.STOP_REASON_STOP): "stop", int(pb.STOP_REASON_LENGTH): "length"}
EMPTY_CELL = -99999.0  # logprob of a top-k cell that holds nothing (T34)


def train_output_json(body: bytes) -> bytes:
    """The JSON form of a serialized `ForwardBackwardOutput`."""
    message = pb.ForwardBackwardOutput.FromString(body)
    outputs = [datum for record in message.loss_fn_outputs for datum in _datums(record)]
    return encode_json(
        {
            "loss_fn_output_type": message.loss_fn_output_type,
            "loss_fn_outputs": outputs,
            "metrics": dict(message.metrics.items()),
        }
    )


def _datums(record: pb.ArrayRecord) -> list[dict[str, Any]]:
    datums: list[dict[str, Any]] = [{} for _ in range(record.num_datums)]
    for name, tensor in record.fields.items():
        values = np.frombuffer(tensor.data, "<f4")
        bounds = np.frombuffer(tensor.offsets, "<i8") // values.itemsize
        trailing = list(tensor.trailing_shape)
        for i, datum in enumerate(datums):
            datum[name] = _tensor(values[bounds[i] : bounds[i + 1]], trailing)
    return datums


def _tensor(values: FloatArray, trailing: Sequence[int]) -> dict[str, Any]:
    rows = values.size // max(math.prod(trailing), 1)
    return {"data": values.tolist(), "dtype": "float32", "shape": [rows, *trailing]}


def sample_output_json(body: bytes) -> bytes:
    """The JSON form of a serialized `SampleResponse`."""
    message = pb.SampleResponse.FromString(body)
    result: dict[str, Any] = {"type": "sample", "sequences": [_sequence(sequence) for sequence in message.sequences]}
    if message.HasField("prompt_logprobs"):
        result["prompt_logprobs"] = _nullable(np.frombuffer(message.prompt_logprobs, "<f4"))
    if message.HasField("topk_prompt_logprobs"):
        result["topk_prompt_logprobs"] = _topk(message.topk_prompt_logprobs)
    if message.HasField("target_prompt_logprobs"):
        result["target_prompt_logprobs"] = _cells(message.target_prompt_logprobs)
    if message.HasField("prompt_alt_tokens"):
        drawn = message.prompt_alt_tokens
        result["prompt_alt_tokens"] = {"tokens": _cells(drawn.tokens), "logprobs": _cells(drawn.logprobs)}
    return encode_json(result)


def _cells(message: pb.Tensor) -> dict[str, Any]:
    """In its own layout. No SDK that reads JSON asks for these; whoever else does gets what the newer ones get."""
    kind, dtype = ("int64", "<i8") if message.dtype == pb.DTYPE_INT64 else ("float32", "<f4")
    sparse = message.WhichOneof("encoding") == "sparse_csr"
    values = np.frombuffer(message.sparse_csr.values if sparse else message.dense, dtype)
    table: dict[str, Any] = {"data": values.tolist(), "dtype": kind, "shape": list(message.shape)}
    if sparse:
        table["sparse_crow_indices"] = np.frombuffer(message.sparse_csr.crow_indices, "<i8").tolist()
        table["sparse_col_indices"] = np.frombuffer(message.sparse_csr.col_indices, "<i8").tolist()
    return table


def _sequence(message: pb.SampledSequence) -> dict[str, Any]:
    return {
        "stop_reason": _STOP_REASONS[int(message.stop_reason)],
        "tokens": np.frombuffer(message.tokens, "<i4").tolist(),
        "logprobs": np.frombuffer(message.logprobs, "<f4").tolist(),
    }


def _nullable(values: npt.NDArray[np.float32]) -> list[float | None]:
    return [None if math.isnan(value) else value for value in values.tolist()]


def _topk(message: pb.TopkLogprobs) -> list[list[tuple[int, float]] | None]:
    """A row of (id, logprob) pairs a position; null where there are none."""
    ids = np.frombuffer(message.token_ids, "<i4").reshape(message.length, message.k).tolist()
    logprobs = np.frombuffer(message.logprobs, "<f4").reshape(message.length, message.k).tolist()
    rows = (
        [pair for pair in zip(*row, strict=True) if pair[1] != EMPTY_CELL] for row in zip(ids, logprobs, strict=True)
    )
    return [row or None for row in rows]

"""Traps of encoding (tinker-protocol 10): what the SDK's own parsers make of our bytes, and we of theirs."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import numpy as np
import pytest
import tinker
import torch
from google.protobuf.message import Message
from tinker import types
from tinker._response import orjson
from tinker.proto import tinker_public_pb2
from tinker.proto.request_conv import forward_backward_request_to_proto
from tinker.proto.response_conv import deserialize_forward_backward_output, deserialize_sample_response
from tinker.types.client_config_response import ClientConfigResponse
from tinker.types.forward_backward_input import ForwardBackwardInput
from tinker.types.forward_backward_request import ForwardBackwardRequest

from openrl.store.records import Checkpoint, Run, RunState
from openrl.types import (
    AltTokens,
    Cells,
    CheckpointKind,
    LoraSpec,
    Op,
    OptimOutput,
    RunId,
    SampledSequence,
    SampleOutput,
    SamplePayload,
    SessionId,
    TopK,
    TrainOutput,
    TrainPayload,
)
from openrl.wire import replies
from openrl.wire import tinker_pb2 as pb
from openrl.wire.bodies import decode_sample, decode_work, encode_result
from openrl.wire.old_json import EMPTY_CELL
from openrl.wire.proto import decode_train

RUN = RunId("s:train:0")


def sent_by_sdk(config: dict[str, float | str] | None = None, **inputs: object) -> TrainPayload:
    """What we read from one datum as the SDK encodes it."""
    datum = tinker.Datum(model_input=tinker.ModelInput.from_ints([1, 2, 3]), loss_fn_inputs=inputs)
    content = ForwardBackwardInput(data=[datum], loss_fn="ppo", loss_fn_config=config)  # type: ignore[arg-type]
    request = ForwardBackwardRequest(forward_backward_input=content, model_id=RUN, seq_id=1)
    return decode_train(forward_backward_request_to_proto(request).SerializeToString())


def run() -> Run:
    return Run(RUN, SessionId("s"), "org/m", LoraSpec(8, 0), RunState.LIVE, {"n": 1, "s": "x", "l": [1]}, 1e9, 1e9)


def checkpoint() -> Checkpoint:
    path = f"tinker://{RUN}/weights/a"
    return Checkpoint(path, RUN, CheckpointKind.TRAINING, "a", "f", "org/m", LoraSpec(8, 0), 10, 1e9, None, {})


# ---- answers ----


def test_t11_t12_non_finite_metrics_are_strings_that_the_sdk_reads_as_floats() -> None:
    """T11: the parser of retrieve_future dies of a bare NaN. T12: and the model of a null metric."""
    body = encode_result(Op.OPTIM_STEP, OptimOutput({"grad_norm:mean": math.nan, "x:max": math.inf, "lr:mean": 0.5}))[1]
    metrics = types.OptimStepResponse.model_validate(orjson.loads(body)).metrics
    assert metrics is not None
    assert math.isnan(metrics["grad_norm:mean"])
    assert (metrics["x:max"], metrics["lr:mean"]) == (math.inf, 0.5)


def test_t12_t24_t31_t32_answers_fit_the_sdks_strict_models() -> None:
    """T12, T32: no null where none may be. T24: metadata comes back as strings. T31: times carry an offset."""
    info = types.GetInfoResponse.model_validate(replies.run_info(run(), None))
    assert info.optimizer_config.type == "adamw"
    weights = types.WeightsInfoResponse.model_validate(replies.weights_info(checkpoint()))
    assert (weights.base_model, weights.lora_rank) == ("org/m", 8)
    shown = types.TrainingRun.model_validate(replies.training_run(run()))
    assert shown.user_metadata == {"n": "1", "s": "x", "l": "[1]"}
    assert shown.last_request_time == datetime.fromtimestamp(1e9, UTC)


def test_t29_t30_the_client_configuration_fits_and_never_pauses_for_billing() -> None:
    """T29: strict model, no nulls. T30: 402 is never sent, and would not be waited out."""
    flags = replies.client_config(remote=True, custom_losses=True)
    config = ClientConfigResponse.model_validate(flags)
    assert config.billing_exception_max_pause_duration_sec == 0
    assert config.fwdbwd_max_chunk_bytes_count >= 5_000_000
    assert None not in flags.values()


def test_t16_every_record_says_how_many_datums_it_holds() -> None:
    """T16: without it a mean over chunks divides by zero in the client."""
    rows = (np.zeros(3, np.float32), np.zeros((2, 4), np.float32), np.zeros(1, np.float32))
    body = encode_result(Op.FORWARD, TrainOutput(rows, {"loss:sum": 0.0}))[1]
    assert [record.num_datums for record in pb.ForwardBackwardOutput.FromString(body).loss_fn_outputs] == [1, 1, 1]
    assert len(deserialize_forward_backward_output(body).loss_fn_outputs) == 3


def test_t33_no_tensor_is_bfloat16() -> None:
    """T33: in a plain Tensor the client misreads it; and a BatchedTensor must state its type."""
    rows = (np.zeros(3, np.float32),)
    train = pb.ForwardBackwardOutput.FromString(encode_result(Op.FORWARD, TrainOutput(rows, {"loss:sum": 0.0}))[1])
    sample = pb.SampleResponse.FromString(encode_result(Op.SAMPLE, sample_output())[1])
    kinds = {int(value) for message in (train, sample) for value in dtypes(message)}
    assert kinds
    assert kinds <= {int(pb.DTYPE_FLOAT32), int(pb.DTYPE_INT64), int(pb.DTYPE_INT32)}


def dtypes(message: Message) -> Iterator[int]:
    for field, value in message.ListFields():
        if field.enum_type is not None and field.enum_type.name == "DType":
            yield value
        elif field.message_type is not None:
            is_map = field.message_type.GetOptions().map_entry
            parts = value.values() if is_map else value if field.is_repeated else [value]
            for part in parts:
                if isinstance(part, Message):
                    yield from dtypes(part)


def sample_output() -> SampleOutput:
    """Two prompt positions, of which the first has no top-k and the second only one entry of two."""
    ids = np.asarray([[0, 0], [7, 0]], np.int32)
    topk = TopK(ids, np.asarray([[EMPTY_CELL, EMPTY_CELL], [-0.5, EMPTY_CELL]], np.float32))
    drawn = SampledSequence(np.asarray([5], np.int32), np.asarray([-1], np.float32), "stop")
    index = np.asarray([0, 1], np.int64)
    targets = Cells(np.asarray([-0.25], np.float32), (1, 4), index, index[:1])
    alternatives = AltTokens(np.asarray([[3, 4]], np.int64), np.asarray([[-0.5, -0.75]], np.float32))
    return SampleOutput((drawn,), np.asarray([np.nan, -0.5], np.float32), topk, targets, alternatives)


def test_t34_empty_top_k_cells_do_not_show() -> None:
    """T34: id 0 and -99999.0, in every position of a row."""
    got = deserialize_sample_response(encode_result(Op.SAMPLE, sample_output())[1])
    assert got.topk_prompt_logprobs == [None, [(7, -0.5)]]


# ---- requests ----


def test_t35_sparse_targets_and_weights_have_patterns_of_their_own() -> None:
    """T35: target id 0 is missing from one pattern while its weight is in the other."""
    targets, weights = torch.zeros((3, 16), dtype=torch.int64), torch.zeros((3, 16))
    targets[1, :3], weights[1, :3] = torch.tensor([4, 0, 6]), torch.tensor([0.5, 0.3, 0.2])
    inputs = sent_by_sdk(target_tokens=targets, weights=weights).data[0].inputs
    np.testing.assert_array_equal(inputs["target_tokens"], targets.numpy())
    np.testing.assert_array_equal(inputs["weights"], weights.numpy())


def test_t36_t37_shapes_and_integer_widths_are_kept() -> None:
    """T36: [T, K] stays so, an absent shape is one dimension. T37: int32 in chunks, int64 in targets."""
    flat = tinker.TensorData(data=[1.0, 2.0, 3.0], dtype="float32")
    datum = sent_by_sdk(target_tokens=np.arange(6).reshape(3, 2), advantages=flat).data[0]
    assert datum.inputs["target_tokens"].shape == (3, 2)
    assert datum.inputs["target_tokens"].dtype == np.int64
    assert datum.inputs["advantages"].shape == (3,)
    assert datum.tokens.dtype == np.int32
    big = sent_by_sdk(target_tokens=np.full(3, 2**40, np.int64)).data[0]
    assert big.inputs["target_tokens"].tolist() == [2**40] * 3


def test_t38_string_entries_of_the_loss_configuration_are_read() -> None:
    """T38: they exist only in `loss_fn_config_v2`."""
    assert sent_by_sdk({"loss_id": "l-1", "beta": 0.5}).loss_config == {"loss_id": "l-1", "beta": 0.5}


@pytest.mark.parametrize(
    ("given", "meant"), [({}, None), ({"stop": []}, ()), ({"stop": "a"}, ("a",)), ({"stop": [2]}, (2,))]
)
def test_t39_an_empty_stop_list_is_no_stop_at_all(given: dict[str, Any], meant: tuple[Any, ...] | None) -> None:
    """T39: absent is the model's end tokens, `[]` is not even those."""
    assert sample({"sampling_params": given}).params.stop == meant


def test_t40_nothing_needs_a_type() -> None:
    """T40: SDKs before 0.18 send none, on requests and on chunks."""
    assert sample({}).prompt.tolist() == [1]
    tensor = {"data": [2], "dtype": "int64"}
    data = [{"model_input": {"chunks": [{"tokens": [1]}]}, "loss_fn_inputs": {"target_tokens": tensor}}]
    body = {"model_id": RUN, "seq_id": 1, "forward_input": {"data": data, "loss_fn": "cross_entropy"}}
    assert decode_work(Op.FORWARD, "application/json", json.dumps(body).encode())


def sample(fields: dict[str, Any]) -> SamplePayload:
    body = {"sampling_session_id": "s:sample:0", "seq_id": 0, "prompt": {"chunks": [{"tokens": [1]}]}, **fields}
    return decode_sample("application/json", json.dumps(body).encode())


# ---- both in one process ----


def test_t47_our_schema_lives_beside_the_sdks_in_one_process() -> None:
    """T47: two files of one name would be refused. The messages are the same bytes under both."""
    assert pb.DESCRIPTOR.name != tinker_public_pb2.DESCRIPTOR.name
    assert pb.DESCRIPTOR.package != tinker_public_pb2.DESCRIPTOR.package
    ours = pb.ForwardBackwardRequest(model_id=RUN, seq_id=3, forward_only=True).SerializeToString()
    assert tinker_public_pb2.ForwardBackwardRequest.FromString(ours).model_id == RUN

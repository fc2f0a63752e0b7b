"""Accepted bodies <-> work, and results <-> bytes, by operation: pure functions of bytes.

The HTTP layer decodes a body once when it arrives, and the daemon once more after a restart, from what it stored.
Results are encoded once, stored, and sent as they are; only old SDKs get them converted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from openrl.codec import decode_json, encode_json
from openrl.custom_loss import MAX_BYTES, LossProgram
from openrl.daemon.work import LoadState, NewRun, OptimStep, SaveExternal, SaveSampler, SaveState, Train, Unload, Work
from openrl.errors import BadRequest
from openrl.types import Op, OptimOutput, SampleOutput, SamplePayload, TrainOutput, TrainPayload
from openrl.wire import custom_losses, inputs, messages, old_json, proto

JSON = "application/json"
PROTOBUF = "application/x-protobuf"
# The parameter says which message the stored bytes hold; it never leaves the server.
TRAIN_RESULT = f"{PROTOBUF}; message=ForwardBackwardOutput"
SAMPLE_RESULT = f"{PROTOBUF}; message=SampleResponse"


def is_protobuf(content_type: str) -> bool:
    """Whether a `Content-Type` or `Accept` header names protobuf (4.3)."""
    return PROTOBUF in content_type.lower()


# ---- requests ----


def read_address(content_type: str, body: bytes) -> proto.Address:
    """Run and seq of a training request, readable also where the rest is wrong. Raises `BadRequest` if they are not."""
    if is_protobuf(content_type):
        return proto.read_address(body)
    address = decode_json(messages.AddressBody, body)
    return proto.Address(address.model_id, address.seq_id, forward_only=False)


def decode_work(op: Op, content_type: str, body: bytes) -> Work:
    """The content of an accepted request of a run. Raises `BadRequest` naming what is wrong with it."""
    if op in (Op.FORWARD, Op.FORWARD_BACKWARD):
        return Train(_train_payload(op, content_type, body), backward=op is Op.FORWARD_BACKWARD)
    return _DECODERS[op](body)


def _train_payload(op: Op, content_type: str, body: bytes) -> TrainPayload:
    if is_protobuf(content_type):
        return proto.decode_train(body)
    if op is Op.FORWARD:
        return decode_json(inputs.ForwardBody, body).forward_input.to_payload()
    return decode_json(inputs.ForwardBackwardBody, body).forward_backward_input.to_payload()


def _optim_step(body: bytes) -> OptimStep:
    return OptimStep(decode_json(messages.OptimStepBody, body).to_adam())


def _save_state(body: bytes) -> SaveState:
    return decode_json(messages.SaveWeightsBody, body).to_save()


def _save_sampler(body: bytes) -> SaveSampler:
    return decode_json(messages.SaveSamplerBody, body).to_save()


def _save_external(body: bytes) -> SaveExternal:
    return decode_json(messages.SaveExternalBody, body).to_save()


def _load_state(body: bytes) -> LoadState:
    return decode_json(messages.LoadWeightsBody, body).to_load()


def _unload(body: bytes) -> Unload:
    decode_json(messages.ModelBody, body)
    return Unload()


_DECODERS: Mapping[Op, Callable[[bytes], Work]] = {
    Op.OPTIM_STEP: _optim_step,
    Op.SAVE_STATE: _save_state,
    Op.SAVE_SAMPLER: _save_sampler,
    Op.SAVE_EXTERNAL: _save_external,
    Op.LOAD_STATE: _load_state,
    Op.UNLOAD: _unload,
}


def decode_new_run(body: bytes) -> NewRun:
    """A `create_model` body. Ranges are for the daemon to check, which knows the model."""
    return decode_json(messages.CreateModelBody, body).to_new()


def decode_sample(content_type: str, body: bytes) -> SamplePayload:
    """An `asample` body, always JSON; `content_type` is taken so that all stored bodies decode alike."""
    del content_type
    return decode_json(messages.SampleBody, body).to_payload()


def decode_custom_loss(body: bytes) -> LossProgram:
    """A `create_custom_loss` body, checked. Raises `BadRequest` that names the node at fault."""
    if len(body) > MAX_BYTES:
        raise BadRequest(f"a custom loss may have {MAX_BYTES} bytes, got {len(body)}")
    return decode_json(custom_losses.CustomLossBody, body).to_program()


# ---- results ----


def encode_result(op: Op, output: object) -> tuple[str, bytes]:
    """A result as `(content type, bytes)` to store: a TrainOutput, OptimOutput, SampleOutput or JSON-ready mapping."""
    if isinstance(output, TrainOutput):
        return TRAIN_RESULT, proto.encode_train_output(output)
    if isinstance(output, SampleOutput):
        return SAMPLE_RESULT, proto.encode_sample_output(output)
    if isinstance(output, OptimOutput):
        return JSON, encode_json({"metrics": dict(output.metrics)})
    if op in (Op.FORWARD, Op.FORWARD_BACKWARD, Op.SAMPLE) or not isinstance(output, Mapping):
        raise TypeError(f"{type(output).__name__} is no result of {op}")
    return JSON, encode_json(output)


def negotiate(content_type: str, body: bytes, accept: str) -> tuple[str, bytes]:
    """A stored result as a client wants it (4.3): protobuf only where its `Accept` says so. May take a while."""
    if not is_protobuf(content_type):
        return content_type, body
    if is_protobuf(accept):
        return PROTOBUF, body
    convert = old_json.train_output_json if content_type == TRAIN_RESULT else old_json.sample_output_json
    return JSON, convert(body)

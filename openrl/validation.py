"""Checks of request content before it touches a device: pure functions that raise `BadRequest`.

A message names the field, the datum, what was given and what is legal. Numbers are checked on all datums at once, so
that a thousand datums take a few milliseconds.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from openrl.custom_loss import LossProgram
from openrl.errors import BadRequest
from openrl.losses import LOSSES, THRESHOLDS, LossSpec
from openrl.types import AdamParams, Array, Datum, ModelInfo, SamplePayload, SamplingParams, TrainPayload

MAX_SAMPLES = 4096  # sequences of one request
MAX_TOPK = 1024  # candidates a position
TTL_RANGE = (3600, 3653 * 24 * 3600)  # an hour to ten years, in seconds

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_TARGETS = "target_tokens"
_Number = TypeVar("_Number", int, float)

# ---- training ----


def check_train(payload: TrainPayload, info: ModelInfo, program: LossProgram | None = None) -> None:
    """Everything about a `forward` or `forward_backward` that can be known without the model (L10, L12-L16, G11).

    `program` is the custom loss that the payload names, if it names one.
    """
    if not payload.data:
        raise BadRequest("data must hold at least one datum, got none")
    if program is not None:
        for index, datum in enumerate(payload.data):
            _check_ranks(index, datum, program)
    else:
        spec = _known_loss(payload.loss_fn)
        _check_config(payload, spec)
        for index, datum in enumerate(payload.data):
            _check_shapes(index, datum, payload.loss_fn, spec)
    _check_lengths(payload.data, info)
    _check_ids([datum.tokens for datum in payload.data], "model_input", info)
    _check_ids([datum.inputs[_TARGETS] for datum in payload.data], f"loss_fn_inputs.{_TARGETS}", info)
    for name in sorted(set[str]().union(*(datum.inputs for datum in payload.data)) - {_TARGETS}):
        _check_floats(payload.data, name, named=program is None)


def _check_ranks(index: int, datum: Datum, program: LossProgram) -> None:
    """A custom loss states the rank of each input; what it does not read may be there (5.9)."""
    loss = f"custom loss {program.name[:80]!r}"
    targets = datum.inputs.get(_TARGETS)
    if targets is None:
        raise BadRequest(f"data[{index}].loss_fn_inputs lacks {_TARGETS}")
    if targets.ndim != program.rank:
        where = f"data[{index}].loss_fn_inputs.{_TARGETS}"
        raise BadRequest(f"{where} has rank {targets.ndim}; {loss} takes logprobs of rank {program.rank}")
    _check_target_shape(index, datum)
    for given in program.reads:
        array = datum.inputs.get(given.name)
        where = f"data[{index}].loss_fn_inputs"
        if array is None:
            raise BadRequest(f"{where} lacks {given.name}, which {loss} reads")
        # A scalar comes over the wire as one number without a shape, like a list of one.
        if array.ndim != given.rank and not (given.rank == 0 and array.shape == (1,)):
            raise BadRequest(f"{where}.{given.name} has rank {array.ndim}; {loss} declared rank {given.rank}")


def _known_loss(name: str) -> LossSpec:
    spec = LOSSES.get(name)
    if spec is not None:
        return spec
    legal = ", ".join(LOSSES)
    if name == "stable_reinforce":
        hint = 'Use loss_fn="importance_sampling" instead: it needs no recorded sampling data.'
        raise BadRequest(f'loss_fn "stable_reinforce" is not served; legal: {legal}.', hint)
    if name == "custom":
        hint = 'Use forward_backward_custom, which runs in the client, or loss_fn="importance_sampling".'
        raise BadRequest(f'loss_fn "custom" needs the loss_id of a custom loss; others: {legal}.', hint)
    raise BadRequest(f"loss_fn {name!r} is unknown; legal: {legal}")


def _check_config(payload: TrainPayload, spec: LossSpec) -> None:
    legal = ", ".join(spec.config) or "none"
    for key, value in payload.loss_config.items():
        where = f"loss_fn_config.{key}"
        if key not in spec.config:
            raise BadRequest(f"{where} is unknown to loss_fn {payload.loss_fn!r}; legal: {legal}")
        if isinstance(value, str) or not math.isfinite(value):
            raise BadRequest(f"{where} must be a finite number, got {value!r}")
        if key in THRESHOLDS:
            _check_threshold(key, np.asarray([value]), where)
        elif value < 0:
            raise BadRequest(f"{where} must be >= 0, got {value}")


def _check_threshold(name: str, values: npt.NDArray[Any], where: str) -> None:
    """Bounds of the ratio itself, 0 <= low <= 1 <= high (L15), not distances from 1."""
    low = name == THRESHOLDS[0]
    bad = values[(values < 0) | (values > 1)] if low else values[values < 1]
    if bad.size:
        legal = "0 <= low <= 1" if low else "high >= 1"
        raise BadRequest(f"{where} is an absolute bound on the ratio, {legal}, got {bad[0]}")


def _check_shapes(index: int, datum: Datum, loss: str, spec: LossSpec) -> None:
    """Keys and shapes of one datum (L12, L14); no numbers are read."""
    inputs = datum.inputs
    if not inputs.keys() >= spec.required:
        missing = ", ".join(sorted(spec.required - inputs.keys()))
        raise BadRequest(f"data[{index}].loss_fn_inputs lacks {missing}, which loss_fn {loss!r} needs")
    shape = _target_shape(index, datum, loss, spec)
    for name, array in inputs.items():
        if array.shape == shape and (name in spec.required or name in spec.optional):
            continue
        _explain_input(index, name, array, shape, loss, spec)


def _target_shape(index: int, datum: Datum, loss: str, spec: LossSpec) -> tuple[int, ...]:
    shape = datum.inputs[_TARGETS].shape
    length = len(datum.tokens)
    where = f"data[{index}].loss_fn_inputs.{_TARGETS}"
    if len(shape) > (2 if spec.rank2 else 1) or not shape:
        legal = f"[{length}] or [{length}, K]" if spec.rank2 else f"[{length}]"
        raise BadRequest(f"{where} has shape {list(shape)}; loss_fn {loss!r} takes {legal}")
    _check_target_shape(index, datum)
    return shape


def _check_target_shape(index: int, datum: Datum) -> None:
    shape = datum.inputs[_TARGETS].shape
    length = len(datum.tokens)
    where = f"data[{index}].loss_fn_inputs.{_TARGETS}"
    if shape[0] != length:
        raise BadRequest(f"{where} has shape {list(shape)}; its first dimension must be model_input's length, {length}")
    if 0 in shape[1:]:
        raise BadRequest(f"{where} has shape {list(shape)}; K must be at least 1")


def _explain_input(index: int, name: str, array: Array, shape: tuple[int, ...], loss: str, spec: LossSpec) -> None:
    """The error for an input that is unknown or of another shape than the targets; thresholds may be [1] (L16)."""
    where = f"data[{index}].loss_fn_inputs.{name}"
    if name not in spec.required | spec.optional:
        legal = ", ".join(sorted(spec.required | spec.optional))
        raise BadRequest(f"{where} is unknown to loss_fn {loss!r}; legal: {legal}")
    if name in THRESHOLDS and array.shape == (1,):
        return
    legal = f"[1] or {list(shape)}" if name in THRESHOLDS else f"{list(shape)}, as {_TARGETS}"
    raise BadRequest(f"{where} has shape {list(array.shape)}; it must be {legal}")


def _check_lengths(data: Sequence[Datum], info: ModelInfo) -> None:
    for index, datum in enumerate(data):
        if not 1 <= len(datum.tokens) <= info.max_context:
            legal = f"1..{info.max_context} tokens"
            raise BadRequest(f"data[{index}].model_input has {len(datum.tokens)} tokens; the model takes {legal}")


def _check_ids(arrays: Sequence[Array], field: str, info: ModelInfo) -> None:
    flat = np.concatenate(arrays, axis=None)
    if flat.min() < 0 or flat.max() >= info.vocab_size:
        bad = (flat < 0) | (flat >= info.vocab_size)
        index, position = _locate(arrays, bad)
        legal = f"0..{info.vocab_size - 1}"
        raise BadRequest(f"data[{index}].{field}: token id {flat[bad][0]} at position {position}; legal: {legal}")


def _check_floats(data: Sequence[Datum], name: str, *, named: bool) -> None:
    """One kind of float input over all datums: finite everywhere (L10), and, if `named`, what its name asks for."""
    holders = [index for index, datum in enumerate(data) if name in datum.inputs]
    arrays = [data[index].inputs[name] for index in holders]
    flat = np.concatenate(arrays, axis=None)
    finite = np.isfinite(flat)
    if not finite.all():
        bad = ~finite
        holder, position = _locate(arrays, bad)
        where = f"data[{holders[holder]}].loss_fn_inputs.{name}"
        raise BadRequest(f"{where}: {flat[bad][0]} at position {position}; all numbers must be finite")
    if not named:
        return
    if name in THRESHOLDS:
        _check_threshold(name, flat, f"loss_fn_inputs.{name}")
    if name == "sequence_ratio_mask":
        _check_masks(arrays, holders)


def _check_masks(arrays: Sequence[Array], holders: Sequence[int]) -> None:
    for index, mask in zip(holders, arrays, strict=True):
        if not mask.any():
            where = f"data[{index}].loss_fn_inputs.sequence_ratio_mask"
            raise BadRequest(f"{where} is zero everywhere; at least one position must count (1.8)")


def _locate(arrays: Sequence[Array], bad: npt.NDArray[np.bool_]) -> tuple[int, int]:
    """Which array, and which row of it, holds the first bad element of their concatenation."""
    first = int(bad.argmax())
    ends = np.cumsum([array.size for array in arrays])
    index = int(np.searchsorted(ends, first, side="right"))
    array = arrays[index]
    inside = first - (int(ends[index]) - array.size)
    return index, inside // max(math.prod(array.shape[1:]), 1)


# ---- sampling ----


def check_sample(payload: SamplePayload, info: ModelInfo) -> None:
    """Everything about an `asample` that can be known without the model (S3, S9, S10)."""
    _check_range("num_samples", payload.num_samples, 1, MAX_SAMPLES)
    _check_range("topk_prompt_logprobs", payload.topk_prompt_logprobs, 0, min(MAX_TOPK, info.vocab_size))
    _check_range("topk_sample_logprobs", payload.topk_sample_logprobs, 0, min(MAX_TOPK, info.vocab_size))
    _check_range("prompt_alt_tokens_k", payload.prompt_alt_tokens_k, 0, MAX_TOPK)
    _check_params(payload.params, info)
    _check_prompt(payload, info)
    _check_last(payload)
    check_targets(payload, info.vocab_size)


def _check_prompt(payload: SamplePayload, info: ModelInfo) -> None:
    length = len(payload.prompt)
    if not length:
        raise BadRequest("prompt must hold at least one token, got none")
    bad = (payload.prompt < 0) | (payload.prompt >= info.vocab_size)
    if bad.any():
        where = f"prompt: token id {payload.prompt[bad][0]} at position {int(bad.argmax())}"
        raise BadRequest(f"{where}; legal: 0..{info.vocab_size - 1}")
    wanted = 1 if payload.params.max_tokens is None else payload.params.max_tokens
    if length + wanted > info.max_context:
        given = f"prompt ({length} tokens) + max_tokens ({wanted}) is {length + wanted}"
        raise BadRequest(f"{given}; the model's context holds {info.max_context}")


def _check_last(payload: SamplePayload) -> None:
    last, length = payload.prompt_logprobs_last_n, len(payload.prompt)
    if last is None:
        return
    if not payload.prompt_logprobs:
        hint = "Set prompt_logprobs (include_prompt_logprobs in the SDK), or leave it out."
        raise BadRequest("prompt_logprobs_last_n says how many prompt_logprobs are wanted, but none are.", hint)
    if not 1 <= last < length:
        legal = f"1..{length - 1}, one less than the prompt's tokens" if length > 1 else "none for a prompt of 1 token"
        raise BadRequest(f"prompt_logprobs_last_n is {last}; legal: {legal}")


def check_targets(payload: SamplePayload, vocab_size: int) -> None:
    """`target_prompt_logprobs`: int64 [N - 1, K] of token ids, or -1 where nothing is wanted."""
    cells = payload.target_prompt_logprobs
    if cells is None:
        return
    if cells.values.dtype != np.int64:
        raise BadRequest(f"target_prompt_logprobs must be int64, got {cells.values.dtype}")
    rows = len(payload.prompt) - 1
    if cells.shape[0] != rows:
        given = f"has shape {list(cells.shape)}"
        raise BadRequest(f"target_prompt_logprobs {given}; a prompt of {rows + 1} tokens takes [{rows}, K]")
    bad = (cells.values < -1) | (cells.values >= vocab_size)
    if bad.any():
        where = f"target_prompt_logprobs: token id {cells.values[bad][0]} for prompt token {cells.rows()[bad][0] + 1}"
        raise BadRequest(f"{where}; legal: 0..{vocab_size - 1}, or -1 for none")


def _check_params(params: SamplingParams, info: ModelInfo) -> None:
    if params.max_tokens is not None and params.max_tokens < 1:
        raise BadRequest(f"sampling_params.max_tokens must be at least 1, got {params.max_tokens}")
    if not (math.isfinite(params.temperature) and params.temperature >= 0):
        raise BadRequest(f"sampling_params.temperature must be a finite number >= 0, got {params.temperature}")
    if not 0 < params.top_p <= 1:
        raise BadRequest(f"sampling_params.top_p must lie in (0, 1], got {params.top_p}")
    if params.top_k != -1 and params.top_k < 1:
        raise BadRequest(f"sampling_params.top_k must be -1 (all) or at least 1, got {params.top_k}")
    for stop in params.stop or ():
        if isinstance(stop, str) and not stop:
            raise BadRequest("sampling_params.stop must not hold an empty string; [] means no stop at all")
        if isinstance(stop, int):
            _check_range("sampling_params.stop", stop, 0, info.vocab_size - 1)


# ---- runs and checkpoints ----


def check_lora(rank: int, info: ModelInfo, *, train_attn: bool, train_mlp: bool, train_unembed: bool) -> None:
    """A5 and A6."""
    _check_range("lora_config.rank", rank, 1, info.max_lora_rank)
    if not (train_attn or train_mlp or train_unembed):
        raise BadRequest("lora_config: at least one of train_attn, train_mlp, train_unembed must be true")


def check_full(info: ModelInfo | None, *, train_attn: bool, train_mlp: bool, train_unembed: bool) -> None:
    """F1: rank 0, or no `lora_config` at all, trains all parameters; a part of them cannot be chosen."""
    if info is not None and info.full_tuning is False:
        raise BadRequest(
            f"lora_config.rank 0: of this model the backend trains LoRA only; use rank 1..{info.max_lora_rank}",
            "All parameters train of dense models with whole weights on one device (no --devices, no --quantize).",
        )
    if not (train_attn and train_mlp and train_unembed):
        raise BadRequest(
            "lora_config: rank 0 trains all parameters: train_attn, train_mlp and train_unembed must be true or absent"
        )


def check_optimizer(config: Mapping[str, Any], field: str = "optimizer_config") -> None:
    """Only AdamW is served; another kind is never replaced by it in silence (O9, O10)."""
    kind = config.get("type", "adamw")
    if kind != "adamw":
        raise BadRequest(f'{field}.type {kind!r} is not served; legal: "adamw"')


def check_adam(adam: AdamParams) -> None:
    """3.1, with torch's own ranges; eps must be positive, since 0/0 would undo the exact zeros of O6."""
    for name in ("learning_rate", "weight_decay"):
        value = getattr(adam, name)
        _check_that(math.isfinite(value) and value >= 0, name, "a finite number >= 0", value)
    for name in ("beta1", "beta2"):
        value = getattr(adam, name)
        _check_that(0 <= value < 1, name, "in [0, 1)", value)
    _check_that(math.isfinite(adam.eps) and adam.eps > 0, "eps", "a finite number > 0", adam.eps)
    _check_that(
        math.isfinite(adam.grad_clip_norm), "grad_clip_norm", "finite (0 or less: no clipping)", adam.grad_clip_norm
    )


def _check_that(legal: bool, name: str, expected: str, value: float) -> None:
    if not legal:
        raise BadRequest(f"adam_params.{name} must be {expected}, got {value}")


def check_checkpoint_name(name: str) -> None:
    """7.1; anything else could not be addressed, or would leave its folder."""
    if _NAME.fullmatch(name) is None:
        legal = "1..128 letters, digits, '.', '_' or '-', the first one a letter or digit"
        raise BadRequest(f"path {name[:200]!r} is no checkpoint name; legal: {legal}")


def check_ttl(seconds: int | None) -> None:
    """C1; None means for ever."""
    if seconds is not None:
        _check_range("ttl_seconds", seconds, *TTL_RANGE)


def _check_range(field: str, value: _Number, low: _Number, high: _Number) -> None:
    if not low <= value <= high:
        raise BadRequest(f"{field} must lie in {low}..{high}, got {value}")

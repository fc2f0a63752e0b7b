"""Runs custom losses: a checked graph, call by call, on one datum's logprobs, and the gradient that comes of it.

A graph is data from outside. `openrl.custom_loss` has refused all that is not on the allow-list; here sizes are worked
out before anything is made (`loss_budget`), results are let in only if they are tensors, numbers or shapes, and time
is watched between calls. Losses run on the CPU in float32, as they would in the client: the logprobs are on the host
anyway.
"""

from __future__ import annotations

import math
import operator
import time
from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from openrl.backends.base import TrainItem
from openrl.backends.torch.loss_budget import Budget, Limits
from openrl.backends.torch.memory import is_out_of_memory
from openrl.custom_loss import Constant, LossCall, LossProgram, Ref
from openrl.custom_loss_ops import FUNCTIONS, METHODS
from openrl.errors import BadRequest
from openrl.losses import Loss, evaluate
from openrl.types import Array, FloatArray

# What the functions give that choose among values: pairs of values and indices.
_CHOSEN = tuple(getattr(torch.return_types, n) for n in ("max", "min", "median", "sort", "topk", "cummax", "cummin"))
_FAULTS = (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
_MAX_EXPONENT = 1024  # of whole numbers, whose powers have no end


def loss_of(item: TrainItem) -> Callable[[FloatArray, Mapping[str, Array]], Loss]:
    """What judges the datums of a request: the loss that it names, or the one that its client made."""
    if item.program is not None:
        return partial(CustomLoss(item.program), backward=item.backward)
    payload = item.payload
    return lambda lp, inputs: evaluate(payload.loss_fn, lp, inputs, payload.loss_config)


class CustomLoss:
    """One request's loss. Call it with a datum's logprobs and inputs; keeps only the time that it has used."""

    def __init__(self, program: LossProgram, limits: Limits = Limits()) -> None:
        self._program = program
        self._limits = limits
        self._functions = [_function(call) for call in program.calls]
        self._seconds_left = limits.seconds

    def __call__(self, lp: FloatArray, inputs: Mapping[str, Array], *, backward: bool) -> Loss:
        """Loss, metrics and (if `backward`) dL/dlp, float32 of lp's shape. Raises `BadRequest` naming the node."""
        started = time.monotonic()
        leaf = torch.tensor(lp, dtype=torch.float32, requires_grad=backward)
        values: list[Any] = [leaf, *(_tensor(inputs[given.name], given.rank) for given in self._program.reads)]
        with torch.set_grad_enabled(backward):
            self._run(values, started)
            loss = self._loss(values[self._program.loss.index])
            grad = _gradient(loss, leaf) if backward else np.zeros_like(lp)
        metrics = {key: _number(key, values[ref.index]) for key, ref in self._program.metrics.items()}
        self._seconds_left -= time.monotonic() - started
        return Loss(float(loss.detach()), grad, metrics)

    def _run(self, values: list[Any], started: float) -> None:
        """Append the value of every call."""
        budget = Budget(self._limits)
        for call, function in zip(self._program.calls, self._functions, strict=True):
            if time.monotonic() - started > self._seconds_left:
                raise _failed(call, f"the loss took more than {self._limits.seconds:g} s for this request")
            try:
                args = _fill(call.args, values)
                kwargs = {key: _fill(value, values) for key, value in call.kwargs.items()}
                budget.foresee(call, args, kwargs)
                result = function(*args, **kwargs)
                budget.admit(result)
            except _FAULTS as error:
                if isinstance(error, RuntimeError) and is_out_of_memory(error):
                    raise
                raise _failed(call, _first_line(error)) from None
            values.append(result)

    def _loss(self, value: Any) -> Tensor:
        if isinstance(value, Tensor) and value.ndim == 0 and value.is_floating_point():
            return value
        given = f"a tensor of shape {list(value.shape)}, {value.dtype}" if isinstance(value, Tensor) else repr(value)
        raise BadRequest(f"custom loss {self._program.name[:80]!r} must return a scalar float tensor, got {given}.")


def _gradient(loss: Tensor, leaf: Tensor) -> FloatArray:
    if not loss.requires_grad:
        raise BadRequest("the custom loss does not depend on logprobs, so there is nothing to train on.")
    try:
        (grad,) = torch.autograd.grad(loss, leaf)
    except RuntimeError as error:
        if is_out_of_memory(error):
            raise
        raise BadRequest(f"the custom loss cannot be differentiated: {_first_line(error)}.") from None
    return grad.numpy()


def _tensor(array: Array, rank: int) -> Tensor:
    """A copy; a scalar comes over the wire as one number without a shape."""
    tensor = torch.tensor(array)
    return tensor.reshape(()) if rank == 0 else tensor


def _number(key: str, value: Any) -> float:
    if isinstance(value, Tensor) and value.numel() == 1:
        return float(value.detach().item())
    if isinstance(value, (int, float)):
        return float(value)
    raise BadRequest(f"custom loss metric {key} must be a scalar, got {type(value).__name__}.")


def _failed(call: LossCall, why: str) -> BadRequest:
    return BadRequest(f"custom loss, node {call.name[:80]!r} ({call.target}): {why}.")


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")


# ---- arguments and functions ----


def _fill(value: Any, values: list[Any]) -> Any:
    """An argument with references replaced by what they refer to."""
    kind = type(value)
    if kind is Ref:
        return values[value.index]
    if kind is tuple or kind is list:
        return kind(_fill(part, values) for part in value)
    if kind is slice:
        return slice(_fill(value.start, values), _fill(value.stop, values), _fill(value.step, values))
    if kind is Constant:
        return _CONSTANTS[value.kind](value.name)
    return value


def _function(call: LossCall) -> Callable[..., Any]:
    return _METHODS[call.target] if call.method else _FUNCTIONS[call.target]


def _attribute(value: Any, name: str) -> Any:
    """The attributes that a loss may read; of tuples only what `max` and its like give back."""
    if isinstance(value, Tensor) and name in _ATTRIBUTES:
        return _ATTRIBUTES[name](value)
    if name in ("values", "indices") and isinstance(value, _CHOSEN):
        return value[0 if name == "values" else 1]
    raise TypeError(f"a {type(value).__name__} has no attribute {name!r} that a loss may read")


def _item(value: Any, key: Any) -> Any:
    of_tensor = isinstance(value, Tensor)
    parts: tuple[Any, ...] = key if of_tensor and isinstance(key, tuple) else (key,)
    if isinstance(value, (Tensor, tuple, list)) and all(_is_key(part, of_tensor) for part in parts):
        indexable: Any = value
        return indexable[key]
    raise TypeError(f"a {type(value).__name__} cannot be indexed by {type(key).__name__} {str(key)[:40]}")


def _is_key(part: Any, of_tensor: bool) -> bool:
    """Whether something may stand in square brackets; lists hold whole numbers only."""
    if isinstance(part, slice):
        bounds = (part.start, part.stop, part.step)  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
        return all(bound is None or isinstance(bound, int) for bound in bounds)  # pyright: ignore[reportUnknownVariableType]
    if isinstance(part, list):
        return of_tensor and all(type(number) is int for number in part)  # pyright: ignore[reportUnknownVariableType]
    return isinstance(part, int) or (of_tensor and (part is None or part is ... or isinstance(part, Tensor)))


def _on_numbers(function: Callable[..., Any], *, tensors: bool) -> Callable[..., Any]:
    """Python's own arithmetic, kept to numbers (and tensors) and to results of a sane size."""

    def guarded(*operands: Any) -> Any:
        for operand in operands:
            if not isinstance(operand, (int, float)) and not (tensors and isinstance(operand, Tensor)):
                raise TypeError(f"it takes numbers{' and tensors' if tensors else ''}, got {type(operand).__name__}")
        whole = all(isinstance(operand, int) for operand in operands)
        if function is operator.pow and whole and abs(operands[1]) > _MAX_EXPONENT:
            raise ValueError(f"the exponent of a whole number may be at most {_MAX_EXPONENT}")
        return function(*operands)

    return guarded


def _resolve(path: str) -> Callable[..., Any]:
    """One of our own names, such as `torch.nn.functional.relu`."""
    root, *rest = path.split(".")
    if path == "getattr":
        return _attribute
    if path == "operator.getitem":
        return _item
    found: Any = {"torch": torch, "math": math, "operator": operator}[root]
    for part in rest:
        found = getattr(found, part)
    return found if root == "torch" else _on_numbers(found, tensors=root == "operator")


_FUNCTIONS: Mapping[str, Callable[..., Any]] = MappingProxyType({name: _resolve(name) for name in FUNCTIONS})
_METHODS: Mapping[str, Callable[..., Any]] = MappingProxyType({name: getattr(Tensor, name) for name in METHODS})
_ATTRIBUTES: Mapping[str, Callable[[Tensor], Any]] = MappingProxyType(
    {
        "shape": lambda tensor: tensor.shape,
        "ndim": lambda tensor: tensor.ndim,
        "dtype": lambda tensor: tensor.dtype,
        "device": lambda tensor: tensor.device,
        "T": lambda tensor: tensor.T,
        "mT": lambda tensor: tensor.mT,
    }
)
_CONSTANTS: Mapping[str, Callable[[str], Any]] = MappingProxyType(
    {
        "dtype": lambda name: getattr(torch, name),
        "device": torch.device,
        "layout": lambda name: getattr(torch, name),
        "memory_format": lambda name: getattr(torch, name),
    }
)

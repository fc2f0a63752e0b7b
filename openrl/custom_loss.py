"""Losses that clients send as traced graphs (protocol 5.9): plain data, checked here before anything is run.

`check_loss` turns a graph into a `LossProgram` in which every call is on the allow-list (`openrl.custom_loss_ops`),
every argument is plain data, and every reference points backwards. What depends on the data (shapes, sizes, time) is
for the backend's interpreter to watch. Errors name the node.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from openrl.custom_loss_ops import (
    ATTRIBUTES,
    CONSTANTS,
    FUNCTIONS,
    IGNORED,
    METHODS,
    NEUTRAL,
    STRINGS,
    Operation,
)
from openrl.errors import BadRequest

CUSTOM = "custom"  # the loss_fn that runs such a graph

MAX_BYTES = 2**20  # of the request that brings a loss
MAX_NODES = 1024
MAX_DEPTH = 8  # lists in lists in an argument
MAX_VALUES = 20_000  # numbers, references and so on, over all arguments
MAX_INPUTS = 16
MAX_METRICS = 64
_INT_RANGE = 2**63
_SHOWN = 80  # characters of a name that a message repeats

_INPUT_NAME = re.compile(r"[a-z_][a-z0-9_]{0,63}")
_METRIC = re.compile(r"custom/[a-z0-9_./-]{1,64}:(sum|mean)")
_ATTRIBUTES = tuple(sorted(ATTRIBUTES))


# ---- what arrives ----


@dataclass(frozen=True, slots=True)
class LossInput:
    """`logprobs` or the key of a loss input, with its rank in every datum: 0 scalar, 1 [T], 2 [T, K]."""

    name: str
    rank: int


@dataclass(frozen=True, slots=True)
class GraphNode:
    """A node as `torch.fx` records it and the client encodes it; nothing about it is known to be good."""

    op: str
    name: str
    target: str
    args: list[Any] = field(default_factory=list[Any])
    kwargs: dict[str, Any] = field(default_factory=dict[str, Any])


# ---- what is run ----


@dataclass(frozen=True, slots=True)
class Ref:
    """The value with this number: the inputs come first, then one value a call."""

    index: int


@dataclass(frozen=True, slots=True)
class Constant:
    """A name of PyTorch's own, such as a dtype; `kind` and `name` are in `CONSTANTS`."""

    kind: str
    name: str


@dataclass(frozen=True, slots=True)
class LossCall:
    """One allowed call. Arguments are numbers, strings, None, `...`, `Ref`s and `Constant`s, and lists, tuples and
    slices of them. A method's first argument is the tensor it is called on."""

    name: str
    target: str
    method: bool
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    @property
    def operation(self) -> Operation:
        return (METHODS if self.method else FUNCTIONS)[self.target]


@dataclass(frozen=True, slots=True)
class LossProgram:
    """A checked loss. `inputs` begins with `logprobs`; `loss` is the value to differentiate."""

    name: str
    inputs: tuple[LossInput, ...]
    calls: tuple[LossCall, ...]
    loss: Ref
    metrics: Mapping[str, Ref]

    @property
    def rank(self) -> int:
        """Of `logprobs`, and so of `target_tokens`."""
        return self.inputs[0].rank

    @property
    def reads(self) -> tuple[LossInput, ...]:
        """The loss inputs that it takes from a datum."""
        return self.inputs[1:]


# ---- the check ----


def check_loss(name: str, inputs: Sequence[LossInput], nodes: Sequence[GraphNode]) -> LossProgram:
    """The program of a graph. Raises `BadRequest` that names the node and says what is wrong with it."""
    _check_inputs(inputs)
    if len(nodes) > MAX_NODES:
        raise BadRequest(f"graph has {len(nodes)} nodes; at most {MAX_NODES} are run here")
    return _Reader(inputs).read(name, nodes)


def _check_inputs(inputs: Sequence[LossInput]) -> None:
    if not 1 <= len(inputs) <= MAX_INPUTS:
        raise BadRequest(f"inputs must hold 1..{MAX_INPUTS} entries, got {len(inputs)}")
    if inputs[0].name != "logprobs" or inputs[0].rank not in (1, 2):
        raise BadRequest(f"inputs[0] must be logprobs of rank 1 or 2, got {_show(inputs[0].name)}, {inputs[0].rank}")
    for index, given in enumerate(inputs):
        if _INPUT_NAME.fullmatch(given.name) is None:
            raise BadRequest(f"inputs[{index}].name must match {_INPUT_NAME.pattern}, got {_show(given.name)}")
        if given.rank not in (0, 1, 2):
            raise BadRequest(f"inputs[{index}].rank must be 0, 1 or 2, got {given.rank}")
    if len({given.name for given in inputs}) < len(inputs):
        raise BadRequest("inputs: two entries have the same name")


class _Reader:
    """Reads a graph node by node; what a node may refer to are the nodes before it."""

    def __init__(self, inputs: Sequence[LossInput]) -> None:
        self._inputs = tuple(inputs)
        self._numbers: dict[str, int] = {}  # of the values so far, by node name
        self._calls: list[LossCall] = []
        self._values = 0

    def read(self, name: str, nodes: Sequence[GraphNode]) -> LossProgram:
        for node in nodes[:-1]:
            self._step(node)
        if len(self._numbers) < len(self._inputs) or not nodes:
            raise BadRequest(
                f"graph has {len(self._numbers)} placeholders for {len(self._inputs)} inputs, or no output"
            )
        if nodes[-1].op != "output":
            raise _refuse(nodes[-1], "the last node must be the output")
        loss, metrics = self._output(nodes[-1])
        return LossProgram(name, self._inputs, tuple(self._calls), loss, metrics)

    def _step(self, node: GraphNode) -> None:
        if not node.name or node.name in self._numbers:
            raise _refuse(node, "its name is empty, or another node has it")
        if node.op == "placeholder":
            self._placeholder(node)
        elif node.op in ("call_function", "call_method"):
            self._calls.append(self._call(node))
        else:
            raise _refuse(node, f"op {_show(node.op)} is not run here; legal: placeholder, call_function, call_method")
        self._numbers[node.name] = len(self._numbers)

    def _placeholder(self, node: GraphNode) -> None:
        number = len(self._numbers)
        if self._calls or number >= len(self._inputs) or node.target != self._inputs[number].name:
            raise _refuse(node, f"placeholder {_show(node.target)} does not follow the order of inputs")
        if node.args or node.kwargs:
            raise _refuse(node, "a placeholder takes no default")

    def _call(self, node: GraphNode) -> LossCall:
        if len(self._numbers) < len(self._inputs):
            raise _refuse(node, "calls come after all placeholders")
        method = node.op == "call_method"
        operation = (METHODS if method else FUNCTIONS).get(node.target)
        if operation is None:
            kind = "tensor method" if method else "function"
            raise _refuse(node, f"{kind} {_show(node.target)} is not one that custom losses may call here")
        kwargs = _without_neutral(node)
        self._check_arguments(node, operation, kwargs, method=method)
        if node.target == "getattr":
            args = self._attribute(node)
        else:
            args = tuple(self._value(node, value, 0) for value in node.args)
        decoded = {key: self._keyword(node, key, value) for key, value in kwargs.items()}
        return LossCall(node.name, node.target, method, args, decoded)

    def _check_arguments(
        self, node: GraphNode, operation: Operation, kwargs: Mapping[str, Any], *, method: bool
    ) -> None:
        legal = len(operation.positional) + method
        if method and not _is_ref(node.args[:1]):
            raise _refuse(node, "the first argument of a method must be the tensor it is called on")
        if len(node.args) > legal and not operation.variadic:
            raise _refuse(node, f"{node.target} takes at most {legal} arguments by position, got {len(node.args)}")
        for key in kwargs:
            if key not in operation.keywords:
                named = ", ".join(sorted(operation.keywords)) or "none"
                raise _refuse(node, f"{node.target} may not be given {_show(key)} here; legal: {named}")

    def _attribute(self, node: GraphNode) -> tuple[Any, ...]:
        """`getattr` reads only attributes that are listed, which are data."""
        if len(node.args) != 2 or not _is_ref(node.args[:1]) or node.args[1] not in _ATTRIBUTES:
            what = _show(node.args[1]) if len(node.args) > 1 else "nothing"
            raise _refuse(node, f"getattr reads {', '.join(_ATTRIBUTES)} of a node, got {what}")
        return self._value(node, node.args[0], 0), node.args[1]

    def _keyword(self, node: GraphNode, key: str, value: Any) -> Any:
        """Words are legal only where a keyword has a fixed set of them."""
        if isinstance(value, str):
            if value not in STRINGS.get(key, ()):
                raise _refuse(node, f"{key} may not be {_show(value)}")
            return value
        return self._value(node, value, 0)

    def _value(self, node: GraphNode, value: Any, depth: int) -> Any:
        """An encoded argument as the value it stands for."""
        self._values += 1
        if self._values > MAX_VALUES:
            raise _refuse(node, f"all arguments together hold more than {MAX_VALUES} values")
        if depth > MAX_DEPTH:
            raise _refuse(node, f"its arguments are nested more than {MAX_DEPTH} deep")
        if value is None or isinstance(value, bool):
            return value
        if isinstance(value, int) and abs(value) < _INT_RANGE:
            return value
        if isinstance(value, float) and math.isfinite(value):
            return value
        if isinstance(value, list):
            return self._values_of(node, value, depth)
        if isinstance(value, dict) and len(value) == 1:
            ((kind, inner),) = value.items()
            return self._tagged(node, kind, inner, depth)
        raise _refuse(node, f"argument {_show(value)} is not one that a call may be given")

    def _values_of(self, node: GraphNode, values: Any, depth: int) -> list[Any]:
        if not isinstance(values, list):
            raise _refuse(node, f"{_show(values)} must be a list")
        items: list[Any] = values
        return [self._value(node, item, depth + 1) for item in items]

    def _tagged(self, node: GraphNode, kind: str, inner: Any, depth: int) -> Any:
        """The one-key objects of the encoding."""
        if kind == "ref":
            return self._ref(node, inner)
        if kind == "tuple":
            return tuple(self._values_of(node, inner, depth))
        if kind == "slice":
            parts = self._values_of(node, inner, depth)
            if len(parts) == 3 and all(part is None or isinstance(part, (int, Ref)) for part in parts):
                return slice(*parts)
        if kind == "ellipsis" and inner is True:
            return ...
        if kind == "float" and inner in ("inf", "-inf", "nan"):
            return float(inner)
        if kind in CONSTANTS and isinstance(inner, str) and inner in CONSTANTS[kind]:
            return Constant(kind, inner)
        raise _refuse(node, f"argument {_show({kind: inner})} is not one that a call may be given")

    def _ref(self, node: GraphNode, name: Any) -> Ref:
        if not isinstance(name, str) or name not in self._numbers:
            raise _refuse(node, f"it refers to {_show(name)}, which is no node before it")
        return Ref(self._numbers[name])

    def _output(self, node: GraphNode) -> tuple[Ref, dict[str, Ref]]:
        """The loss and the metrics of an output node: `{"tuple": [loss, {"dict": {...}}]}`."""
        match node:
            case GraphNode(
                target="output", args=[{"tuple": [{"ref": loss}, {"dict": dict() as metrics}]}], kwargs={}
            ) if len(metrics) <= MAX_METRICS:
                return self._ref(node, loss), {key: self._metric(node, key, value) for key, value in metrics.items()}
            case _:
                raise _refuse(node, f"a loss returns (loss, metrics) with at most {MAX_METRICS} metrics")

    def _metric(self, node: GraphNode, key: Any, value: Any) -> Ref:
        if not isinstance(key, str) or _METRIC.fullmatch(key) is None:
            raise _refuse(node, f"metric {_show(key)} must match {_METRIC.pattern}")
        if not _is_ref([value]):
            raise _refuse(node, f"metric {key} must be a node, got {_show(value)}")
        return self._ref(node, value["ref"])


def _without_neutral(node: GraphNode) -> dict[str, Any]:
    """Keywords without those that tracing writes out although they say nothing."""
    kwargs: dict[str, Any] = {}
    for key, value in node.kwargs.items():
        if key in NEUTRAL:
            if value is not NEUTRAL[key]:
                raise _refuse(node, f"{key} may not be {_show(value)}; leave it out")
        elif key not in IGNORED:
            kwargs[key] = value
    return kwargs


def _is_ref(values: list[Any]) -> bool:
    return len(values) == 1 and isinstance(values[0], dict) and list(values[0]) == ["ref"]


def _refuse(node: GraphNode, why: str) -> BadRequest:
    return BadRequest(f"custom loss, node {_show(node.name)}: {why}.")


def _show(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."

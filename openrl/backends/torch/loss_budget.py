"""What a custom loss may use: how large a call's result will be is worked out before the call is made."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from openrl.custom_loss import LossCall
from openrl.custom_loss_ops import Growth

_MAX_INT = 2**63


@dataclass(frozen=True, slots=True)
class Limits:
    """What one loss may use. Elements are those of a datum's tensors; seconds are for all datums of a request."""

    tensor_elements: int = 2**24
    all_elements: int = 2**26
    work: int = 2**31  # multiplications of one matrix product
    parts: int = 2**16  # tensors in one tuple
    seconds: float = 30.0


class Budget:
    """Elements that one datum's tensors may still take."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._left = limits.all_elements

    def foresee(self, call: LossCall, args: list[Any], kwargs: dict[str, Any]) -> None:
        """Raise ValueError if the call's result would be too large, TypeError if that cannot be told."""
        growth = call.operation.growth
        if growth is Growth.BROADCAST:
            self._check(_broadcast(_shapes([*args, *kwargs.values()])))
        elif growth is Growth.SIZED:
            self._check(_SIZES[_leaf(call)](_bound(call, args, kwargs)))
        elif growth is Growth.PRODUCT:
            given = _bound(call, args, kwargs)
            a, b = (_tensor(given[name]) for name in _names(call))
            self._check_product(a, b, inner_of_both=_leaf(call) == "inner")
        elif growth is Growth.PARTS:
            self._check_parts(_parts(_bound(call, args, kwargs)))
        elif call.target == "operator.getitem" and isinstance(args[0], Tensor):
            self._check(_indexed(args[0], args[1]))

    def _check_product(self, a: Tensor, b: Tensor, *, inner_of_both: bool) -> None:
        inner = a.shape[-1] if a.ndim else 1
        size = _inner_size(a, b) if inner_of_both else _matmul_size(a, b)
        self._check(size)
        if size * inner > self._limits.work:
            raise ValueError(f"a product of {size * inner} multiplications is too large; {self._limits.work} are done")

    def _check(self, size: int) -> None:
        if size > min(self._limits.tensor_elements, self._left):
            raise ValueError(
                f"its result would have {size} elements; a tensor may have {self._limits.tensor_elements}, all of a "
                f"datum together {self._limits.all_elements}"
            )

    def _check_parts(self, count: int) -> None:
        if count > self._limits.parts:
            raise ValueError(f"its result would have {count} parts; at most {self._limits.parts} are kept")

    def admit(self, result: Any) -> None:
        """Let a result in, or raise: tensors on the CPU, numbers, and tuples of them."""
        if isinstance(result, Tensor):
            if result.device.type != "cpu" or result.layout is not torch.strided or result.is_complex():
                raise TypeError("its result is no plain tensor of real numbers on the CPU")
            self._check(result.numel())
            self._left -= result.numel()
        elif isinstance(result, (tuple, list)):
            parts: list[Any] = list(result)  # pyright: ignore[reportUnknownArgumentType]
            self._check_parts(len(parts))
            for part in parts:
                self.admit(part)
        elif isinstance(result, int):
            if abs(result) >= _MAX_INT:
                raise ValueError("its result does not fit in 64 bits")
        elif not isinstance(result, (float, torch.dtype, torch.device)):
            raise TypeError(f"its result is a {type(result).__name__}, which a loss cannot hold")


# ---- sizes, by the kind of call ----


def _leaf(call: LossCall) -> str:
    return call.target.rpartition(".")[2]


def _names(call: LossCall) -> tuple[str, ...]:
    return ("input", *call.operation.positional) if call.method else call.operation.positional


def _bound(call: LossCall, args: list[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Arguments by name; what a variadic one takes is a tuple."""
    names = _names(call)
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    if call.operation.variadic and len(args) >= len(names):
        rest = args[len(names) - 1 :]
        given[names[-1]] = tuple(rest[0]) if isinstance(rest[0], (tuple, list)) else tuple(rest)  # pyright: ignore[reportUnknownArgumentType]
    return given


def _shapes(operands: Iterable[Any]) -> set[torch.Size]:
    return {operand.shape for operand in operands if isinstance(operand, Tensor)}


def _broadcast(shapes: Collection[Sequence[int]]) -> int:
    """Elements of what the shapes broadcast to; whether they do is for the call to say.

    `torch.broadcast_shapes` would do, but draws in 800 modules.
    """
    if len(shapes) == 1:
        return math.prod(next(iter(shapes)))
    columns = zip_longest(*(reversed(shape) for shape in shapes), fillvalue=1)
    return math.prod(0 if 0 in column else max(column) for column in columns)


def _indexed(tensor: Tensor, key: Any) -> int:
    """Elements of `tensor[key]`: masks choose among those that are there, indices can repeat them."""
    parts: tuple[Any, ...] = key if isinstance(key, tuple) else (key,)
    chosen = [part for part in parts if isinstance(part, (Tensor, list))]
    if any(isinstance(part, Tensor) and part.dtype in (torch.bool, torch.uint8) for part in chosen):
        if len(chosen) > 1:
            raise ValueError("a mask cannot be combined with other tensors in one index")
        return tensor.numel()
    repeats = _broadcast([[len(part)] if isinstance(part, list) else part.shape for part in chosen] or [[]])
    taking = sum(part is not None and part is not ... and not isinstance(part, bool) for part in parts)
    kept, dim = 1, 0
    for part in parts:
        if part is ...:
            width = max(tensor.ndim - taking, 0)
            kept *= math.prod(tensor.shape[dim : dim + width])
            dim += width
        elif part is not None and not isinstance(part, bool):
            if isinstance(part, slice):
                kept *= math.prod(tensor.shape[dim : dim + 1])
            dim += 1
    return repeats * kept * math.prod(tensor.shape[dim:])


def _tensor(value: Any) -> Tensor:
    if not isinstance(value, Tensor):
        raise TypeError(f"it takes a tensor, got {type(value).__name__}")
    return value


def _number(value: Any) -> int:
    if not isinstance(value, int):
        raise TypeError(f"it takes whole numbers, got {type(value).__name__}")
    return max(value, 0)


def _product(sizes: Any) -> int:
    return math.prod(_number(size) for size in (sizes if isinstance(sizes, (tuple, list)) else (sizes,)))  # pyright: ignore[reportUnknownVariableType]


def _parts(given: Mapping[str, Any]) -> int:
    """Views that `unbind`, `chunk` and `split` give: at most one a row, or one for each `split_size` rows."""
    tensor, size = _tensor(given["input"]), given.get("split_size_or_sections", 1)
    rows = tensor.shape[given.get("dim", 0)]
    if isinstance(size, (tuple, list)):
        return len(size)  # pyright: ignore[reportUnknownArgumentType]
    return min(-(-rows // max(_number(size), 1)), _number(given.get("chunks", rows)))


def _matmul_size(a: Tensor, b: Tensor) -> int:
    rows = a.shape[-2] if a.ndim > 1 else 1
    columns = b.shape[-1] if b.ndim > 1 else 1
    return rows * columns * _broadcast([a.shape[:-2], b.shape[:-2]])


def _inner_size(a: Tensor, b: Tensor) -> int:
    return math.prod(a.shape[:-1]) * math.prod(b.shape[:-1])


def _joined(given: Mapping[str, Any]) -> int:
    return sum(_tensor(part).numel() for part in given["tensors"])


def _padded(given: Mapping[str, Any]) -> int:
    shape = list(_tensor(given["input"]).shape)
    pad = [_number(width) for width in given["pad"]]
    for place in range(min(len(pad) // 2, len(shape))):
        shape[-1 - place] += pad[2 * place] + pad[2 * place + 1]
    return math.prod(shape)


def _expanded(given: Mapping[str, Any]) -> int:
    """-1 keeps a dimension, so that a tensor's own size bounds what those come to."""
    tensor = _tensor(given["input"])
    sizes: Any = given["sizes"] if "sizes" in given else given["size"]
    kept = [part for part in sizes if part == -1]
    return math.prod(_number(size) for size in sizes if size != -1) * (max(tensor.numel(), 1) if kept else 1)


def _repeated(given: Mapping[str, Any]) -> int:
    repeats = next(given[name] for name in ("sizes", "dims", "repeats") if name in given)
    return _tensor(given["input"]).numel() * _product(repeats)


def _selected(given: Mapping[str, Any]) -> int:
    tensor, index = _tensor(given["input"]), _tensor(given["index"])
    length = tensor.shape[given["dim"]] if tensor.ndim else 1
    return tensor.numel() // max(length, 1) * index.numel()


def _diagonal(given: Mapping[str, Any]) -> int:
    tensor = _tensor(given["input"])
    offset = given.get("diagonal", 0)
    if not isinstance(offset, int):
        raise TypeError(f"diagonal must be a whole number, got {type(offset).__name__}")
    return (tensor.numel() + abs(offset)) ** 2 if tensor.ndim == 1 else tensor.numel()


def _range(given: Mapping[str, Any]) -> int:
    """`arange(end)` and `arange(start, end, step)`."""
    start, end, step = given.get("start", 0), given.get("end"), given.get("step", 1)
    if end is None:
        start, end = 0, start
    numbers = [float(part) for part in (start, end, step) if isinstance(part, (int, float))]
    if len(numbers) < 3 or not all(map(math.isfinite, numbers)) or numbers[2] == 0:
        raise TypeError("it takes finite numbers and a step that is not 0")
    return max(math.ceil((numbers[1] - numbers[0]) / numbers[2]), 0) + 1


_SIZES: Mapping[str, Callable[[Mapping[str, Any]], int]] = MappingProxyType(
    {
        **dict.fromkeys(("cat", "concat", "concatenate", "stack", "hstack", "vstack"), _joined),
        **dict.fromkeys(("zeros", "ones", "full", "new_zeros", "new_ones", "new_full"), lambda g: _product(g["size"])),
        **dict.fromkeys(("expand", "broadcast_to"), _expanded),
        **dict.fromkeys(("repeat", "tile", "repeat_interleave"), _repeated),
        **dict.fromkeys(("gather", "take"), lambda g: _tensor(g["index"]).numel()),
        "expand_as": lambda g: _tensor(g["other"]).numel(),
        "index_select": _selected,
        "diag": _diagonal,
        "outer": lambda g: _tensor(g["input"]).numel() * _tensor(g["vec2"]).numel(),
        "pad": _padded,
        "one_hot": lambda g: _tensor(g["tensor"]).numel() * _number(g["num_classes"]),
        "arange": _range,
        "linspace": lambda g: _number(g["steps"]),
    }
)

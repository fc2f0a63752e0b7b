"""Arrays as they come over the wire, dense or CSR, made into the dense arrays of `openrl.types.Datum`.

JSON and protobuf bodies share these rules: shapes are obeyed, never flattened (L18, T36), an absent shape is one
dimension, CSR is filled with 0 and each tensor unfolds by its own pattern (L19, T35), and int64 becomes float32 where
float32 is due (L13).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from openrl.custom_loss import CUSTOM
from openrl.errors import BadRequest
from openrl.losses import LOSSES
from openrl.types import Array

# What the CSR tensors of one request may unfold to, in elements: a few bytes can name a shape of any size.
MAX_UNFOLDED = 2**26

_TARGETS = "target_tokens"
_FLOAT_KEYS = frozenset[str]().union(*(spec.required | spec.optional for spec in LOSSES.values())) - {_TARGETS}
_INT32 = np.iinfo(np.int32)


def shaped(values: Array, shape: Sequence[int] | None, where: str) -> Array:
    """`values` (1-D) in the shape that the message states; None keeps it 1-D."""
    if shape is None or (len(shape) == 1 and shape[0] == values.size):
        return values
    if any(size < 0 for size in shape) or math.prod(shape) != values.size:
        raise BadRequest(f"{where}: shape {list(shape)} does not hold its {values.size} values")
    return values.reshape(tuple(shape))


class Unfolder:
    """Makes CSR tensors dense, within one budget for a whole request."""

    def __init__(self, limit: int = MAX_UNFOLDED) -> None:
        self._limit = limit
        self._left = limit

    def unfold(
        self,
        values: Array,
        crow: npt.NDArray[np.int64],
        cols: npt.NDArray[np.int64],
        shape: Sequence[int] | None,
        where: str,
    ) -> Array:
        """Dense [rows, columns] of `values`'s dtype with 0 wherever the pattern is silent."""
        rows, columns = table_shape(shape, where)
        check_pattern(values.size, crow, cols, rows, columns, where)
        self._left -= rows * columns
        if self._left < 0:
            raise BadRequest(f"{where}: sparse tensors of one request unfold to more than {self._limit} values")
        dense = np.zeros((rows, columns), values.dtype)
        dense[np.repeat(np.arange(rows), np.diff(crow)), cols] = values
        return dense


def table_shape(shape: Sequence[int] | None, where: str) -> tuple[int, int]:
    """The shape of a sparse tensor, or of another that must have rows and columns. Raises `BadRequest`."""
    if shape is None or len(shape) != 2 or min(shape) < 0:
        given = "no shape" if shape is None else f"shape {list(shape)}"
        raise BadRequest(f"{where} needs a shape [rows, columns], got {given}")
    return shape[0], shape[1]


def check_pattern(
    nnz: int, crow: npt.NDArray[np.int64], cols: npt.NDArray[np.int64], rows: int, columns: int, where: str
) -> None:
    """Whether CSR indices fit their shape and each other. Raises `BadRequest`."""
    if cols.size != nnz:
        raise BadRequest(f"{where}: {nnz} sparse values but {cols.size} column indices")
    if crow.size != rows + 1:
        raise BadRequest(f"{where}: {rows} rows need {rows + 1} row pointers, got {crow.size}")
    if crow[0] != 0 or crow[-1] != nnz or (np.diff(crow) < 0).any():
        raise BadRequest(f"{where}: row pointers must rise from 0 to the number of values, {nnz}")
    if nnz and (cols.min() < 0 or cols.max() >= columns):
        raise BadRequest(f"{where}: column indices must lie in 0..{columns - 1}")


def as_input(name: str, values: Array, where: str, loss: str) -> Array:
    """A loss input in the dtype that its name asks for (L13); unknown names pass as they are, to be refused later.

    A custom loss gets its inputs as they were sent, since its client wrote it for them (5.9).
    """
    if name == _TARGETS and values.dtype != np.int64:
        raise BadRequest(f"{where}: must be int64, got {values.dtype}")
    if name in _FLOAT_KEYS and values.dtype != np.float32 and loss != CUSTOM:
        return values.astype(np.float32)
    return values


def from_numbers(numbers: Sequence[float], dtype: str, where: str) -> Array:
    """A flat JSON list as an array of the dtype it states."""
    values = np.asarray(numbers, dtype=np.float64)
    if dtype == "float32":
        with np.errstate(over="ignore"):  # too large becomes inf, which validation names
            return values.astype(np.float32)
    if dtype != "int64":
        raise BadRequest(f'{where}.dtype must be "float32" or "int64", got {dtype!r}')
    whole = np.isfinite(values) & (np.trunc(values) == values) & (np.abs(values) < 2**63)
    if not whole.all():
        raise BadRequest(f"{where}: int64 data must be whole numbers, got {values[~whole][0]}")
    return values.astype(np.int64)


def from_ints(numbers: Sequence[int], where: str) -> npt.NDArray[np.int64]:
    """A JSON list of integers as int64."""
    try:
        return np.asarray(numbers, dtype=np.int64)
    except OverflowError:
        raise BadRequest(f"{where}: integers must fit in 64 bits") from None


def tokens_from_ints(numbers: Sequence[int], where: str) -> npt.NDArray[np.int32]:
    """A JSON list of token ids as int32."""
    ids = from_ints(numbers, where)
    if ids.size and (ids.min() < _INT32.min or ids.max() > _INT32.max):
        bad = ids[(ids < _INT32.min) | (ids > _INT32.max)][0]
        raise BadRequest(f"{where}: token id {bad} does not fit in 32 bits")
    return ids.astype(np.int32)


def join_tokens(chunks: Iterable[npt.NDArray[np.int32]]) -> npt.NDArray[np.int32]:
    """The text chunks of one input as one int32 array [N]."""
    arrays = list(chunks)
    if len(arrays) == 1:
        return arrays[0]
    return np.concatenate([np.empty(0, np.int32), *arrays])


def refuse_chunk(kind: str, where: str) -> BadRequest:
    """The error for a chunk that is no text."""
    return BadRequest(f"{where} is of kind {kind!r}; this server reads 'encoded_text' chunks (token ids) only")

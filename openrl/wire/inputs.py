"""Tokens, tensors and datums in JSON: prompts of all SDK versions, and training data of those before 0.26."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from openrl.errors import BadRequest
from openrl.types import Cells, Datum, TrainPayload
from openrl.wire.tensors import (
    Unfolder,
    as_input,
    check_pattern,
    from_ints,
    from_numbers,
    join_tokens,
    refuse_chunk,
    shaped,
    table_shape,
    tokens_from_ints,
)

# ---- tokens and tensors ----


@dataclass(frozen=True, slots=True)
class ChunkBody:
    """A chunk of any kind; which one follows from `type`, or without it from the field that is there (T40)."""

    type: str | None = None
    tokens: list[int] | None = None
    data: Any = None
    location: Any = None
    dmel: Any = None

    @property
    def kind(self) -> str:
        if self.type is not None:
            return self.type
        inferred = {"encoded_text": self.tokens, "image_asset_pointer": self.location, "image": self.data}
        return next((kind for kind, value in inferred.items() if value is not None), "dmel" if self.dmel else "unknown")

    def to_tokens(self, where: str) -> npt.NDArray[np.int32]:
        if self.kind != "encoded_text":
            raise refuse_chunk(self.kind, where)
        if self.tokens is None:
            raise BadRequest(f"{where}.tokens is required")
        return tokens_from_ints(self.tokens, f"{where}.tokens")


@dataclass(frozen=True, slots=True)
class ModelInputBody:
    chunks: list[ChunkBody] = field(default_factory=list[ChunkBody])

    def to_tokens(self, where: str) -> npt.NDArray[np.int32]:
        return join_tokens(chunk.to_tokens(f"{where}.chunks[{i}]") for i, chunk in enumerate(self.chunks))


@dataclass(frozen=True, slots=True)
class TensorBody:
    data: list[float]
    dtype: str
    shape: list[int] | None = None
    sparse_crow_indices: list[int] | None = None
    sparse_col_indices: list[int] | None = None

    def to_array(self, where: str, unfolder: Unfolder) -> npt.NDArray[Any]:
        values = from_numbers(self.data, self.dtype, where)
        if self.sparse_crow_indices is None and self.sparse_col_indices is None:
            return shaped(values, self.shape, where)
        crow = from_ints(self.sparse_crow_indices or [], f"{where}.sparse_crow_indices")
        cols = from_ints(self.sparse_col_indices or [], f"{where}.sparse_col_indices")
        return unfolder.unfold(values, crow, cols, self.shape, where)

    def to_cells(self, where: str) -> Cells:
        """The same as a table in its own layout: nothing is unfolded."""
        values = from_numbers(self.data, self.dtype, where)
        if self.sparse_crow_indices is None and self.sparse_col_indices is None:
            return Cells(values, table_shape(shaped(values, self.shape, where).shape, where))
        crow = from_ints(self.sparse_crow_indices or [], f"{where}.sparse_crow_indices")
        cols = from_ints(self.sparse_col_indices or [], f"{where}.sparse_col_indices")
        rows, columns = table_shape(self.shape, where)
        check_pattern(values.size, crow, cols, rows, columns, where)
        return Cells(values, (rows, columns), crow, cols)


# ---- forward and forward_backward of SDKs before 0.26 ----


@dataclass(frozen=True, slots=True)
class DatumBody:
    model_input: ModelInputBody
    loss_fn_inputs: dict[str, TensorBody] | None = None

    def to_datum(self, where: str, loss: str, unfolder: Unfolder) -> Datum:
        at = f"{where}.loss_fn_inputs"
        inputs = {
            name: as_input(name, tensor.to_array(f"{at}.{name}", unfolder), f"{at}.{name}", loss)
            for name, tensor in (self.loss_fn_inputs or {}).items()
        }
        return Datum(self.model_input.to_tokens(f"{where}.model_input"), inputs)


@dataclass(frozen=True, slots=True)
class TrainInput:
    data: list[DatumBody]
    loss_fn: str
    loss_fn_config: dict[str, float | str] | None = None

    def to_payload(self) -> TrainPayload:
        unfolder = Unfolder()
        data = tuple(datum.to_datum(f"data[{i}]", self.loss_fn, unfolder) for i, datum in enumerate(self.data))
        return TrainPayload(data, self.loss_fn, self.loss_fn_config or {})


@dataclass(frozen=True, slots=True)
class ForwardBackwardBody:
    forward_backward_input: TrainInput


@dataclass(frozen=True, slots=True)
class ForwardBody:
    forward_input: TrainInput

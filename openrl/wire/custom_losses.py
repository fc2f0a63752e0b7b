"""The JSON body of `create_custom_loss` (5.9); the graph in it is checked by `openrl.custom_loss`."""

from __future__ import annotations

from dataclasses import dataclass

from openrl.custom_loss import GraphNode, LossInput, LossProgram, check_loss
from openrl.errors import BadRequest
from openrl.wire.messages import Sequence64


@dataclass(frozen=True, slots=True)
class CustomLossAddressBody:
    """Whose loss this is; the rest of its body may be wrong."""

    session_id: str
    custom_loss_seq_id: Sequence64


@dataclass(frozen=True, slots=True)
class GraphBody:
    nodes: list[GraphNode]
    format: int | None = None


@dataclass(frozen=True, slots=True)
class CustomLossBody:
    name: str
    inputs: list[LossInput]
    graph: GraphBody

    def to_program(self) -> LossProgram:
        if self.graph.format not in (None, 1):
            raise BadRequest(f"graph.format must be 1, got {self.graph.format}")
        return check_loss(self.name, self.inputs, self.graph.nodes)

"""How the daemon reads accepted bytes again after a restart, and writes results, without knowing the wire."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from openrl.custom_loss import LossProgram
from openrl.daemon.work import Work
from openrl.types import Op, OptimOutput, SampleOutput, SamplePayload, TrainOutput

Result = TrainOutput | OptimOutput | SampleOutput | Mapping[str, Any]


class Codec(Protocol):
    """Wire bytes to and from work; pure functions of their arguments."""

    def decode_work(self, op: Op, content_type: str, body: bytes) -> Work: ...

    def decode_sample(self, content_type: str, body: bytes) -> SamplePayload: ...

    def decode_custom_loss(self, body: bytes) -> LossProgram: ...

    def encode_result(self, op: Op, output: Result) -> tuple[str, bytes]:
        """Content type and bytes of a result; a mapping is JSON-ready."""
        ...

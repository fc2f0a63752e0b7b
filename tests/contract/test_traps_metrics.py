"""Traps in the metrics of training passes (tinker-protocol 10): what the engine itself names and sums."""

from __future__ import annotations

from pathlib import Path

import pytest
from tinker.lib.chunked_fwdbwd_helpers import combine_fwd_bwd_output_results
from tinker.proto.response_conv import deserialize_forward_backward_output

from openrl.backends.torch.train import Trainer
from openrl.losses import LOSSES
from openrl.types import Op, TrainOutput, TrainPayload
from openrl.wire.bodies import encode_result
from support.training import create, datum, forward, forward_backward


def payload(loss: str, *lengths: int) -> TrainPayload:
    return TrainPayload(tuple(datum(loss, n, seed) for seed, n in enumerate(lengths)), loss)


@pytest.mark.parametrize("loss", LOSSES)
def test_t15_t17_t18_metrics_of_every_loss(llama: Trainer, tmp_path: Path, loss: str) -> None:
    """T18: `loss:sum` is there, also forward-only. T15: each key has exactly one colon. T17: all are sums over datums,
    so that the client's merge of chunks can not re-weight them."""
    create(llama, tmp_path)
    for outcome in (forward(llama, payload(loss, 4, 9)), forward_backward(llama, payload(loss, 4, 9))):
        assert "loss:sum" in outcome.metrics
        assert all(key.count(":") == 1 for key in outcome.metrics)
        assert {key.split(":")[1] for key in outcome.metrics} <= {"sum"}


@pytest.mark.parametrize("loss", LOSSES)
def test_t16_t17_chunks_merged_by_the_client_equal_the_whole(llama: Trainer, tmp_path: Path, loss: str) -> None:
    """T17 through the SDK's own merge, with chunks of unlike sizes; T16: it divides by the number of datums."""
    create(llama, tmp_path)
    whole = payload(loss, 4, 9, 2)
    parts = [TrainPayload(whole.data[:1], loss), TrainPayload(whole.data[1:], loss)]
    merged = combine_fwd_bwd_output_results([sdk_output(forward(llama, part)) for part in parts])
    expected = forward(llama, whole).metrics
    assert merged.metrics.keys() == expected.keys()
    assert merged.metrics == pytest.approx(dict(expected), rel=1e-5, abs=1e-5)
    assert len(merged.loss_fn_outputs) == 3


def sdk_output(output: TrainOutput):  # type: ignore[no-untyped-def]
    return deserialize_forward_backward_output(encode_result(Op.FORWARD, output)[1])

"""QLoRA with the real SDK over `openrl serve --quantize nf4`: learn, sample, be refused, go on over whole weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import tinker
from tinker import types

from support.real_server import KillableServer, client, datum, ints, logprobs

pytest.importorskip("bitsandbytes", reason="openrl[quantize] is not installed")
pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(300)]

MODEL = "local/tiny"
DATA = [[1, 5, 9, 11, 2], [3, 8, 4, 40, 7]]


def test_s6_f1_a_run_over_four_bits(tiny_arguments: Callable[..., list[str]], tmp_path: Path) -> None:
    """S6, F1, C4: what it learned is sampled, rank 0 is a 400, and the checkpoint loads where weights are whole."""
    with KillableServer(tiny_arguments("--quantize", "nf4"), tmp_path / "log") as server:
        service = client(server.endpoint)
        trainer = service.create_lora_training_client(MODEL, rank=4, seed=1).result()
        losses: list[float] = []
        for _ in range(40):
            done = trainer.forward_backward([datum(tokens) for tokens in DATA], "cross_entropy")
            trainer.optim_step(types.AdamParams(learning_rate=0.02)).result()
            losses.append(done.result().metrics["loss:sum"] / 8)
        assert losses[-1] < 0.5 * losses[0]
        sampler = trainer.save_weights_and_get_sampling_client().result()
        told = logprobs(trainer.forward([datum(DATA[0])], "cross_entropy").result())
        np.testing.assert_allclose(sampler.compute_logprobs(ints(DATA[0])).result()[1:], told, atol=1e-5)
        with pytest.raises(tinker.RequestFailedError, match=r"rank 0: .*trains LoRA only"):
            service.create_lora_training_client(MODEL, rank=0).result()
        path = trainer.save_state("kept").result().path
    assert "nf4 for float32" in (tmp_path / "log").read_text()

    with KillableServer(tiny_arguments(), tmp_path / "log2") as server:
        resumed = client(server.endpoint).create_training_client_from_state(path).result()
        other = logprobs(resumed.forward([datum(DATA[0])], "cross_entropy").result())
        assert 1e-4 < abs(np.array(other) - told).max() < 3  # another function, for it is of other weights

"""A mixture of experts with the real SDK over `openrl serve`: train, save, sample, resume, export."""

from __future__ import annotations

import subprocess
from pathlib import Path

import numpy as np
import pytest
import tinker
from safetensors.numpy import load_file
from tinker import types

from openrl_recipes.local_server import openrl_command
from support import tiny
from support.real_server import KillableServer, client, datum, ints, logprobs
from support.tokenizers import save_byte_tokenizer

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(600)]

MODEL = "local/mixture"
ADAM = types.AdamParams(learning_rate=1e-2)
DATA = [[1, 5, 9, 11, 2], [3, 8, 4, 40, 7]]


def loss_of_a_step(trainer: tinker.TrainingClient) -> float:
    done = trainer.forward_backward([datum(tokens) for tokens in DATA], "cross_entropy")
    trainer.optim_step(ADAM).result()
    return done.result().metrics["loss:sum"]


def test_experts_are_trained_saved_sampled_and_resumed(tmp_path: Path) -> None:
    """4.2, A10, S6, S15, C6: all of a run's life; what is exported has the experts' stacks; rank 0 is refused."""
    folder = tiny.build(tmp_path / "mixture", tiny.MIXTURE, tied=False, mlp_only_layers=[])
    save_byte_tokenizer(folder)
    data = ["--data-dir", str(tmp_path / "data")]
    with KillableServer([*data, "--model", str(folder), "--dtype", "float32"], tmp_path / "log") as server:
        service = client(server.endpoint)
        trainer = service.create_lora_training_client(base_model=MODEL, rank=8, seed=1).result()
        losses = [loss_of_a_step(trainer) for _ in range(6)]
        assert losses[-1] < 0.7 * losses[0]
        path = trainer.save_state("six").result().path
        sampler = trainer.save_weights_and_get_sampling_client().result()
        drawn = sampler.sample(ints([1, 5]), 2, types.SamplingParams(max_tokens=12, seed=3)).result()
        for sequence in drawn.sequences:
            assert sequence.logprobs is not None
            scored = trainer.forward([datum([1, 5, *sequence.tokens])], "cross_entropy").result()
            own = logprobs(scored)[1:]
            np.testing.assert_allclose(sequence.logprobs, own, atol=1e-4)
        again = service.create_training_client_from_state_with_optimizer(path).result()
        assert loss_of_a_step(again) == pytest.approx(loss_of_a_step(trainer), rel=1e-6)
        with pytest.raises(tinker.TinkerError, match="trains LoRA only"):
            service.create_lora_training_client(base_model=MODEL, rank=0).result()
    for form in ("merged", "peft"):
        command = [openrl_command(), "checkpoints", "export", path, "--as", form, "--out", str(tmp_path / form)]
        subprocess.run([*command, "--base", str(folder), *data], check=True)
    before, after = (load_file(place / "model.safetensors") for place in (folder, tmp_path / "merged"))
    changed = {name for name, weight in after.items() if (weight != before[name]).any()}
    assert sum(".experts." in name for name in changed) == 3 * 5 * 3
    keys = load_file(tmp_path / "peft" / "adapter_model.safetensors").keys()
    assert sum(".experts." in name for name in keys) == 2 * 3 * 5 * 3

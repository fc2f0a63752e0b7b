"""A whole server whose samples the real vLLM draws: what it tells of it, and that it survives vLLM's death."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import psutil
import pytest
import tinker
from tinker import types

from support import tiny
from support.real_server import KillableServer, client, datum, ints, logprobs, sampler_state
from support.tokenizers import save_byte_tokenizer
from support.vllm import vllm_python

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1500)]

PROMPT = [5, 17, 40, 3, 22]


@pytest.fixture
def server(tmp_path: Path) -> KillableServer:
    python = vllm_python()
    folder = tiny.build(tmp_path / "tiny", "llama", head_dim=32)
    save_byte_tokenizer(folder)
    arguments = ["--data-dir", str(tmp_path / "data"), "--model", str(folder), "--dtype", "float32", "--backend", "cpu"]
    return KillableServer([*arguments, "--vllm-python", str(python)], tmp_path / "server.log")


def vllm_process(server: KillableServer) -> psutil.Process:
    return next(p for p in server.workers() if any(part.endswith("vllm/child") for part in p.cmdline()))


def test_trained_weights_are_sampled_by_vllm_and_its_death_costs_nothing(
    server: KillableServer, tmp_path: Path
) -> None:
    """S6, S15: drawn logprobs are the trainer's, after each step; a killed vLLM is started again and draws what was in
    hand; it ends with the server."""
    with server:
        service = client(server.endpoint)
        trainer = service.create_lora_training_client("local/tiny", rank=8, seed=1).result()
        for step in range(2):
            trainer.forward_backward([datum(PROMPT * 3)], "cross_entropy")
            trainer.optim_step(types.AdamParams(learning_rate=0.05)).result()
            sampler = trainer.save_weights_and_get_sampling_client().result()
            params = types.SamplingParams(max_tokens=12, temperature=1.0, seed=step, stop=[])
            drawn = sampler.sample(ints(PROMPT), 4, params).result().sequences
            output = trainer.forward([datum(PROMPT + list(s.tokens)) for s in drawn], "cross_entropy").result()
            for i, sequence in enumerate(drawn):
                np.testing.assert_allclose(sequence.logprobs, logprobs(output, i)[len(PROMPT) - 1 :], atol=5e-4)
        exact_versions_of_a_whole_model(service, sampler)
        log = tmp_path / "data" / "vllm" / "local--tiny" / "vllm.log"
        assert log.read_text().count(": taken") >= 4
        state = sampler_state(server.own)
        assert state["engine"].startswith("vLLM "), state
        assert (state["state"], state["restarts"]) == ("ready", 0)

        victim = vllm_process(server)
        long = types.SamplingParams(max_tokens=200, temperature=1.0, seed=3, stop=[])
        pending = [sampler.sample(ints(PROMPT), 4, long) for _ in range(4)]
        time.sleep(1.0)
        victim.kill()
        results = [[list(s.tokens) for s in future.result().sequences] for future in pending]
        assert all(len(tokens) == 200 for sequences in results for tokens in sequences)
        begun = [[tokens[:20] for tokens in sequences] for sequences in results]
        assert begun[0] == begun[1] == begun[2] == begun[3], "seeds outlive a restart (S11)"
        state = sampler_state(server.own)
        assert (state["state"], state["restarts"]) == ("ready", 1)
        service.close("success")
        last = vllm_process(server)
    psutil.wait_procs([last], timeout=20)
    assert not last.is_running()


def exact_versions_of_a_whole_model(service: tinker.ServiceClient, adapter: tinker.SamplingClient) -> None:
    """S15, F5: each sampler of a run that trains all parameters draws by the weights of its save, also when later
    ones, and an adapter of the base model, were sampled in between."""
    trainer = service.create_lora_training_client("local/tiny", rank=0).result()
    params = types.SamplingParams(max_tokens=12, temperature=1.0, seed=5, stop=[])
    wanted: list[tuple[tinker.SamplingClient, list[int], list[float]]] = []
    for _ in range(2):
        trainer.forward_backward([datum(PROMPT * 3)], "cross_entropy")
        trainer.optim_step(types.AdamParams(learning_rate=0.01)).result()
        sampler = trainer.save_weights_and_get_sampling_client().result()
        (drawn,) = sampler.sample(ints(PROMPT), 1, params).result().sequences
        output = trainer.forward([datum(PROMPT + list(drawn.tokens))], "cross_entropy").result()
        np.testing.assert_allclose(drawn.logprobs, logprobs(output)[len(PROMPT) - 1 :], atol=5e-4)
        wanted.append((sampler, list(drawn.tokens), list(drawn.logprobs or [])))
    assert wanted[0][1:] != wanted[1][1:]
    adapter.sample(ints(PROMPT), 2, params).result()
    for sampler, tokens, values in wanted:
        (again,) = sampler.sample(ints(PROMPT), 1, params).result().sequences
        assert list(again.tokens) == tokens
        np.testing.assert_allclose(again.logprobs, values, atol=1e-4)

"""The core loop of the SDK against the real server: saving, resuming, chunks, custom losses, samples, names."""

from __future__ import annotations

import subprocess
import sys
import time

import numpy as np
import pytest
import tinker
import torch
from e2e.conftest import SMOL
from tinker import types

from openrl_recipes.local_server import Endpoint
from support.real_server import datum, ints, logprobs

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

TEXT = [504, 2365, 6354, 16438, 27003, 690, 260, 23790, 2767, 30]


@pytest.mark.filterwarnings("ignore:DEPRECATED.*load_state:FutureWarning")  # old, and still served
def test_save_and_resume_through_the_sdk(smol: tinker.ServiceClient) -> None:
    """C4, C6 through the wire: a resumed run continues as if it had never stopped."""
    trainer = smol.create_lora_training_client(SMOL, rank=4, seed=1).result()

    def step(client: tinker.TrainingClient) -> float:
        loss = client.forward_backward([datum(TEXT)], "cross_entropy")
        client.optim_step(types.AdamParams(learning_rate=1e-3)).result()
        return loss.result().metrics["loss:sum"]

    for _ in range(2):
        step(trainer)
    path = trainer.save_state("after-2").result().path
    straight = [step(trainer) for _ in range(2)]
    resumed = smol.create_training_client_from_state_with_optimizer(path).result()
    assert [step(resumed) for _ in range(2)] == pytest.approx(straight, rel=1e-6)
    fresh = smol.create_training_client_from_state(path).result()
    assert step(fresh) == pytest.approx(straight[0], rel=1e-6)
    trainer.load_state_with_optimizer(path).result()
    assert step(trainer) == pytest.approx(straight[0], rel=1e-6)
    sampler = smol.create_sampling_client(model_path=path).result()
    assert sampler.get_base_model() == SMOL


def test_g3_a_call_beyond_the_chunk_limit_equals_its_parts(smol: tinker.ServiceClient) -> None:
    """G3, O2, T2: 1,030 datums arrive as two chunks, the first one last; the sum is that of all."""
    trainer = smol.create_lora_training_client(SMOL, rank=1, seed=1).result()
    short = datum(TEXT[:2])
    one = trainer.forward([short], "cross_entropy").result().metrics["loss:sum"]
    output = trainer.forward([short] * 1030, "cross_entropy").result()
    assert len(output.loss_fn_outputs) == 1030
    assert output.metrics["loss:sum"] == pytest.approx(1030 * one, rel=1e-3)


def test_t1_a_bad_datum_fails_its_call_and_nothing_hangs(smol: tinker.ServiceClient) -> None:
    """T1, O6, G6: also when the bad datum sits in a chunk of its own."""
    trainer = smol.create_lora_training_client(SMOL, rank=1, seed=1).result()
    good, bad = datum(TEXT[:2]), datum([1, 10**6])
    with pytest.raises(tinker.RequestFailedError, match="1000000"):
        trainer.forward_backward([good] * 1025 + [bad], "cross_entropy").result()
    assert trainer.optim_step(types.AdamParams()).result().metrics is not None
    assert trainer.forward([good], "cross_entropy").result().metrics["loss:sum"] > 0


def test_l4_client_side_custom_loss(smol: tinker.ServiceClient) -> None:
    """1.9: the client's custom loss runs over forward and a cross_entropy surrogate; its value is the client's own."""
    trainer = smol.create_lora_training_client(SMOL, rank=4, seed=1).result()

    def squares(_data: list[types.Datum], lps: list[torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
        loss = (lps[0] ** 2).mean()
        return loss, {"squares:mean": float(loss.detach())}

    lp = logprobs(trainer.forward([datum(TEXT)], "cross_entropy").result())
    output = trainer.forward_backward_custom([datum(TEXT)], squares).result()
    assert output.metrics["loss:sum"] == pytest.approx(float(np.mean(lp**2)), rel=1e-3)
    assert output.metrics["surrogate_loss:sum"] == pytest.approx(2 * float(np.mean(lp**2)), rel=1e-2)
    assert trainer.optim_step(types.AdamParams()).result().metrics["grad_norm:mean"] > 0


def test_l14_top_k_targets_arrive_sparse_and_keep_their_shape(smol: tinker.ServiceClient) -> None:
    """L14, L18-L20: rank-2 targets and weights, sent by the SDK as CSR, each with its own pattern."""
    trainer = smol.create_lora_training_client(SMOL, rank=1, seed=1).result()
    targets = torch.zeros((9, 6), dtype=torch.int64)
    weights = torch.zeros((9, 6))
    targets[4, :3], weights[4, :3] = torch.tensor([4, 0, 6]), torch.tensor([0.5, 0.3, 0.2])
    top_k = types.Datum(ints(TEXT[:-1]), {"target_tokens": targets, "weights": weights})
    output = trainer.forward([top_k], "cross_entropy").result()
    found = np.array(output.loss_fn_outputs[0]["logprobs"].data).reshape(9, 6)
    assert output.metrics["loss:sum"] == pytest.approx(-float(found[4, :3] @ [0.5, 0.3, 0.2]), rel=1e-5)


def test_samples_through_the_sdk(smol: tinker.ServiceClient) -> None:
    """S5, S7, S9, S11: seeds, counts, prompt logprobs and stops as the SDK shows them."""
    sampler = smol.create_sampling_client(base_model=SMOL).result()
    params = types.SamplingParams(max_tokens=5, seed=11)
    three = sampler.sample(ints(TEXT), 3, params, include_prompt_logprobs=True, topk_prompt_logprobs=2).result()
    alone = sampler.sample(ints(TEXT), 1, types.SamplingParams(max_tokens=5, seed=12)).result()
    assert len(three.sequences) == 3
    # The first token: later ones may tell bf16's rounding in a batch of three from that of one row (B6); in float32
    # the contract tests compare all of them.
    assert three.sequences[1].tokens[0] == alone.sequences[0].tokens[0]
    assert three.prompt_logprobs is not None
    assert three.prompt_logprobs[0] is None
    assert len(three.prompt_logprobs) == len(TEXT)
    assert three.topk_prompt_logprobs is not None
    assert three.topk_prompt_logprobs[0] is None
    assert len(three.topk_prompt_logprobs[1]) == 2
    endless = sampler.sample(ints(TEXT), 1, types.SamplingParams(max_tokens=4, stop=[])).result()
    assert len(endless.sequences[0].tokens) == 4
    assert endless.sequences[0].stop_reason == "length"


def test_many_clients_share_the_server(smol: tinker.ServiceClient) -> None:
    """Two runs train while samples are drawn; each gets what it would get alone (B6)."""
    runs = [smol.create_lora_training_client(SMOL, rank=4, seed=s).result() for s in (1, 2)]
    sampler = smol.create_sampling_client(base_model=SMOL).result()
    samples = [sampler.sample(ints(TEXT), 1, types.SamplingParams(max_tokens=8, seed=s)) for s in range(8)]
    together = [[run.forward_backward([datum(TEXT[s:])], "cross_entropy") for s in (0, 2)] for run in runs]
    for run in runs:
        run.optim_step(types.AdamParams(learning_rate=1e-3)).result()
    losses = [[future.result().metrics["loss:sum"] for future in futures] for futures in together]
    assert losses[0] == pytest.approx(losses[1], rel=5e-3), "B = 0: both are still the base model"
    assert all(len(s.result().sequences[0].tokens) <= 8 for s in samples)


def test_an_alias_stands_in_for_a_fixed_name(smol: tinker.ServiceClient) -> None:
    """A script with a fixed model name runs on the stand-in and finds its tokenizer under that name."""
    trainer = smol.create_lora_training_client("test/stand-in", rank=1).result()
    assert trainer.get_info().model_data.model_name == "test/stand-in"
    assert trainer.get_tokenizer().encode("hello") == trainer.get_tokenizer().encode("hello")


@pytest.mark.parametrize("name", [SMOL, "test/stand-in"])
def test_the_tokenizer_is_found_under_served_names_without_a_hub(smol_server: Endpoint, name: str) -> None:
    """As the cookbook loads it: AutoTokenizer.from_pretrained(<served name>) in another process, offline."""
    wait_until_ready(smol_server)
    code = (
        "import sys; from transformers import AutoTokenizer; t = AutoTokenizer.from_pretrained(sys.argv[1]); "
        "print(t.decode(t.encode('hello world'))); "
        "print(t.apply_chat_template([{'role': 'user', 'content': 'hi'}], tokenize=False))"
    )
    done = subprocess.run([sys.executable, "-c", code, name], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "hello world" in done.stdout
    assert "<|im_start|>user" in done.stdout


def wait_until_ready(endpoint: Endpoint) -> None:
    import httpx

    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        answer = httpx.get(f"{endpoint.base_url}/api/v1/status", headers={"X-API-Key": endpoint.api_key}).json()
        if all(model["state"] == "ready" for model in answer["models"]):
            return
        time.sleep(0.2)
    raise AssertionError("the model is not ready")

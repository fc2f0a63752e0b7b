"""Checkpoints: bit-exact (C4), resumable (C6), refused when they do not fit (C3), and readable by PEFT (A14, A15)."""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import PeftModel
from safetensors.numpy import load_file, save_file
from transformers import AutoModelForCausalLM

from openrl.backends.torch.adapter_files import load_adapter
from openrl.backends.torch.model import open_model
from openrl.checkpoints.peft import read_adapter
from openrl.errors import BadRequest
from openrl.types import AdamParams, LoraSpec, RunId
from support.training import RUN, SPEC, Held, ce, create, forward, forward_backward, same, trainer

ADAM = AdamParams(learning_rate=3e-3, weight_decay=0.01, grad_clip_norm=5.0)
FRESH = RunId("fresh")


@pytest.fixture
def llama(opened: Callable[..., Held], model_folder: Callable[..., Path]) -> Held:
    """A float32 trainer on the tiny llama, of each backend."""
    return opened(model_folder("llama"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    into = tmp_path / "checkpoint"
    into.mkdir()
    return into


def trained(held: Held, into: Path, steps: int = 3, run: RunId = RUN, spec: LoraSpec = SPEC) -> None:
    """A run with some steps behind it."""
    create(held, into, run, spec)
    for step in range(steps):
        forward_backward(held, ce(12, 20, seed=step), run)
        held.optim_step(run, ADAM)


def test_c4_everything_comes_back_bit_for_bit(llama: Held, folder: Path, tmp_path: Path) -> None:
    """C4, O11, C2: weights, moments, t; equal logprobs and an equal next step; saving changes nothing."""
    trained(llama, tmp_path)
    forward_backward(llama, ce(9, seed=50))
    before = llama.gradients(RUN), llama.parameters(RUN)
    llama.save(RUN, folder, optimizer=True, gradients=False)
    assert same(llama.gradients(RUN), before[0])
    assert same(llama.parameters(RUN), before[1])
    llama.load(FRESH, folder, optimizer=True)
    assert same(llama.parameters(FRESH), before[1])
    assert not any(g.any() for g in llama.gradients(FRESH).values())  # G10
    payload = ce(15, seed=60)
    a, b = (forward(llama, payload, run).logprobs[0] for run in (RUN, FRESH))
    assert np.array_equal(a, b)
    forward_backward(llama, ce(9, seed=50), FRESH)
    metrics = [llama.optim_step(run, ADAM).metrics for run in (RUN, FRESH)]
    assert metrics[0] == metrics[1]
    assert same(llama.parameters(RUN), llama.parameters(FRESH))


def test_snapshot_with_gradients(llama: Held, folder: Path, tmp_path: Path) -> None:
    """A recovery snapshot brings the accumulator back too, bit for bit; a zero one has no file."""
    trained(llama, tmp_path)
    llama.save(RUN, folder, optimizer=True, gradients=True)
    assert not (folder / "gradients.safetensors").exists()
    forward_backward(llama, ce(9, seed=50))
    llama.save(RUN, folder, optimizer=True, gradients=True)
    llama.load(FRESH, folder, optimizer=True)
    assert same(llama.gradients(FRESH), llama.gradients(RUN))
    llama.load(FRESH, folder, optimizer=False)
    assert not any(g.any() for g in llama.gradients(FRESH).values())


def test_a_run_without_steps(llama: Held, folder: Path) -> None:
    """Zero moments and t = 0 are a state like any other."""
    llama.create(RUN, SPEC)
    llama.save(RUN, folder, optimizer=True, gradients=True)
    llama.load(FRESH, folder, optimizer=True)
    assert same(llama.parameters(FRESH), llama.parameters(RUN))
    for run in (RUN, FRESH):
        forward_backward(llama, ce(9), run)
        llama.optim_step(run, ADAM)
    assert same(llama.parameters(FRESH), llama.parameters(RUN))


def test_c6_resume(
    opened: Callable[..., Held], model_folder: Callable[..., Path], folder: Path, tmp_path: Path
) -> None:
    """C6: 8 steps equal 4, save, another trainer, load with optimizer, 4 more."""
    held = opened(model_folder("qwen3"))
    trained(held, tmp_path, steps=4)
    held.save(RUN, folder, optimizer=True, gradients=False)
    other = opened(model_folder("qwen3"))
    other.load(RUN, folder, optimizer=True)
    for step in range(4, 8):
        payload = ce(12, 20, seed=step)
        losses = [forward_backward(one, payload).metrics["loss:sum"] for one in (held, other)]
        assert losses[1] == pytest.approx(losses[0], rel=1e-6)
        for one in (held, other):
            one.optim_step(RUN, ADAM)
    assert same(held.parameters(RUN), other.parameters(RUN))
    again = tmp_path / "again"
    again.mkdir()
    other.save(RUN, again, optimizer=True, gradients=False)
    assert int(load_file(again / "optimizer.safetensors")["t"]) == 8


def test_o12_weights_only(llama: Held, folder: Path, tmp_path: Path) -> None:
    """O12: without the optimizer m = v = 0 and t = 0, also where the run had some; G = 0 (G10)."""
    trained(llama, tmp_path)
    llama.save(RUN, folder, optimizer=True, gradients=False)
    forward_backward(llama, ce(9))
    llama.load(RUN, folder, optimizer=False)
    assert not any(g.any() for g in llama.gradients(RUN).values())
    state = tmp_path / "state"
    state.mkdir()
    llama.save(RUN, state, optimizer=True, gradients=False)
    tensors = load_file(state / "optimizer.safetensors")
    assert not any(value.any() for value in tensors.values())
    assert "t" in tensors


def test_a14_a15_files(llama: Held, folder: Path, tmp_path: Path) -> None:
    """A14, A15, A17: the whole config, PEFT's names, float32 values bit-equal to the run's."""
    trained(llama, tmp_path, spec=LoraSpec(rank=4, seed=7, train_mlp=False))
    llama.save(RUN, folder, optimizer=False, gradients=False)
    assert sorted(p.name for p in folder.iterdir()) == ["adapter_config.json", "adapter_model.safetensors"]
    config = json.loads((folder / "adapter_config.json").read_text())
    assert config == {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "tiny/model",
        "r": 4,
        "lora_alpha": 32,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "target_modules": ["k_proj", "lm_head", "o_proj", "q_proj", "v_proj"],
        "rank_pattern": {},
        "alpha_pattern": {},
        "modules_to_save": None,
        "inference_mode": True,
        "init_lora_weights": True,
    }
    tensors = load_file(folder / "adapter_model.safetensors")
    assert len(tensors) == 2 * (3 * 4 + 1)
    for name, value in llama.parameters(RUN).items():
        stored = tensors[f"base_model.model.{name}.weight"]
        assert stored.tobytes() == value.tobytes()
    assert "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight" in tensors
    assert "base_model.model.lm_head.lora_B.weight" in tensors


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3"])
def test_peft_reads_it(
    family: str, tied: bool, model_folder: Callable[..., Path], folder: Path, tmp_path: Path
) -> None:
    """PEFT itself, on the same base model, gives our logprobs; also with an unembed adapter on tied embeddings (A9)."""
    held = trainer(model_folder(family, tied=tied))
    trained(held, tmp_path)
    held.save(RUN, folder, optimizer=True, gradients=False)
    payload = ce(25, seed=70)
    ours = forward(held, payload).logprobs[0]
    base = AutoModelForCausalLM.from_pretrained(model_folder(family, tied=tied), dtype=torch.float32)
    with warnings.catch_warnings():
        # PEFT warns of merging an adapter of a tied head; we do not merge.
        warnings.simplefilter("ignore")
        model: Any = PeftModel.from_pretrained(base, str(folder)).eval()
    with torch.no_grad():
        logits = model(input_ids=torch.from_numpy(payload.data[0].tokens.astype(np.int64))[None]).logits[0]
    targets = torch.from_numpy(payload.data[0].inputs["target_tokens"])[:, None]
    theirs = torch.log_softmax(logits, dim=1).gather(1, targets)[:, 0].numpy()
    np.testing.assert_allclose(ours, theirs, atol=3e-5, rtol=1e-5)
    assert np.abs(ours - base_logprobs(held, payload)).max() > 0.05  # the adapter does something


def base_logprobs(held: Held, payload: Any) -> np.ndarray:
    held.create(FRESH, SPEC)
    return forward(held, payload, FRESH).logprobs[0]


def test_load_adapter_for_sampling(model_folder: Callable[..., Path], folder: Path, tmp_path: Path) -> None:
    """C4: the sampler's adapter is the trainer's at the time of saving, without gradient."""
    held = trainer(model_folder("llama"))
    trained(held, tmp_path)
    held.save(RUN, folder, optimizer=False, gradients=False)
    model = open_model(model_folder("llama"), torch.device("cpu"), torch.bfloat16)
    adapter = load_adapter(folder, model.shapes, model.device)
    assert adapter.spec == SPEC
    for name, value in adapter.parameters():
        assert np.array_equal(value.numpy(), held.parameters(RUN)[name])
        assert not value.requires_grad
    frozen = adapter.freeze(model.dtype).frozen
    assert frozen is not None
    down, up = frozen["model.layers.0.mlp.up_proj"]
    a, b = (adapter.a["model.layers.0.mlp.up_proj"], adapter.b["model.layers.0.mlp.up_proj"])
    assert torch.equal(down, (adapter.scale * a).to(torch.bfloat16).t())
    assert torch.equal(up, b.to(torch.bfloat16).t())
    assert frozen["lm_head"][0].dtype is torch.float32


def test_c3_spec_of_a_new_run_is_the_checkpoints(llama: Held, folder: Path, tmp_path: Path) -> None:
    """C3: rank, modules and seed."""
    spec = LoraSpec(rank=2, seed=99, train_attn=False, train_unembed=False)
    trained(llama, tmp_path, run=RunId("a"), spec=spec)
    llama.save(RunId("a"), folder, optimizer=True, gradients=False)
    llama.load(FRESH, folder, optimizer=True)
    again = tmp_path / "again"
    again.mkdir()
    llama.save(FRESH, again, optimizer=True, gradients=False)
    assert read_adapter(again).spec == spec
    assert (again / "adapter_config.json").read_text() == (folder / "adapter_config.json").read_text()
    for name in ("adapter_model.safetensors", "optimizer.safetensors"):
        assert same(load_file(again / name), load_file(folder / name))


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (LoraSpec(rank=8, seed=7), "rank 4; the run has rank 8"),
        (LoraSpec(rank=4, seed=7, train_mlp=False), "the run adapts 13 layers"),
    ],
)
def test_c3_mismatch_is_refused_whole(spec: LoraSpec, message: str, llama: Held, folder: Path, tmp_path: Path) -> None:
    """C3: never partial; the run keeps its state."""
    trained(llama, tmp_path)
    llama.save(RUN, folder, optimizer=True, gradients=False)
    create(llama, tmp_path, FRESH, spec)
    forward_backward(llama, ce(9), FRESH)
    before = llama.parameters(FRESH), llama.gradients(FRESH)
    with pytest.raises(BadRequest, match=message):
        llama.load(FRESH, folder, optimizer=True)
    assert same(llama.parameters(FRESH), before[0])
    assert same(llama.gradients(FRESH), before[1])


def test_c3_another_base_model(model_folder: Callable[..., Path], llama: Held, folder: Path, tmp_path: Path) -> None:
    """C3: a layer that is not there, or of another shape."""
    trained(llama, tmp_path)
    llama.save(RUN, folder, optimizer=True, gradients=False)
    file = folder / "adapter_model.safetensors"
    tensors = load_file(file)
    name = "base_model.model.model.layers.1.mlp.up_proj.lora_A.weight"
    save_file({**tensors, name: tensors[name][:, :20].copy()}, file)
    with pytest.raises(BadRequest, match=r"shape \(4, 20\); this base model needs \(4, 32\)"):
        llama.load(FRESH, folder, optimizer=False)
    save_file({**tensors, name.replace("layers.1", "layers.7"): tensors[name]}, file)
    with pytest.raises(BadRequest, match=r"layers\.7"):
        llama.load(FRESH, folder, optimizer=False)


def test_c3_missing_or_damaged_files(llama: Held, folder: Path, tmp_path: Path) -> None:
    """C3: a sampler checkpoint has no optimizer; damaged files are named."""
    trained(llama, tmp_path)
    llama.save(RUN, folder, optimizer=True, gradients=False)

    def broken(name: str, content: bytes | None) -> Path:
        copy = tmp_path / f"without-{name}"
        shutil.copytree(folder, copy, dirs_exist_ok=True)
        (copy / name).unlink()
        if content is not None:
            (copy / name).write_bytes(content)
        return copy

    cases = [
        ("optimizer.safetensors", None, "no optimizer state"),
        ("adapter_model.safetensors", None, "no adapter_model.safetensors"),
        ("adapter_model.safetensors", b"\x10\x00", "cannot be read"),
        ("adapter_config.json", None, "no readable adapter_config.json"),
        ("adapter_config.json", b"{", "no readable adapter_config.json"),
        ("adapter_config.json", b'{"peft_type": "IA3"}', "peft_type"),
        ("optimizer.safetensors", b"", "cannot be read"),
    ]
    for name, content, message in cases:
        with pytest.raises(BadRequest, match=message):
            llama.load(FRESH, broken(name, content), optimizer=True)
    save_file({"t": np.array(1)}, folder / "optimizer.safetensors")
    with pytest.raises(BadRequest, match="m\\.model"):
        llama.load(FRESH, folder, optimizer=True)

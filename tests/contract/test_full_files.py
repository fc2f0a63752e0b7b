"""Files of a run that trains all parameters: saved and loaded bit for bit, in Hugging Face's form."""

from __future__ import annotations

import io
import json
import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from openrl.backends.common.training import Training
from openrl.checkpoints.archive import archive
from openrl.errors import BadRequest
from openrl.types import AdamParams, RunId, TrainPayload
from support.full import FULL, full_run
from support.tokenizers import save_byte_tokenizer
from support.training import RUN, SPEC, ce, create, forward, forward_backward, same

ADAM = AdamParams(learning_rate=1e-2)
FRESH = RunId("fresh")

Folders = Callable[..., Path]


@pytest.fixture
def full(engine: str, model_folder: Folders) -> Training:
    return full_run(model_folder("llama"), engine=engine)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "checkpoint"
    made.mkdir()
    return made


def trained(held: Training, steps: int = 2, start: int = 0) -> None:
    for step in range(start, start + steps):
        forward_backward(held, ce(12, 20, seed=step))
        held.optim_step(RUN, ADAM)


def moved_in(held: Training, folder: Path, *, optimizer: bool = True) -> None:
    """Load a checkpoint as the run `FRESH`, in place of `RUN`."""
    held.drop(RUN)
    held.load(FRESH, folder, optimizer=optimizer)


def hf_logprobs(folder: Path, payload: TrainPayload) -> np.ndarray:
    """What transformers itself makes of a folder, in the dtype that it is stored in."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder).eval()
    with torch.no_grad():
        logits = model(input_ids=torch.from_numpy(payload.data[0].tokens.astype(np.int64))[None]).logits[0].float()
    targets = torch.from_numpy(payload.data[0].inputs["target_tokens"])[:, None]
    return torch.log_softmax(logits, dim=1).gather(1, targets)[:, 0].numpy()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_c2_c4_bit_exact_and_the_next_step_too(engine: str, dtype: str, model_folder: Folders, folder: Path) -> None:
    """C2, C4, O11: saving changes nothing; masters, logprobs and the next step after loading are the same bits."""
    held = full_run(model_folder("llama"), dtype, engine=engine)
    trained(held)
    forward_backward(held, ce(9, seed=50))
    before = held.parameters(RUN), held.gradients(RUN)
    held.save(RUN, folder, optimizer=True, gradients=True)
    assert same(held.parameters(RUN), before[0])
    assert same(held.gradients(RUN), before[1])
    payload = ce(15, seed=60)
    logprobs = forward(held, payload).logprobs[0]
    metrics = held.optim_step(RUN, ADAM).metrics
    stepped = held.parameters(RUN)
    moved_in(held, folder)
    assert same(held.parameters(FRESH), before[0])
    assert same(held.gradients(FRESH), before[1])  # a snapshot brings the accumulator back
    assert np.array_equal(forward(held, payload, FRESH).logprobs[0], logprobs)
    assert held.optim_step(FRESH, ADAM).metrics == metrics
    assert same(held.parameters(FRESH), stepped)


def test_c6_resume(engine: str, model_folder: Folders, folder: Path) -> None:
    """C6: 4 steps equal 2, save, another trainer, load with optimizer, 2 more; m, v and t are the same bits."""
    held = full_run(model_folder("qwen3"), engine=engine)
    trained(held)
    held.save(RUN, folder, optimizer=True, gradients=False)
    other = full_run(model_folder("qwen3"), engine=engine)
    other.load(RUN, folder, optimizer=True)
    for one in (held, other):
        trained(one, start=2)
    assert same(held.parameters(RUN), other.parameters(RUN))
    states: list[dict[str, torch.Tensor]] = []
    for name, one in (("a", held), ("b", other)):
        (folder / name).mkdir()
        one.save(RUN, folder / name, optimizer=True, gradients=True)
        states.append(load_file(folder / name / "optimizer.safetensors"))
        assert not (folder / name / "gradients.safetensors").exists()
    assert int(states[1]["t"]) == 4
    assert all(torch.equal(states[0][key], states[1][key]) for key in states[0])


def test_g10_o12_weights_only(full: Training, folder: Path) -> None:
    """O12, G10: without the optimizer all moments, t and the gradient are zero."""
    trained(full)
    full.save(RUN, folder, optimizer=True, gradients=False)
    kept = full.parameters(RUN)
    forward_backward(full, ce(9))
    full.load(RUN, folder, optimizer=False)
    assert same(full.parameters(RUN), kept)
    assert not any(g.any() for g in full.gradients(RUN).values())
    full.save(RUN, folder, optimizer=True, gradients=False)
    assert not any(value.any() for value in load_file(folder / "optimizer.safetensors").values())


@pytest.mark.parametrize(("family", "tied"), [("llama", True), ("gemma3", False)])
def test_f5_transformers_opens_what_is_saved(
    engine: str, family: str, tied: bool, model_folder: Folders, folder: Path
) -> None:
    """F5: a training checkpoint holds the masters; tied embeddings are stored once (F4)."""
    held = full_run(model_folder(family, tied=tied), engine=engine)
    trained(held)
    held.save(RUN, folder, optimizer=True, gradients=False)
    payload = ce(25, seed=70)
    np.testing.assert_allclose(hf_logprobs(folder, payload), forward(held, payload).logprobs[0], atol=3e-5)
    stored = load_file(folder / "model.safetensors")
    assert ("lm_head.weight" in stored) is not tied
    assert {t.dtype for t in stored.values()} == {torch.float32}


def test_f5_sampler_files_are_in_the_compute_dtype(
    engine: str, model_folder: Folders, folder: Path, tmp_path: Path
) -> None:
    """F5, C4: of a bf16 engine, what it computes with; the archive is the same folder, with the tokenizer's files."""
    base = tmp_path / "base"
    shutil.copytree(model_folder("llama"), base)
    save_byte_tokenizer(base)
    held = full_run(base, "bfloat16", engine=engine)
    trained(held)
    held.save(RUN, folder, optimizer=False, gradients=False)
    stored = load_file(folder / "model.safetensors")
    for name, master in held.parameters(RUN).items():
        assert torch.equal(stored[name], torch.tensor(master).bfloat16())
    assert json.loads((folder / "config.json").read_text())["dtype"] == "bfloat16"
    rope = archive(folder)
    with tarfile.open(fileobj=io.BytesIO(b"".join(rope.read(0, rope.size)))) as tar:
        names = tar.getnames()
        tar.extractall(tmp_path / "unpacked", filter="data")
    assert {"config.json", "model.safetensors", "tokenizer.json", "checkpoint_complete"} <= set(names)
    assert not any("/" in name or name.startswith("adapter") for name in names)
    np.testing.assert_allclose(hf_logprobs(tmp_path / "unpacked", ce(25)), forward(held, ce(25)).logprobs[0], atol=1e-1)


def test_f5_the_archive_of_a_training_checkpoint_has_no_optimizer(full: Training, folder: Path) -> None:
    full.save(RUN, folder, optimizer=True, gradients=False)
    rope = archive(folder)
    with tarfile.open(fileobj=io.BytesIO(b"".join(rope.read(0, rope.size)))) as tar:
        assert set(tar.getnames()) == {
            "config.json",
            "generation_config.json",
            "model.safetensors",
            "checkpoint_complete",
        }


def test_c3_kinds_do_not_mix(full: Training, folder: Path, tmp_path: Path) -> None:
    """C3: an adapter into a full run and the reverse; both runs stay as they were."""
    full.save(RUN, folder, optimizer=True, gradients=False)
    create(full, tmp_path, FRESH, SPEC)
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    full.save(FRESH, adapter, optimizer=True, gradients=False)
    before = full.parameters(RUN), full.parameters(FRESH)
    with pytest.raises(BadRequest, match="is a LoRA adapter; the run trains all parameters"):
        full.load(RUN, adapter, optimizer=True)
    with pytest.raises(BadRequest, match="trained all parameters; this run trains a LoRA adapter"):
        full.load(FRESH, folder, optimizer=False)
    assert same(full.parameters(RUN), before[0])
    assert same(full.parameters(FRESH), before[1])


def test_c3_damage_and_other_models_are_refused_whole(full: Training, folder: Path, model_folder: Folders) -> None:
    """C3: never partial loading: what does not fit is named, and the run keeps its state."""
    trained(full)
    full.save(RUN, folder, optimizer=True, gradients=False)
    trained(full, start=2)
    before = full.parameters(RUN)
    tensors = load_file(folder / "optimizer.safetensors")
    name = "m.model.layers.1.mlp.up_proj.weight"

    def refused(match: str, optimizer: bool = True) -> None:
        with pytest.raises(BadRequest, match=match):
            full.load(RUN, folder, optimizer=optimizer)
        assert same(full.parameters(RUN), before)

    save_file({k: v for k, v in tensors.items() if k != name}, folder / "optimizer.safetensors")
    refused(f"holds nothing for {name!r}")
    save_file({**tensors, name: torch.zeros(3)}, folder / "optimizer.safetensors")
    refused(r"holds \(3,\) for")
    (folder / "optimizer.safetensors").write_bytes(b"\x10\x00")
    refused("cannot be read")
    (folder / "optimizer.safetensors").unlink()
    refused("no optimizer state")
    shutil.copyfile(model_folder("llama", tied=False) / "model.safetensors", folder / "model.safetensors")
    refused("'lm_head.weight'; this base model needs nothing", optimizer=False)
    (folder / "model.safetensors").unlink()
    refused("no model.safetensors", optimizer=False)
    full.create(RUN, FULL)

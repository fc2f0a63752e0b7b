"""A run saved on MLX resumes on PyTorch, and back (C4, C6): the same files, and the same losses after them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.numpy import load_file

from openrl.types import AdamParams
from support.full import full_run
from support.training import RUN, SPEC, ce, create, forward, forward_backward, needs_mlx, open_trainer, same

pytestmark = needs_mlx

ADAM = AdamParams(learning_rate=3e-3, weight_decay=0.01, grad_clip_norm=5.0)
FILES = ("adapter_model.safetensors", "optimizer.safetensors", "gradients.safetensors")


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3"])
@pytest.mark.parametrize(("first", "second"), [("mps", "cpu"), ("cpu", "mps")])
def test_c6_resume_on_another_engine(
    first: str, second: str, family: str, model_folder: Callable[..., Path], tmp_path: Path
) -> None:
    """C6, O11: two steps, half of a third, save with the accumulator; the other engine goes on as this one would."""
    here = open_trainer(first, model_folder(family))
    create(here, tmp_path)
    for step in range(2):
        forward_backward(here, ce(12, 20, seed=step))
        here.optim_step(RUN, ADAM)
    forward_backward(here, ce(9, seed=2))
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    here.save(RUN, folder, optimizer=True, gradients=True)

    there = open_trainer(second, model_folder(family))
    there.load(RUN, folder, optimizer=True)
    assert same(there.parameters(RUN), here.parameters(RUN))
    assert same(there.gradients(RUN), here.gradients(RUN))
    for step in range(3, 6):
        losses = [forward_backward(held, ce(12, 20, seed=step)).metrics["loss:sum"] for held in (here, there)]
        assert losses[1] == pytest.approx(losses[0], rel=1e-5)
        for held in (here, there):
            held.optim_step(RUN, ADAM)


@pytest.mark.parametrize(("first", "second"), [("mps", "cpu"), ("cpu", "mps")])
def test_c4_there_and_back_bit_for_bit(
    first: str, second: str, model_folder: Callable[..., Path], tmp_path: Path
) -> None:
    """C4: loaded and saved again by the other engine, every file holds the same bytes under the same names."""
    here, there = (open_trainer(engine, model_folder("qwen3")) for engine in (first, second))
    create(here, tmp_path)
    forward_backward(here, ce(12, 20))
    here.optim_step(RUN, ADAM)
    forward_backward(here, ce(9))
    folders = [tmp_path / name for name in ("one", "two")]
    for held, folder in zip((here, there), folders, strict=True):
        folder.mkdir()
        if held is there:
            held.load(RUN, folders[0], optimizer=True)
        held.save(RUN, folder, optimizer=True, gradients=True)
    for name in FILES:
        assert same(load_file(folders[1] / name), load_file(folders[0] / name))
    config = "adapter_config.json"
    assert (folders[1] / config).read_text() == (folders[0] / config).read_text()


@pytest.mark.parametrize("family", ["llama", "gemma3"])
@pytest.mark.parametrize(("first", "second"), [("mps", "cpu"), ("cpu", "mps")])
def test_c6_f5_all_parameters_resume_on_another_engine(
    first: str, second: str, family: str, model_folder: Callable[..., Path], tmp_path: Path
) -> None:
    """C4, C6, F5, O11: a whole model moves with gradient and moments, the other engine goes on as this one would, and
    saved there it is the same bits under the same names; so is what samplers get."""
    here, there = (full_run(model_folder(family), engine=engine) for engine in (first, second))
    forward_backward(here, ce(12, 20))
    here.optim_step(RUN, ADAM)
    forward_backward(here, ce(9, seed=2))
    one, two = tmp_path / "one", tmp_path / "two"
    for held, folder in ((here, one), (there, two)):
        if held is there:
            held.load(RUN, one, optimizer=True)
        folder.mkdir()
        held.save(RUN, folder, optimizer=True, gradients=True)
    for name in ("model.safetensors", *FILES[1:]):
        assert same(load_file(two / name), load_file(one / name))
    assert (two / "config.json").read_text() == (one / "config.json").read_text()
    assert load_file(two / "optimizer.safetensors")["t"] == 1
    payload = ce(12, 20, seed=3)
    for _ in range(2):
        for held in (here, there):
            held.optim_step(RUN, ADAM)
        losses = [forward_backward(held, payload).metrics["loss:sum"] for held in (here, there)]
        assert losses[1] == pytest.approx(losses[0], rel=1e-5)


def test_f3_f5_bf16_checkpoints_are_the_same_bits(model_folder: Callable[..., Path], tmp_path: Path) -> None:
    """F3, F5: masters that one engine has trained are rounded to the same bf16 by the other, for samplers too."""
    here, there = (full_run(model_folder("llama"), "bfloat16", engine=engine) for engine in ("cpu", "mps"))
    forward_backward(here, ce(12, 20))
    here.optim_step(RUN, ADAM)
    (tmp_path / "state").mkdir()
    here.save(RUN, tmp_path / "state", optimizer=True, gradients=False)
    there.load(RUN, tmp_path / "state", optimizer=True)
    stored: list[dict[str, bytes]] = []
    for name, held in (("one", here), ("two", there)):
        (tmp_path / name).mkdir()
        held.save(RUN, tmp_path / name, optimizer=False, gradients=False)
        with safe_open(tmp_path / name / "model.safetensors", framework="pt") as opened:
            stored.append({key: opened.get_tensor(key).view(torch.int16).numpy().tobytes() for key in opened.keys()})  # noqa: SIM118
    assert stored[0] == stored[1]
    lp = [forward(held, ce(15)).logprobs[0] for held in (here, there)]
    np.testing.assert_allclose(lp[1], lp[0], atol=0.2)


def test_a2_a4_fresh_adapters_are_the_same(model_folder: Callable[..., Path]) -> None:
    """A2, A4: the same seed makes the same adapter on either engine, bit for bit."""
    held = [open_trainer(engine, model_folder("llama")) for engine in ("cpu", "mps")]
    for one in held:
        one.create(RUN, SPEC)
    assert same(held[1].parameters(RUN), held[0].parameters(RUN))
    a = held[1].parameters(RUN)["model.layers.0.mlp.down_proj.lora_A"]
    assert 0.9 < np.abs(a).max() * a.shape[1] ** 0.5 <= 1

"""What autograd really keeps of transformers' layers, against what the memory plan of full runs counts with."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from openrl.backends.torch.full_memory import FullSizes, need
from openrl.backends.torch.full_model import FullModel
from openrl.backends.torch.model import open_model
from openrl.errors import OutOfMemory
from openrl.types import AdamParams
from support import tiny
from support.full import FULL, inside, training
from support.training import RUN, ce, forward_backward

SHAPE = {"hidden_size": 64, "intermediate_size": 192, "head_dim": 16}


def kept_bytes(model: FullModel, tokens: int, recomputed: int) -> int:
    """Bytes that a graph over so many tokens holds, other than weights."""
    weights = {p.untyped_storage().data_ptr() for p in model.working().values()}
    held: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            held[storage.data_ptr()] = storage.nbytes()
        return tensor

    ids = torch.from_numpy(np.arange(tokens)[None] % tiny.VOCAB)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        hidden = model.hidden(ids, recomputed)
    assert hidden.requires_grad
    return sum(held.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3"])
def test_the_plan_counts_what_autograd_keeps(family: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """Never less, so that a micro-batch fits, and not much more."""
    torch.set_num_threads(1)
    changes: dict[str, Any] = {**SHAPE, "max_position_embeddings": 512}
    folder = tiny.build(tmp_path / "m", family, **changes)
    base = open_model(folder, torch.device("cpu"), dtype)
    model = FullModel(folder, base)
    sizes = FullSizes.of(base.config.to_dict(), dtype.itemsize)
    for recomputed in (0, 3):
        grown = kept_bytes(model, 64, recomputed) - kept_bytes(model, 32, recomputed)
        counted = 32 * ((3 - recomputed) * sizes.kept + recomputed * sizes.input + sizes.passing)
        assert grown <= counted <= 3 * grown + 32 * sizes.passing


def test_the_numbers_of_a_known_model() -> None:
    """F3: 16 bytes a parameter in float32, 18 in bf16, and the rest."""
    config = {
        "num_hidden_layers": 30,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "vocab_size": 49152,
    }
    parameters = 134_515_008
    wide, narrow = (need(FullSizes.of(config, size), parameters) for size in (4, 2))
    assert wide.total - wide.rest == 16 * parameters
    assert narrow.total - narrow.rest == 18 * parameters
    narrow.check("m", narrow.total)
    with pytest.raises(OutOfMemory, match=r"all 134\.5 million parameters of m .* \(float32 weights 0\.50, "):
        narrow.check("m", narrow.total - 1)


@pytest.mark.parametrize(("dtype", "per_parameter"), [("float32", 16), ("bfloat16", 18)])
def test_every_engine_counts_the_same_for_a_runs_life(
    engine: str, dtype: str, per_parameter: int, model_folder: Callable[..., Path]
) -> None:
    """F3: what an engine adds is what a micro-batch takes, and a model beside the base is its weights."""
    full: Any = training(model_folder("llama"), dtype, engine=engine)._full  # type: ignore[attr-defined]
    found = full._engine.need()
    assert found.total - found.rest == per_parameter * found.parameters
    assert found.rest > 0


@pytest.mark.parametrize("keep", [True, False])
def test_mlx_passes_take_no_more_than_was_counted(keep: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The request's own gradient, what the layers keep on either way back, and gradients on their way."""
    mx = pytest.importorskip("mlx.core", reason="MLX is not installed")
    folder = tiny.build(tmp_path / "m", "llama", hidden_size=64, intermediate_size=256, head_dim=16)
    held = training(folder, engine="mps")
    held.create(RUN, FULL)
    model = inside(held).model
    plan = model.scorer.memory_plan
    monkeypatch.setattr(type(plan), "keeps", lambda *_: keep)
    for _ in range(2):
        before = mx.get_active_memory()
        mx.reset_peak_memory()
        forward_backward(held, ce(100, 100))
        peak = mx.get_peak_memory() - before
        assert peak <= 4 * model.state.size + plan.needed(2, 100, keep=keep) + plan.gradients() <= 2 * peak


def test_mlx_holds_no_more_than_was_counted(tmp_path: Path) -> None:
    """The peak of a step against 16 bytes a parameter and what is computed of one tensor: no second set of anything."""
    mx = pytest.importorskip("mlx.core", reason="MLX is not installed")
    folder = tiny.build(tmp_path / "m", "llama", hidden_size=256, intermediate_size=1024, head_dim=64)
    held = training(folder, engine="mps")
    before = mx.get_active_memory()
    held.create(RUN, FULL)
    model = inside(held).model
    parameters = model.state.size
    for seed in range(2):
        forward_backward(held, ce(8, seed=seed))
        mx.reset_peak_memory()
        held.optim_step(RUN, AdamParams(grad_clip_norm=1.0))
        assert mx.get_peak_memory() - before < 16.3 * parameters + model.scorer.memory_plan.step()
    assert mx.get_active_memory() - before < 12.3 * parameters  # the gradient is gone

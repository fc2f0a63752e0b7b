"""What autograd really keeps of transformers' layers, against what the memory plan of full runs counts with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from openrl.backends.torch.full_memory import FullSizes, need
from openrl.backends.torch.full_model import FullModel
from openrl.backends.torch.model import open_model
from openrl.errors import OutOfMemory
from support import tiny

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

"""The sampler on PyTorch: `openrl.backends.common.sampler` over a `CausalLM`."""

from __future__ import annotations

from pathlib import Path

import torch

from openrl.backends.common import sampler
from openrl.backends.common.adapter_cache import AdapterLoader
from openrl.backends.common.prefix_cache import reusable
from openrl.backends.torch.adapter_files import load_adapter
from openrl.backends.torch.model import CausalLM
from openrl.backends.torch.packed import pack_head
from openrl.backends.torch.runner import Runner

# Prompt tokens that one turn computes: a turn should end soon, so that decoding and training get theirs.
_PREFILL_TOKENS_CPU = 512
_PREFILL_TOKENS_GPU = 8192


class Sampler(sampler.Sampler):
    """Implements `SampleBackend` on a `CausalLM`. `folder` is the model's, for its tokenizer.

    `load` reads adapters (default: PEFT folders), which are frozen here; `prefill_tokens` bounds the prompt tokens of
    one turn; `prefix_cache_tokens` is how many tokens of earlier requests are kept beside those in hand.
    """

    def __init__(
        self,
        model: CausalLM,
        folder: Path,
        max_rows: int,
        max_kv_tokens: int,
        *,
        load: AdapterLoader | None = None,
        prefill_tokens: int | None = None,
        prefix_cache_tokens: int = 16384,
    ) -> None:
        usual = _PREFILL_TOKENS_CPU if model.device.type == "cpu" else _PREFILL_TOKENS_GPU
        read = load or (lambda ref: load_adapter(ref.folder, model.shapes, model.device))
        pack_head(model)
        limits = sampler.Limits(
            vocab=model.vocab_size,
            context=model.config.max_position_embeddings,
            rows=max_rows,
            kv_tokens=max_kv_tokens,
            prefill=prefill_tokens or usual,
            stored=prefix_cache_tokens if reusable(model.config) else 0,
            reach=_reach_of(model),
            coarse=model.dtype is not torch.float32,
        )
        runner = Runner(model, max_rows, max_kv_tokens)
        super().__init__(runner, limits, folder, model.eos_ids, lambda ref: read(ref).freeze(model.dtype))


def _reach_of(model: CausalLM) -> float:
    """After how many tokens attending to them costs as much as a token's other sums, whose kernels are faster."""
    return model.parameters / (3 * model.config.hidden_size * model.config.num_hidden_layers)

"""The sampler on MLX: `openrl.backends.common.sampler` over an `MlxModel`.

mlx-lm has a batch generator, which cannot give what is asked here: adapters by row and rows of one adapter side by
side, scores of prompts, a bound on its cache, prompts that go on from any stored beginning also where layers have a
window, and draws of a whole batch at once whose rows differ in their seeds. Its models are used as they are, with
caches of our own.
"""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx

from openrl.backends.common import sampler
from openrl.backends.common.adapter_cache import AdapterLoader
from openrl.backends.mps.memory import has_gpu
from openrl.backends.mps.model import MlxModel
from openrl.backends.mps.sample_adapters import load_adapter
from openrl.backends.mps.sample_runner import Runner

# Prompt tokens that one turn computes: a turn should end soon, so that decoding and training get theirs.
_PREFILL_TOKENS_CPU = 512
_PREFILL_TOKENS_GPU = 2048


class Sampler(sampler.Sampler):
    """Implements `SampleBackend` on an `MlxModel`. `folder` is the model's, for its tokenizer.

    `load` reads adapters (default: PEFT folders), which are frozen here; `prefill_tokens` bounds the prompt tokens of
    one turn; `prefix_cache_tokens` is how many tokens of earlier requests are kept beside those in hand.
    """

    def __init__(
        self,
        model: MlxModel,
        folder: Path,
        max_rows: int,
        max_kv_tokens: int,
        *,
        load: AdapterLoader | None = None,
        prefill_tokens: int | None = None,
        prefix_cache_tokens: int = 16384,
    ) -> None:
        usual = _PREFILL_TOKENS_GPU if has_gpu() else _PREFILL_TOKENS_CPU
        read = load or (lambda ref: load_adapter(ref.folder, model.shapes))
        limits = sampler.Limits(
            vocab=model.vocab_size,
            context=model.max_context,
            rows=max_rows,
            kv_tokens=max_kv_tokens,
            prefill=prefill_tokens or usual,
            stored=prefix_cache_tokens,
            reach=_reach_of(model),
            coarse=model.dtype != mx.float32,
        )
        runner = Runner(model, max_rows, max_kv_tokens)
        super().__init__(runner, limits, folder, model.eos_ids, lambda ref: read(ref).freeze(model.dtype))


def _reach_of(model: MlxModel) -> float:
    """After how many tokens attending to them costs as much as a token's other sums, whose kernels are faster."""
    return model.parameters / (3 * model.config["hidden_size"] * model.config["num_hidden_layers"])

"""The backbone as the sampler calls it: fused where the model's layout is known, else transformers' own modules."""

from __future__ import annotations

import inspect
import logging
from typing import Any, Protocol

from torch import Tensor

from openrl.backends.torch.kv import DecodeView, KVCache, View
from openrl.backends.torch.masks import Mask
from openrl.backends.torch.model import CausalLM
from openrl.backends.torch.sample_fused import FusedBackbone
from openrl.backends.torch.sample_layers import UnknownLayout
from openrl.errors import ModelError

log = logging.getLogger(__name__)


class Backbone(Protocol):
    """Last hidden states in the compute dtype, of rows whose adapters the model's routing names."""

    def prompt(self, ids: Tensor, positions: Tensor, mask: Mask, view: View) -> Tensor:
        """[rows, tokens, H] of int64 `ids` [rows, tokens] at `positions` ([rows, tokens] or, the same for all,
        [1, tokens]). `view` takes keys and values and says what is attended over."""
        ...

    def step(self, ids: Tensor, positions: Tensor, cache: KVCache, columns: int, mask: Mask) -> Tensor:
        """[N, H] of one token for each of the first N slots: int64 `ids` and `positions` [N]. The mask hides what must
        not be seen of the first `columns` columns."""
        ...


def backbone_of(model: CausalLM) -> Backbone:
    """The fastest backbone of a model; logs a warning where that is not the fused one. Raises `ModelError` where
    transformers' modules would leave adapters out, which they know nothing of in stacks of experts."""
    try:
        return FusedBackbone(model)
    except UnknownLayout as error:
        if model.is_mixture:
            raise ModelError(f"a mixture of experts of an unknown layout cannot be sampled: {error}.") from error
        log.warning("sampling runs transformers' own modules, which are slower: %s is not known here", error)
        return PlainBackbone(model)


class PlainBackbone:
    """transformers' own modules."""

    def __init__(self, model: CausalLM) -> None:
        self._model = model
        self._cache_argument = _cache_argument(model)

    def prompt(self, ids: Tensor, positions: Tensor, mask: Mask, view: View) -> Tensor:
        """See `Backbone`."""
        inputs: dict[str, Any] = {"attention_mask": mask, "use_cache": True, self._cache_argument: view}
        return self._model.hidden(input_ids=ids, position_ids=positions, **inputs)

    def step(self, ids: Tensor, positions: Tensor, cache: KVCache, columns: int, mask: Mask) -> Tensor:
        """See `Backbone`."""
        view = DecodeView(cache, positions, columns)
        return self.prompt(ids[:, None], positions[:, None], mask, view)[:, 0]


def _cache_argument(model: CausalLM) -> str:
    """Newer transformers call the backbone's cache `cache`, older ones `past_key_values`."""
    parameters = inspect.signature(type(model.backbone).forward).parameters
    return "cache" if "cache" in parameters else "past_key_values"

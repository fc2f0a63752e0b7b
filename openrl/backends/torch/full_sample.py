"""Memory for whole models that are sampled beside the base (`openrl.backends.common.whole_models`)."""

from __future__ import annotations

import torch

from openrl.backends.torch.memory import free_memory, is_out_of_memory
from openrl.backends.torch.model import CausalLM


class TorchRoom:
    """Implements `Room` for models of the shape of `model`, on its device."""

    def __init__(self, model: CausalLM) -> None:
        self._model = model

    def needed(self) -> int:
        """Bytes of a model once it is open: its weights, and the head's float32 copy where there is one."""
        wide = 0 if self._model.head_wide is self._model.head else self._model.head_wide.nbytes
        return self._model.parameters * self._model.dtype.itemsize + wide

    def free(self) -> int:
        """Bytes that may still be taken."""
        return free_memory(self._model.device)

    def release(self) -> None:
        """Give back what PyTorch keeps for reuse."""
        if self._model.device.type == "cuda":
            torch.cuda.empty_cache()

    def is_out_of_memory(self, error: RuntimeError | MemoryError) -> bool:
        """Whether an allocation that failed is behind an error."""
        return is_out_of_memory(error)

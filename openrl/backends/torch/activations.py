"""The gate's activation in training, there and back."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from openrl.errors import ModelError

_SILU, _GELU = torch.ops.aten.silu.out, torch.ops.aten.gelu.out
_SILU_BACK, _GELU_BACK = torch.ops.aten.silu_backward.grad_input, torch.ops.aten.gelu_backward.grad_input
# Of transformers' names, those that the supported families use.
_GELU_KINDS = {"gelu": "none", "gelu_new": "tanh", "gelu_pytorch_tanh": "tanh"}


@dataclass(frozen=True, slots=True)
class Activation:
    """SiLU, or GELU in the form (`none`: exact, or `tanh`) that `gelu` says."""

    gelu: str | None

    @classmethod
    def of(cls, name: str) -> Activation:
        """By transformers' name. Raises `ModelError` for one that is not known."""
        if name in ("silu", "swish"):
            return cls(None)
        if name not in _GELU_KINDS:
            known = ", ".join(sorted(["silu", "swish", *_GELU_KINDS]))
            raise ModelError(f"activation {name!r} is not supported by the PyTorch backend.", f"Supported: {known}.")
        return cls(_GELU_KINDS[name])

    def run(self, x: Tensor, out: Tensor) -> Tensor:
        """The activation of x into `out`."""
        if self.gelu is None:
            return _SILU(x, out=out)
        return _GELU(x, approximate=self.gelu, out=out)

    def back(self, dy: Tensor, x: Tensor, out: Tensor) -> Tensor:
        """dL/dx into `out`, which may be x."""
        if self.gelu is None:
            return _SILU_BACK(dy, x, grad_input=out)
        return _GELU_BACK(dy, x, approximate=self.gelu, grad_input=out)

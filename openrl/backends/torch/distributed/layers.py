"""The matrices of a decoder layer that are spread over the ranks: of linear layers, and of a mixture's experts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from openrl.backends.torch.distributed.windows import Spread
from openrl.backends.torch.lora import LoraLinear
from openrl.backends.torch.weights import HELD
from openrl.errors import ModelError

_ATTENTION = (("q_proj", "k_proj", "v_proj"), ("o_proj",))
_MLP = (("gate_proj", "up_proj"), ("down_proj",))
_EXPERTS = ("gate_up_proj", "down_proj")


@dataclass(frozen=True, slots=True)
class LinearStack:
    """Layers whose weights are one joint product's."""

    linears: Sequence[LoraLinear]

    @property
    def matrices(self) -> list[Tensor]:
        """[out, in] each."""
        return [linear.base.weight for linear in self.linears]

    def hold(self, view: Tensor, visit: Callable[[], None], *, own: bool) -> None:
        """Train with a window's view [sum of out, in], and where it is not `own` sample with it, too."""
        bases: list[Any] = [linear.base for linear in self.linears]
        setattr(bases[0], HELD, Spread(view, visit))
        start = 0
        for base in () if own else bases:
            stop = start + base.out_features
            base.weight = nn.Parameter(view[start:stop], requires_grad=False)
            start = stop


@dataclass(frozen=True, slots=True)
class ExpertStack:
    """One of the two tensors [experts, out, in] of a mixture."""

    experts: Any
    name: str

    @property
    def matrices(self) -> list[Tensor]:
        """All experts' as one, [experts * out, in]."""
        stack: Tensor = getattr(self.experts, self.name)
        return [stack.detach().flatten(0, 1)]

    def hold(self, view: Tensor, visit: Callable[[], None], *, own: bool) -> None:
        """See `LinearStack.hold`."""
        whole = view.view(getattr(self.experts, self.name).shape)
        held: dict[str, list[Spread]] = getattr(self.experts, HELD, {})
        setattr(self.experts, HELD, {**held, self.name: [Spread(expert, visit) for expert in whole]})
        if not own:
            setattr(self.experts, self.name, nn.Parameter(whole, requires_grad=False))


Stack = LinearStack | ExpertStack


def stacks_of(layer: Any) -> list[Stack]:
    """What is spread of a decoder layer. Raises `ModelError` for one that is not known here."""
    stacks: list[Stack] = [_linears(layer.self_attn, names) for names in _ATTENTION]
    if hasattr(layer.mlp, "experts"):
        return [*stacks, *(ExpertStack(layer.mlp.experts, name) for name in _EXPERTS)]
    return [*stacks, *(_linears(layer.mlp, names) for names in _MLP)]


def _linears(module: Any, names: Sequence[str]) -> LinearStack:
    linears = [getattr(module, name) for name in names]
    if not all(isinstance(linear, LoraLinear) for linear in linears):
        raise ModelError("this model's layers are not as they would have to be to be spread over devices.")
    return LinearStack(linears)

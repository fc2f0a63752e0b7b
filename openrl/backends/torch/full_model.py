"""A whole model to train: transformers' own module, whose parameters are views into one buffer (F3, F4).

Where the engine computes in float32, these are the float32 masters themselves. In bf16 they are a working copy of
them, refreshed after each step; the residual stream stays float32 all the same, as the sampler has it (S14). The
module is this run's own: adapters and the base sampler go on with theirs.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM

from openrl.backends.torch.lora import Routing
from openrl.backends.torch.model import CausalLM, attention_of
from openrl.backends.torch.trainable import State
from openrl.types import AdamParams, OptimOutput


class FullModel:
    """One run's model on a device. `state` has the masters, `scorer` is what the output head computes with."""

    def __init__(self, folder: Path, base: CausalLM) -> None:
        """Begins with the weights in `folder`, in which `base` has its own."""
        attention = attention_of(base.config)
        module: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation=attention)
        _open_up(module)
        self.device, self.dtype = base.device, base.dtype
        self._parameters: dict[str, nn.Parameter] = dict(module.named_parameters())  # a tied head once (F4)
        self.state = State(_moved(self._parameters, base.device), {n: p.shape for n, p in self._parameters.items()})
        self._working = self.state.theta if base.dtype is torch.float32 else self.state.theta.to(base.dtype)
        self._attach()
        module.to(base.device)  # buffers: parameters are there already
        self._backbone: Any = module.model
        self.head_name = next(n for n, p in self._parameters.items() if p is module.lm_head.weight)
        head = module.lm_head.weight.detach()
        self.scorer = CausalLM(
            backbone=module.model,
            head=head,
            head_wide=head,
            softcap=base.softcap,
            routing=Routing(),
            shapes={},
            config=module.config,
            eos_ids=frozenset(),
            parameters=self.state.theta.numel(),
            dtype=base.dtype,
            device=base.device,
        )

    # ---- weights ----

    def refresh(self) -> None:
        """The masters have changed: bring the working copy up to them."""
        if self._working is not self.state.theta:
            self._working.copy_(self.state.theta)

    def step(self, adam: AdamParams) -> OptimOutput:
        """One AdamW step over all parameters as one group (F2)."""
        try:
            return self.state.step(adam)
        finally:
            self.refresh()

    def working(self) -> dict[str, Tensor]:
        """The weights as they are computed with, by name."""
        return self.state.views(self._working)

    def _attach(self) -> None:
        for parameter, view in zip(self._parameters.values(), self.working().values(), strict=True):
            parameter.data = view
            parameter.requires_grad_()

    # ---- forward and back ----

    @contextmanager
    def scoring(self) -> Generator[None]:
        """For the time of a pass: the float32 copy of the head that a CPU multiplies with."""
        if self.device.type != "cuda":
            self.scorer.head_wide = self.scorer.head.float()
        try:
            yield
        finally:
            self.scorer.head_wide = self.scorer.head

    def hidden(self, ids: Tensor, recomputed: int) -> Tensor:
        """Last hidden states [rows, tokens, H] in the compute dtype, of right-padded int64 ids [rows, tokens].

        No mask: real positions never see the padding behind them (B2). The first `recomputed` layers keep only their
        input for the way back.
        """
        for index, layer in enumerate(self._backbone.layers):
            layer.gradient_checkpointing = index < recomputed
        narrow = self.dtype is not torch.float32
        with torch.autocast(self.device.type, self.dtype if narrow else None, enabled=narrow, cache_enabled=False):
            embedded = self._backbone.embed_tokens(ids).float()
            output = self._backbone(inputs_embeds=embedded, use_cache=False, return_dict=True)
        return output.last_hidden_state.to(self.dtype)

    @contextmanager
    def adding_to(self, into: dict[str, Tensor]) -> Generator[None]:
        """Within the block each parameter's gradient is added to float32 `into` as it comes, and let go of at once."""
        hooks = [
            parameter.register_post_accumulate_grad_hook(_adder(into[name]))
            for name, parameter in self._parameters.items()
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
            for parameter in self._parameters.values():
                parameter.grad = None


def parameter_shapes(config: Any) -> dict[str, tuple[int, ...]]:
    """The parameters of a model with this config, without making it."""
    with torch.device("meta"):
        module: nn.Module = AutoModelForCausalLM.from_config(config)
    return {name: tuple(parameter.shape) for name, parameter in module.named_parameters()}


def _open_up(module: Any) -> None:
    """Make a module train as a run must: without dropout (G5), layers that can be computed again, and no row of the
    embeddings that never gets a gradient, as transformers has it for the padding token."""
    module.eval()
    module.model.embed_tokens.padding_idx = None
    for layer in module.model.layers:
        layer.training = True  # without which it cannot be computed again; dropout is in its parts alone
        layer._gradient_checkpointing_func = partial(checkpoint, use_reentrant=False, preserve_rng_state=False)


def _moved(parameters: dict[str, nn.Parameter], device: torch.device) -> Tensor:
    """All parameters end to end on a device; each gives its own memory up as it is copied."""
    theta = torch.empty(sum(p.numel() for p in parameters.values()), dtype=torch.float32, device=device)
    start = 0
    for parameter in parameters.values():
        stop = start + parameter.numel()
        theta[start:stop].copy_(parameter.detach().reshape(-1))
        parameter.data = theta[start:stop].view(parameter.shape)
        start = stop
    return theta


def _adder(into: Tensor) -> Callable[[Tensor], None]:
    def add(parameter: Tensor) -> None:
        if parameter.grad is not None:
            into.add_(parameter.grad)
            parameter.grad = None

    return add

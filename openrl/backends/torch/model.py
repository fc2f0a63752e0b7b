"""A frozen causal language model from a Hugging Face folder, opened up for training and sampling.

The backbone is transformers' own module, so that every family computes what its authors meant; the output head is
kept apart in float32, so that logprobs never pass through bf16 logits (L6) and full logits need not be held.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

from openrl.backends.common.lora import LoraShape
from openrl.backends.torch import nf4
from openrl.backends.torch.lora import LoraLinear, Routing, Segment, add_lora
from openrl.backends.torch.scratch import Scratch
from openrl.backends.torch.weights import Linear
from openrl.checkpoints.peft import ATTN_MODULES, HEAD_NAME, MLP_MODULES, expert_shapes
from openrl.errors import ModelError

# Families whose head is a plain product (with optional soft-capping) and whose layers carry the usual names: checked
# by the contract tests. Others may scale logits or embed differently, so they are refused rather than guessed.
FAMILIES = frozenset({"llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "gemma2", "gemma3_text"})


@dataclass(slots=True)
class CausalLM:
    """The opened model. `softcap` is the family's logit cap or None.

    The output head is [V, H] in the compute dtype. Where the device cannot multiply that into float32 results,
    `head_wide` is its float32 copy, else the same tensor.
    """

    backbone: nn.Module
    head: Tensor
    head_wide: Tensor
    softcap: float | None
    routing: Routing
    shapes: dict[str, LoraShape]
    config: Any
    eos_ids: frozenset[int]
    parameters: int
    dtype: torch.dtype
    device: torch.device
    project_packed: Callable[[Tensor], Tensor] | None = None  # a faster product with the head, where there is one
    quantize: str = "none"  # how the layers' weights are held: "none" (in `dtype`), "nf4"
    fetch: Callable[[int], None] | None = (
        None  # before sampling runs a layer, where its weights are elsewhere till then
    )

    @property
    def vocab_size(self) -> int:
        return self.head.shape[0]

    @property
    def is_mixture(self) -> bool:
        """Whether layers have experts."""
        return any(shape.stack for shape in self.shapes.values())

    def hidden(self, **inputs: Any) -> Tensor:
        """Last hidden states [rows, tokens, H]; keyword arguments as transformers' backbone takes them."""
        return self.backbone(return_dict=True, **inputs).last_hidden_state

    def logits(self, hidden: Tensor, segments: tuple[Segment, ...]) -> Tensor:
        """Float32 logits [M, V] of hidden states [M, H], whose rows `segments` assign to adapters. Without autograd:
        training goes through `openrl.backends.torch.head`."""
        return self.cap(add_lora(self.project(hidden), hidden.float(), HEAD_NAME, segments))

    def project(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """hidden [M, H] times the head, accumulated and returned in float32 [M, V] (L6)."""
        if self.head_wide is self.head and self.dtype is not torch.float32:
            return torch.mm(hidden, self.head.t(), out_dtype=torch.float32, out=out)
        if self.project_packed is not None and out is None:
            return self.project_packed(hidden.float())
        # Values that came from bf16 lose nothing when the CPU multiplies them as bf16; the sum stays float32. That pays
        # for a single row already, although the weights are converted each time.
        with _cpu_products("bf16" if self.dtype is torch.bfloat16 else "ieee"):
            return torch.mm(hidden.float(), self.head_wide.t(), out=out)

    def cap(self, z: Tensor) -> Tensor:
        """The family's soft-capping, identity where it has none."""
        return z if self.softcap is None else self.softcap * torch.tanh(z / self.softcap)


def open_model(
    folder: Path, device: torch.device, dtype: torch.dtype, config: Any = None, *, quantize: str = "none"
) -> CausalLM:
    """Load a folder, freeze it and wrap its linear layers. Raises `ModelError` for a family that is not supported.

    `config` is used in place of the folder's own, for weights whose folder came from elsewhere. With `quantize`
    "nf4" the linear layers' weights are held in four bits.
    """
    config = config or AutoConfig.from_pretrained(folder)
    if config.model_type not in FAMILIES:
        raise ModelError(
            f"model family {config.model_type!r} is not supported by the PyTorch backend.",
            f"Supported: {', '.join(sorted(FAMILIES))}.",
        )
    return open_up(_load(folder, config, device, dtype, quantize), folder, device, dtype, quantize)


def open_up(model: Any, folder: Path, device: torch.device, dtype: torch.dtype, quantize: str = "none") -> CausalLM:
    """Freeze a module of transformers, made from `folder`, and wrap its linear layers."""
    config = model.config
    model.eval().requires_grad_(False)
    parameters = nf4.parameters(model)  # a tied head counts once
    routing = Routing()
    shapes = lora_shapes(model)
    _wrap(model, routing, dtype)
    head = model.lm_head.weight.detach()
    return CausalLM(
        backbone=model.model,
        head=head,
        head_wide=head if device.type == "cuda" else head.float(),
        softcap=getattr(config, "final_logit_softcapping", None),
        routing=routing,
        shapes=shapes,
        config=config,
        eos_ids=_eos_ids(folder, config),
        parameters=parameters,
        dtype=dtype,
        device=device,
        quantize=quantize,
    )


def _load(folder: Path, config: Any, device: torch.device, dtype: torch.dtype, quantize: str) -> Any:
    attention = attention_of(config)
    if quantize == "none":
        model: Any = AutoModelForCausalLM.from_pretrained(
            folder, config=config, dtype=dtype, attn_implementation=attention
        )
        return model.to(device)
    if getattr(config, "num_experts", None):
        raise ModelError(
            f"engine.quantize {quantize!r} is for dense models; {config.model_type!r} is a mixture of experts.",
            "Leave --quantize away.",
        )
    extra = nf4.loading(dtype, device)
    return AutoModelForCausalLM.from_pretrained(
        folder, config=config, dtype=dtype, attn_implementation=attention, **extra
    )


def attention_of(config: Any) -> str:
    """transformers' name for how a family attends: the fused kernels cannot cap scores softly, as Gemma 2 does."""
    return "eager" if config.model_type == "gemma2" else "sdpa"


@contextmanager
def _cpu_products(precision: str) -> Generator[None]:
    """How oneDNN multiplies float32 matrices within the block: as float32 ("ieee") or from bf16 copies ("bf16")."""
    products: Any = torch.backends.mkldnn
    before = products.matmul.fp32_precision
    products.matmul.fp32_precision = precision
    try:
        yield
    finally:
        products.matmul.fp32_precision = before


def lora_shapes(model: nn.Module) -> dict[str, LoraShape]:
    """Layers that can carry an adapter (4.2), by name and in the model's order, the head last. Experts are stacks
    beside whose module there is no layer of that name (A10); routers are not trained."""
    leaves = (*ATTN_MODULES, *MLP_MODULES, HEAD_NAME)
    shapes: dict[str, LoraShape] = {}
    for name, m in model.named_modules():
        leaf = name.rpartition(".")[2]
        if isinstance(m, nn.Linear) and leaf in leaves:
            shapes[name] = LoraShape(m.in_features, m.out_features)
        elif leaf == "experts":
            experts, hidden, inner = m.get_parameter("down_proj").shape
            shapes |= {f"{name}.{stack}": shape for stack, shape in expert_shapes(experts, hidden, inner).items()}
    return shapes


def _wrap(model: nn.Module, routing: Routing, dtype: torch.dtype) -> None:
    """Replace attention and MLP projections by `LoraLinear`. The head is not called as a module at all."""
    dense: Scratch | None = None  # where weights that are held in four bits become whole, one at a time
    for name, linear in list(model.named_modules()):
        parent_name, _, leaf = name.rpartition(".")
        if isinstance(linear, nn.Linear) and leaf in (*ATTN_MODULES, *MLP_MODULES):
            base: Linear = linear
            if nf4.is_quantised(linear):
                dense = dense or Scratch(linear.weight.device)
                base = nf4.Nf4Linear(linear, dtype, dense)
            setattr(model.get_submodule(parent_name), leaf, LoraLinear(base, name, routing))


def _eos_ids(folder: Path, config: Any) -> frozenset[int]:
    """End-of-sequence ids: of the generation config where there is one, else of the model config."""
    eos = config.eos_token_id
    if (folder / "generation_config.json").exists():
        eos = GenerationConfig.from_pretrained(folder).eos_token_id or eos
    if eos is None:
        return frozenset()
    return frozenset([eos] if isinstance(eos, int) else eos)

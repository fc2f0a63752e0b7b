"""What sampling computes with, read out of transformers' modules: weights, norms and rotary angles of each layer.

Projections that share an input become one product. Only layouts that are known in every part are read; anything else
raises `UnknownLayout`, and the sampler then runs transformers' own modules.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from openrl.backends.torch.experts import read_mixture
from openrl.backends.torch.lora import LoraLinear
from openrl.backends.torch.model import CausalLM
from openrl.backends.torch.nf4 import Nf4Stack
from openrl.backends.torch.packed import Packing, Product, made, packing_for, product
from openrl.backends.torch.sample_experts import Experts
from openrl.backends.torch.weights import Linear, in_four_bits

_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
_MLP = ("gate_proj", "up_proj", "down_proj")
_PLAIN_NORMS = ("input_layernorm", "post_attention_layernorm")
_SANDWICH_NORMS = (*_PLAIN_NORMS, "pre_feedforward_layernorm", "post_feedforward_layernorm")
# Families whose norms multiply by 1 + weight, and those that multiply by the weight itself.
_OFFSET_NORMS = frozenset({"gemma2", "gemma3_text"})
_DIRECT_NORMS = frozenset({"llama", "mistral", "qwen2", "qwen3", "qwen3_moe"})


class UnknownLayout(Exception):
    """A model whose modules are not as expected; the message says what is different."""


@dataclass(frozen=True, slots=True)
class Norm:
    """RMS norm over the last dimension n: x / sqrt(|x|^2 + n eps) * weight, with sqrt(n) already in `weight`.

    `weight` float32 [..., n], `floor` float32 [] = sqrt(n eps).
    """

    weight: Tensor
    floor: Tensor

    def __call__(self, x: Tensor) -> Tensor:
        """A normed copy of float32 x [..., n]."""
        return x.div(torch.linalg.vector_norm(x, dim=-1, keepdim=True).hypot_(self.floor)).mul_(self.weight)


@dataclass(frozen=True, slots=True)
class Part:
    """A projection in a joint product: its name, as adapters know it, and the columns that are its output."""

    name: str
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class JointProduct:
    """Projections of one input as one product."""

    parts: tuple[Part, ...]
    run: Product


@dataclass(frozen=True, slots=True)
class Dense:
    """A layer's MLP where there is but one."""

    gate_up: JointProduct
    activation: Callable[[Tensor], Tensor]
    down: JointProduct


@dataclass(frozen=True, slots=True)
class Layer:
    """One decoder layer. Norms that a family lacks are None.

    `kind` chooses mask and angles. `head_norm` is that of queries and keys, [query and key heads, head_dim].
    """

    kind: str
    attention_norm: Norm
    qkv: JointProduct
    head_norm: Norm | None
    out: JointProduct
    after_attention: Norm | None
    mlp_norm: Norm
    mlp: Dense | Experts
    after_mlp: Norm | None


@dataclass(frozen=True, slots=True)
class Layers:
    """All of a backbone. `heads` and `kv_heads` count query and key heads, `scale` is that of attention scores, which
    `softcap` bounds softly."""

    embed: Callable[[Tensor], Tensor]
    layers: tuple[Layer, ...]
    norm: Norm
    angles: Callable[[Tensor], dict[str, tuple[Tensor, Tensor]]]
    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    softcap: float | None
    packing: Packing


def read_layers(model: CausalLM) -> Layers:
    """Read a model's backbone. Raises `UnknownLayout`. Where the CPU gains from it, products use packed copies."""
    return _Reader(model).read()


class _Reader:
    def __init__(self, model: CausalLM) -> None:
        self._config = model.config
        self._backbone: Any = model.backbone
        linears = [m.base for m in model.backbone.modules() if isinstance(m, LoraLinear)]
        # What is held in four bits has to stay so: a packed copy would be four times as large.
        quantised = in_four_bits(linears)
        self._packing = Packing.NONE if quantised else packing_for(model, [linear.weight for linear in linears])
        family = model.config.model_type
        if family not in _OFFSET_NORMS | _DIRECT_NORMS:
            raise UnknownLayout(f"family {family!r}")
        self._offset = family in _OFFSET_NORMS
        self._thin = torch.float32 if model.device.type == "cpu" else model.dtype

    def read(self) -> Layers:
        backbone = self._backbone
        _expect(backbone, ("embed_tokens", "layers", "norm", "rotary_emb"))
        first = backbone.layers[0].self_attn
        heads, kv_heads = self._config.num_attention_heads, self._config.num_key_value_heads
        kinds: Sequence[str] = getattr(self._config, "layer_types", None) or [""] * len(backbone.layers)
        layers = tuple(self._layer(*each) for each in zip(range(len(kinds)), backbone.layers, kinds, strict=True))
        return Layers(
            embed=backbone.embed_tokens,
            layers=layers,
            norm=self._norm(backbone.norm),
            angles=_angles(backbone.rotary_emb, sorted(set(kinds)), first.head_dim),
            heads=heads,
            kv_heads=kv_heads,
            head_dim=first.head_dim,
            scale=first.scaling,
            softcap=getattr(first, "attn_logit_softcapping", None),
            packing=self._packing,
        )

    def _layer(self, index: int, layer: Any, kind: str) -> Layer:
        norms = {name for name, _ in layer.named_children()} - {"self_attn", "mlp"}
        if norms not in ({*_PLAIN_NORMS}, {*_SANDWICH_NORMS}):
            raise UnknownLayout(f"a layer with {', '.join(sorted(norms))}")
        sandwich = norms == {*_SANDWICH_NORMS}
        attention = layer.self_attn
        head_norms = [m for m in ("q_norm", "k_norm") if hasattr(attention, m)]
        _expect(attention, (*_ATTENTION, *head_norms))
        after = layer.post_attention_layernorm
        return Layer(
            kind=kind,
            attention_norm=self._norm(layer.input_layernorm),
            qkv=self._joint([attention.q_proj, attention.k_proj, attention.v_proj]),
            head_norm=self._head_norm(attention) if head_norms else None,
            out=self._joint([attention.o_proj]),
            after_attention=self._norm(after) if sandwich else None,
            mlp_norm=self._norm(layer.pre_feedforward_layernorm if sandwich else after),
            mlp=self._mlp(layer.mlp, f"model.layers.{index}.mlp"),
            after_mlp=self._norm(layer.post_feedforward_layernorm) if sandwich else None,
        )

    def _mlp(self, mlp: Any, name: str) -> Dense | Experts:
        if hasattr(mlp, "experts"):
            return Experts(read_mixture(mlp, f"{name}.experts"), mlp.experts.act_fn, self._thin)
        _expect(mlp, (*_MLP, "act_fn"))
        return Dense(self._joint([mlp.gate_proj, mlp.up_proj]), mlp.act_fn, self._joint([mlp.down_proj]))

    def _norm(self, norm: Any) -> Norm:
        return _scaled(self._norm_weight(norm), _epsilon(norm))

    def _norm_weight(self, norm: Any) -> Tensor:
        if not type(norm).__name__.endswith("RMSNorm"):
            raise UnknownLayout(f"a norm of type {type(norm).__name__}")
        weight: Tensor = norm.weight.detach().float()
        return weight + 1.0 if self._offset else weight

    def _head_norm(self, attention: Any) -> Norm:
        """The norms of queries and keys as one over all their heads."""
        query, key = self._norm_weight(attention.q_norm), self._norm_weight(attention.k_norm)
        if _epsilon(attention.q_norm) != _epsilon(attention.k_norm):
            raise UnknownLayout("norms of queries and keys with different epsilons")
        heads, kv_heads = self._config.num_attention_heads, self._config.num_key_value_heads
        return _scaled(torch.cat([query.expand(heads, -1), key.expand(kv_heads, -1)]), _epsilon(attention.q_norm))

    def _joint(self, projections: Sequence[Any]) -> JointProduct:
        bases: list[Linear] = []
        parts: list[Part] = []
        for projection in projections:
            if not isinstance(projection, LoraLinear):
                raise UnknownLayout(f"a projection of type {type(projection).__name__}")
            start = parts[-1].stop if parts else 0
            parts.append(Part(projection.name, start, start + projection.base.out_features))
            bases.append(projection.base)
        return JointProduct(tuple(parts), self._product(bases, parts))

    def _product(self, bases: Sequence[Linear], parts: Sequence[Part]) -> Product:
        if quantised := in_four_bits(bases):
            return made(Nf4Stack(quantised), _joined_bias(bases))
        plain = [base for base in bases if isinstance(base, nn.Linear)]
        keep = self._packing is Packing.NONE
        weight = joined([base.weight for base in plain], keep=keep)
        if keep:
            for base, part in zip(plain, parts, strict=True):
                base.weight = nn.Parameter(weight[part.start : part.stop], requires_grad=False)
        return product(weight, _joined_bias(bases), self._packing)


def joined(weights: Sequence[Tensor], *, keep: bool) -> Tensor:
    """Weights [out, in] one above the other. With `keep`, those that already lie so are not copied."""
    first = weights[0]
    if len(weights) == 1:
        return first.detach()
    if keep and _adjacent(weights):
        return first.detach().as_strided((sum(len(w) for w in weights), first.shape[1]), first.stride())
    return torch.cat([w.detach() for w in weights])


def _adjacent(weights: Sequence[Tensor]) -> bool:
    """Whether each begins where the one before ends, in one piece of memory."""
    same = all(w.untyped_storage().data_ptr() == weights[0].untyped_storage().data_ptr() for w in weights)
    ends = [w.storage_offset() + w.numel() for w in weights]
    return same and all(
        w.is_contiguous() and w.storage_offset() == end for w, end in zip(weights[1:], ends, strict=False)
    )


def _joined_bias(linears: Sequence[Linear]) -> Tensor | None:
    biases: list[Tensor | None] = [linear.bias for linear in linears]
    if all(bias is None for bias in biases):
        return None
    given = next(bias for bias in biases if bias is not None)
    zeros = [given.new_zeros(linear.out_features) for linear in linears]
    return torch.cat([zero if bias is None else bias.detach() for bias, zero in zip(biases, zeros, strict=True)])


def _angles(rotary: Any, kinds: Sequence[str], head_dim: int) -> Callable[[Tensor], dict[str, tuple[Tensor, Tensor]]]:
    """Cosines and sines, float32 [N, head_dim], of positions int64 [N], by kind of layer.

    From transformers' own module, which knows all ways of scaling: some depend on how long the longest sequence is.
    """
    each = not hasattr(rotary, "inv_freq")
    if each and not all(hasattr(rotary, f"{kind}_inv_freq") for kind in kinds):
        raise UnknownLayout(f"rotary embeddings of type {type(rotary).__name__}")

    def angles(positions: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
        like = torch.empty(0, dtype=torch.float32, device=positions.device)
        if each:
            found: dict[str, Any] = {kind: rotary(like, positions[None], kind) for kind in kinds}
        else:
            found = dict.fromkeys(kinds, rotary(like, positions[None]))
        return {kind: (cos[0], sin[0]) for kind, (cos, sin) in found.items()}

    first = torch.zeros(1, dtype=torch.long, device=next(rotary.buffers()).device)
    for cos, _sin in angles(first).values():
        if cos.shape != (1, head_dim):
            raise UnknownLayout(f"rotary embeddings of {cos.shape[-1]} of {head_dim} dimensions")
    return angles


def _scaled(weight: Tensor, epsilon: float) -> Norm:
    size = weight.shape[-1]
    return Norm(weight * size**0.5, weight.new_tensor((size * epsilon) ** 0.5))


def _epsilon(norm: Any) -> float:
    """Families call it by two names."""
    return norm.eps if hasattr(norm, "eps") else norm.variance_epsilon


def _expect(module: Any, names: Sequence[str]) -> None:
    """Raises `UnknownLayout` unless the module has exactly these children."""
    found = {name for name, _ in module.named_children()}
    if found != set(names):
        odd = ", ".join(sorted(found ^ set(names)))
        raise UnknownLayout(f"{type(module).__name__} with other parts than expected: {odd}")

"""An independent answer to what training must compute: float64, one datum at a time, plain autograd.

It shares no code with the engine: transformers' model with the adapter merged into its weights as differentiable
tensors, and each loss written as torch expressions whose gradient autograd finds. Mixtures of experts are our own here,
a token and an expert at a time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from openrl.types import Array, Datum, TrainPayload

DEFAULTS: dict[str, dict[str, float]] = {
    "cross_entropy": {},
    "importance_sampling": {},
    "ppo": {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2},
    "cispo": {"clip_low_threshold": 0.0, "clip_high_threshold": 4.0},
    "dro": {"beta": 0.05},
    "gspo": {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2},
}


def loss(name: str, lp: Tensor, inputs: Mapping[str, Array], config: Mapping[str, Any] | None = None) -> Tensor:
    """The loss of a datum from its logprobs `lp` (float64), as an expression that autograd can differentiate."""
    given = {key: torch.from_numpy(np.asarray(value, dtype=np.float64)) for key, value in inputs.items()}
    settings = {**DEFAULTS[name], **(config or {})}
    w = given.get("weights", torch.ones_like(lp))
    if name == "cross_entropy":
        return -(w * lp).sum()
    q, a = given["logprobs"], given["advantages"]
    if name == "dro":
        return -(w * (lp * a - 0.5 * settings["beta"] * (lp - q) ** 2)).sum()
    ratio = torch.exp(lp - q)
    if name == "importance_sampling":
        return -(w * ratio * a).sum()
    low = given.get("clip_low_threshold", torch.tensor(settings["clip_low_threshold"], dtype=torch.float64))
    high = given.get("clip_high_threshold", torch.tensor(settings["clip_high_threshold"], dtype=torch.float64))
    if name == "cispo":
        return -(w * ratio.clamp(low, high).detach() * lp * a).sum()
    if name == "gspo":
        inside = given["sequence_ratio_mask"] != 0
        ratio = torch.exp((lp.detach() - q)[inside].mean() + lp - lp.detach())
    return -(w * torch.minimum(ratio * a, ratio.clamp(low, high) * a)).sum()


@dataclass(frozen=True)
class Answer:
    """Logprobs of each datum, the summed loss, and dL/dA and dL/dB by `<layer>.lora_A` and `.lora_B`; all float64."""

    logprobs: list[Array]
    total: float
    gradients: dict[str, Array]


class Reference:
    """A model folder in float64."""

    def __init__(self, folder: Path) -> None:
        self._model: Any = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float64, attn_implementation="eager", experts_implementation="eager"
        )
        self._model.eval().requires_grad_(False)
        self._model.model.embed_tokens.padding_idx = None  # else one row of the embeddings never has a gradient
        self._merge = _Merge({}, 1)
        for name, block in self._model.named_modules():
            if hasattr(block, "experts"):
                block.forward = partial(self._mixture, block, f"{name}.experts")

    def answer(self, payload: TrainPayload, parameters: Mapping[str, Array], rank: int) -> Answer:
        """What a request must give for an adapter's float32 `parameters`."""
        leaves = {
            name: torch.tensor(value, dtype=torch.float64, requires_grad=True) for name, value in parameters.items()
        }
        logprobs = [self._logprobs(datum, leaves, rank) for datum in payload.data]
        terms = [
            loss(payload.loss_fn, lp, datum.inputs, payload.loss_config)
            for lp, datum in zip(logprobs, payload.data, strict=True)
        ]
        total = torch.stack(terms).sum()
        grads = torch.autograd.grad(total, list(leaves.values()), allow_unused=True, materialize_grads=True)
        gradients = {name: grad.numpy() for name, grad in zip(leaves, grads, strict=True)}
        return Answer([lp.detach().numpy() for lp in logprobs], float(total.detach()), gradients)

    def full_answer(self, payload: TrainPayload, parameters: Mapping[str, Array]) -> Answer:
        """What a request must give a run that trains all `parameters`, float32 by transformers' names."""
        leaves = {name: torch.tensor(v, dtype=torch.float64, requires_grad=True) for name, v in parameters.items()}
        logprobs: list[Tensor] = []
        for datum in payload.data:
            tokens = torch.from_numpy(datum.tokens.astype(np.int64))[None]
            output = torch.func.functional_call(self._model, leaves, kwargs={"input_ids": tokens, "use_cache": False})
            targets = torch.from_numpy(datum.inputs["target_tokens"]).reshape(len(datum.tokens), -1)
            lp = torch.log_softmax(output.logits[0], dim=-1).gather(1, targets)
            logprobs.append(lp.reshape(datum.inputs["target_tokens"].shape))
        terms = [
            loss(payload.loss_fn, lp, datum.inputs, payload.loss_config)
            for lp, datum in zip(logprobs, payload.data, strict=True)
        ]
        total = torch.stack(terms).sum()
        grads = torch.autograd.grad(total, list(leaves.values()))
        gradients = {name: grad.numpy() for name, grad in zip(leaves, grads, strict=True)}
        return Answer([lp.detach().numpy() for lp in logprobs], float(total.detach()), gradients)

    def logits(self, tokens: Sequence[int], parameters: Mapping[str, Array], rank: int) -> Array:
        """Float64 [N, V] of one sequence under an adapter; no `parameters` mean the base model."""
        leaves = {name: torch.tensor(value, dtype=torch.float64) for name, value in parameters.items()}
        return self._logits(torch.tensor([list(tokens)]), leaves, rank)[0].numpy()

    def last_logits(self, rows: Array, parameters: Mapping[str, Array], rank: int) -> Array:
        """Float64 [R, V] of what follows sequences [R, N] of one length."""
        leaves = {name: torch.tensor(value, dtype=torch.float64) for name, value in parameters.items()}
        return self._logits(torch.from_numpy(rows), leaves, rank)[:, -1].numpy()

    def _logprobs(self, datum: Datum, leaves: Mapping[str, Tensor], rank: int) -> Tensor:
        logits = self._logits(torch.from_numpy(datum.tokens.astype(np.int64))[None], leaves, rank)[0]
        targets = torch.from_numpy(datum.inputs["target_tokens"]).reshape(len(datum.tokens), -1)
        lp = torch.log_softmax(logits, dim=-1).gather(1, targets)
        return lp.reshape(datum.inputs["target_tokens"].shape)

    def _logits(self, tokens: Tensor, leaves: Mapping[str, Tensor], rank: int) -> Tensor:
        self._merge = merge = _Merge(leaves, rank)
        layers = [name.removesuffix(".lora_A") for name in leaves if name.endswith(".lora_A")]
        plain = [layer for layer in layers if ".experts." not in layer]
        weights = {f"{layer}.weight": merge.weight(self._model.get_submodule(layer).weight, layer) for layer in plain}
        # tie_weights=False: an adapted head must not change the embeddings that share its memory (A9).
        output = torch.func.functional_call(
            self._model, weights, kwargs={"input_ids": tokens, "use_cache": False}, tie_weights=False
        )
        return output.logits

    def _mixture(self, block: Any, name: str, hidden: Tensor) -> Tensor:
        """What Qwen3's mixture is, for hidden states [rows, tokens, H] and an adapter's stacks (A10)."""
        out = [self._token(block, name, x) for x in hidden.flatten(0, 1)]
        return torch.stack(out).view(hidden.shape)

    def _token(self, block: Any, name: str, x: Tensor) -> Tensor:
        odds = torch.exp(block.gate.weight @ x)
        odds = odds / odds.sum()
        chosen = sorted(range(len(odds)), key=lambda e: -float(odds[e].detach()))[: block.gate.top_k]
        whole = sum(odds[e] for e in chosen) if block.gate.norm_topk_prob else 1.0
        return torch.stack([odds[e] / whole * self._expert(block.experts, name, e, x) for e in chosen]).sum(0)

    def _expert(self, experts: Any, name: str, e: int, x: Tensor) -> Tensor:
        inner = experts.down_proj.shape[2]
        gate = self._merge.weight(experts.gate_up_proj[e, :inner], f"{name}.w1", e) @ x
        up = self._merge.weight(experts.gate_up_proj[e, inner:], f"{name}.w3", e) @ x
        return self._merge.weight(experts.down_proj[e], f"{name}.w2", e) @ (gate * torch.sigmoid(gate) * up)


@dataclass(frozen=True)
class _Merge:
    """An adapter's factors, to be merged into weights."""

    leaves: Mapping[str, Tensor]
    rank: int

    def weight(self, base: Tensor, layer: str, expert: int = 0) -> Tensor:
        """W + (32 / r) B A, if the adapter has that layer."""
        if f"{layer}.lora_A" not in self.leaves:
            return base
        a, b = self.leaves[f"{layer}.lora_A"], self.leaves[f"{layer}.lora_B"]
        if a.ndim == 3:
            a, b = a[expert if len(a) > 1 else 0], b[expert if len(b) > 1 else 0]
        return base + (32 / self.rank) * b @ a


def distance(found: Mapping[str, Array], expected: Mapping[str, Array]) -> float:
    """||found - expected|| / ||expected|| over all tensors together."""
    assert found.keys() == expected.keys()
    gap = sum(float(((found[name] - expected[name]) ** 2).sum()) for name in expected)
    size = sum(float((np.asarray(expected[name], dtype=np.float64) ** 2).sum()) for name in expected)
    return (gap / size) ** 0.5 if size else gap**0.5


def totals(payloads: Sequence[Answer]) -> dict[str, Array]:
    """Sum of several answers' gradients."""
    return {name: np.sum([answer.gradients[name] for answer in payloads], axis=0) for name in payloads[0].gradients}

"""Custom losses as users write them, traced and encoded by the SDK itself, and graphs that no SDK would send."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from tinker import types
from tinker.lib.public_interfaces.custom_loss import LossHandle, encode_graph, trace_loss

from openrl.custom_loss import LossProgram
from openrl.wire.bodies import decode_custom_loss

Tensor = torch.Tensor
Answer = tuple[Tensor, dict[str, Tensor]]
LossFn = Callable[..., Answer]


def weighted(logprobs: Tensor, weights: Tensor) -> Answer:
    loss = -(logprobs * weights).sum()
    return loss, {"custom/nll:sum": loss, "custom/live:mean": (weights != 0).float().mean()}


def clipped(logprobs: Tensor, old: Tensor, advantages: Tensor, mask: Tensor) -> Answer:
    """PPO with a penalty on the KL divergence and a mean over the mask."""
    ratio = torch.exp(logprobs - old)
    bounded = ratio.clamp(0.8, 1.2)
    surrogate = torch.minimum(ratio * advantages, bounded * advantages)
    gap = old - logprobs
    kl = torch.exp(gap) - gap - 1
    count = torch.clamp(mask.sum(), min=1.0)
    loss = -((surrogate - 0.1 * kl) * mask).sum() / count
    moved = torch.where((ratio - bounded).abs() > 0, 1.0, 0.0)
    return loss, {"custom/kl:mean": (kl * mask).sum() / count, "custom/clipped:sum": (moved * mask).sum()}


def preference(logprobs: Tensor, reference: Tensor, sign: Tensor) -> Answer:
    """A sigmoid of a margin, as in preference losses; `sign` is a scalar."""
    margin = sign * 0.1 * (logprobs - reference).sum() / math.sqrt(2)
    return -F.logsigmoid(margin), {"custom/margin:mean": margin, "custom/right:mean": (margin > 0).float()}


def shaped(logprobs: Tensor, target_tokens: Tensor) -> Answer:
    """What depends on shapes and places: positions, slices, cumulative sums, a detached baseline."""
    steps = torch.arange(logprobs.shape[0], device=logprobs.device, dtype=logprobs.dtype)
    decay = 0.9**steps
    baseline = logprobs.mean().detach()
    late = torch.cumsum(F.softplus(logprobs), dim=0)[1:].sum() / logprobs.size(0)
    even = torch.where(target_tokens % 2 == 0, logprobs - baseline, torch.zeros_like(logprobs))
    picked = logprobs[target_tokens > 40].square().sum()
    return (decay * even).sum() + late + picked, {"custom/len.tokens:sum": logprobs.numel() * torch.ones_like(late)}


def distilled(logprobs: Tensor, teacher: Tensor) -> Answer:
    """Rank 2: the student's and the teacher's distributions over K candidates at every position."""
    student = logprobs - torch.logsumexp(logprobs, dim=-1, keepdim=True)
    wanted = F.softmax(teacher, dim=-1)
    kl = (wanted * (wanted.log() - student)).sum(dim=-1)
    best = torch.stack([logprobs.max(dim=1).values, teacher.max(dim=1)[0]]).mean()
    return kl.mean() + 0.01 * best, {"custom/kl/teacher:mean": kl.mean()}


LOSSES: Mapping[str, tuple[LossFn, dict[str, int]]] = {
    "weighted": (weighted, {"logprobs": 1, "weights": 1}),
    "clipped": (clipped, {"logprobs": 1, "old": 1, "advantages": 1, "mask": 1}),
    "preference": (preference, {"logprobs": 1, "reference": 1, "sign": 0}),
    "shaped": (shaped, {"logprobs": 1, "target_tokens": 1}),
    "distilled": (distilled, {"logprobs": 2, "teacher": 2}),
}


def body(fn: LossFn, ranks: Mapping[str, Any], session: str = "s", seq: int = 0) -> dict[str, Any]:
    """The request with which the SDK brings a loss."""
    handle: LossHandle = trace_loss(fn, ranks, session)
    request = types.CreateCustomLossRequest(
        session_id=session,
        custom_loss_seq_id=seq,
        name=handle.name,
        inputs=list(handle.inputs),
        graph=encode_graph(handle),
    )
    return json.loads(request.model_dump_json())


def program(fn: LossFn, ranks: Mapping[str, Any]) -> LossProgram:
    return decode_custom_loss(json.dumps(body(fn, ranks)).encode())


def graph(*calls: tuple[Any, ...], result: str | None = None, rank: int = 1) -> dict[str, Any]:
    """A request with calls of one's own: (op, name, target, args) or with kwargs as fifth. `x` is logprobs."""
    nodes = [{"op": "placeholder", "name": "x", "target": "logprobs", "args": [], "kwargs": {}}]
    for op, name, target, args, *more in calls:
        nodes.append({"op": op, "name": name, "target": target, "args": args, "kwargs": more[0] if more else {}})
    loss = {"ref": result or nodes[-1]["name"]}
    output = {"tuple": [loss, {"dict": {}}]}
    nodes.append({"op": "output", "name": "output", "target": "output", "args": [output], "kwargs": {}})
    return {
        "session_id": "s",
        "custom_loss_seq_id": 0,
        "name": "made",
        "inputs": [{"name": "logprobs", "rank": rank}],
        "graph": {"format": 1, "nodes": nodes},
    }

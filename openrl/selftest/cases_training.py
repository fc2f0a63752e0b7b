"""Cases about one pass: logprobs, losses and gradients, alone and in company."""

from __future__ import annotations

import numpy as np

from openrl.backends import registry
from openrl.backends.base import TrainItem
from openrl.checkpoints.peft import HEAD_NAME
from openrl.custom_loss import CUSTOM, GraphNode, LossInput, LossProgram, check_loss
from openrl.errors import BadRequest
from openrl.selftest import data
from openrl.selftest.case import Case, Figures
from openrl.selftest.measures import Figure, added, apart, distance, far, holds, off
from openrl.selftest.models import SEED, factors
from openrl.selftest.subject import Subject, trained
from openrl.types import Datum, LoraSpec, TrainOutput, TrainPayload


def logprobs(s: Subject) -> Figures:
    """L6, L8, A1: of the base model, and under adapters of two ranks."""
    for name in ("base", "a", "b"):
        output = s.forward(s.hold(name), data.plain())
        yield holds("logprobs are float32", all(lp.dtype == np.float32 for lp in output.logprobs))
        yield from far(f"logprobs under {name}", output.logprobs, s.expected.logprobs(name), s.limit)


def loss(name: str) -> Case:
    """1.4 to 1.8, L3 to L5, G5: a loss, its gradient, and a forward that leaves none."""

    def run(s: Subject) -> Figures:
        payload = data.payload(name, s.expected)
        run = s.hold("a")
        seen = s.forward(run, payload)
        yield holds("forward leaves no gradient", not s.gradient(run))
        output = s.forward_backward(run, payload)
        yield from _answer(s, name, output)
        yield _loss(s, name, seen, "loss of forward")
        yield from off("gradient", s.gradient(run), s.expected.loss(name).sketch, s.limit.gradient)

    return Case(name, f"loss {name}", run)


def rank_2(s: Subject) -> Figures:
    """L14, L18, L20: several targets a position, their number differing between datums."""
    for name in data.WIDE_LOSSES:
        run = s.hold("a")
        output = s.forward_backward(run, data.wide(name, s.expected))
        yield from far("logprobs", output.logprobs, s.expected.wide_logprobs(), s.limit)
        yield from _answer(s, f"wide {name}", output)
        yield from off("gradient", s.gradient(run), s.expected.loss(f"wide {name}").sketch, s.limit.gradient)


def unembed(s: Subject) -> Figures:
    """A9, 4.2: an adapter of the output head alone, which leaves the embeddings alone also where they are tied."""
    run = s.hold("head")
    output = s.forward_backward(run, data.weighted())
    yield from far("logprobs", output.logprobs, s.expected.logprobs("head"), s.limit)
    yield from off("gradient", s.gradient(run), s.expected.loss("weighted head").sketch, s.limit.gradient)
    made = s.fresh(LoraSpec(rank=4, seed=SEED, train_attn=False, train_mlp=False))
    yield holds("it has the head's tensors only", all(n.startswith(HEAD_NAME) for n in s.parameters(made)))


def fresh_adapter(s: Subject) -> Figures:
    """A2 to A4, A8: what a new adapter is, and what its first gradient reaches."""
    whole = LoraSpec(rank=8, seed=SEED)
    run = s.fresh(whole)
    tensors = s.parameters(run)
    shapes = factors(whole, s.world.family)
    yield holds("every layer has its A and B", {n: t.shape for n, t in tensors.items()} == shapes)
    reach = {n: float(np.abs(t).max()) * t.shape[-1] ** 0.5 for n, t in tensors.items() if n.endswith("A")}
    yield holds("A is within 1/sqrt(in)", max(reach.values()) < 1.00001)
    yield holds("A reaches near 1/sqrt(in)", min(reach.values()) > 0.9)
    yield holds("B is zero", not any(t.any() for n, t in tensors.items() if n.endswith("B")))
    again = s.parameters(s.fresh(LoraSpec(rank=8, seed=SEED, train_attn=False, train_mlp=False)))
    yield holds("A goes by seed and layer alone", all((tensors[n] == t).all() for n, t in again.items()))
    other = s.parameters(s.fresh(LoraSpec(rank=8, seed=SEED + 1, train_attn=False, train_mlp=False)))
    yield holds("another seed, another A", not (other[f"{HEAD_NAME}.lora_A"] == again[f"{HEAD_NAME}.lora_A"]).all())
    s.forward_backward(run, data.weighted())
    gradient = s.gradient(run)
    yield holds("the gradient of A is exactly zero", not any(t.any() for n, t in gradient.items() if n.endswith("A")))
    yield holds("no gradient of a B is zero", all(t.any() for n, t in gradient.items() if n.endswith("B")))


def accumulation(s: Subject) -> Figures:
    """G1, G2, G4, L3: gradients of several calls and losses add up, undivided, until a step."""
    run = s.hold("a")
    s.forward_backward(run, data.weighted(data.DATA[:2]))
    s.forward_backward(run, data.weighted(data.DATA[2:]))
    whole = s.expected.loss("cross_entropy")
    yield from off("gradient of two calls", s.gradient(run), whole.sketch, s.limit.gradient)
    s.forward_backward(run, data.payload("ppo", s.expected))
    both = added(whole.sketch, s.expected.loss("ppo").sketch)
    yield from off("gradient of two losses", s.gradient(run), both, s.limit.gradient)


def mixed_runs(s: Subject) -> Figures:
    """B6: runs of different adapters, ranks, losses and kinds in one pass; one that is not in it keeps its gradient."""
    one, two, three, other = s.hold("a"), s.hold("b"), s.hold("head"), s.hold("a")
    s.forward_backward(other, data.weighted())
    before = s.gradient(other)
    items = (
        s.item(one, data.payload("ppo", s.expected)),
        s.item(two, data.weighted()),
        s.item(three, data.plain(), backward=False),
    )
    outputs = trained(s.train(*items))
    for name, output in zip(("a", "b", "head"), outputs, strict=True):
        yield from far(f"logprobs under {name}", output.logprobs, s.expected.logprobs(name), s.limit)
    yield from _answer(s, "ppo", outputs[0])
    yield from _answer(s, "weighted b", outputs[1])
    yield from off("gradient under a", s.gradient(one), s.expected.loss("ppo").sketch, s.limit.gradient)
    yield from off("gradient under b", s.gradient(two), s.expected.loss("weighted b").sketch, s.limit.gradient)
    yield holds("forward leaves no gradient", not s.gradient(three))
    yield holds("a run that has no part keeps its gradient to the bit", distance(s.gradient(other), before) == 0)


def batching(s: Subject) -> Figures:
    """B1 to B3: neighbours, order, splits and what comes later in a sequence change nothing."""
    run = s.hold("a")
    whole = s.forward_backward(run, data.weighted()).logprobs
    gradient = s.gradient(run)
    alone = [s.forward(run, data.plain([datum])).logprobs[0] for datum in data.DATA]
    yield Figure("each datum alone", apart(whole, alone), s.limit.same)
    turned = s.hold("a")
    reversed_ = s.forward_backward(turned, data.weighted(data.DATA[::-1])).logprobs
    yield Figure("another order", apart(whole, reversed_[::-1]), s.limit.same)
    yield Figure("gradient in another order", distance(s.gradient(turned), gradient), s.limit.same_gradient)
    short = data.DATA[1]
    longer = Datum(
        np.concatenate([short.tokens, np.array(data.tokens("garbage", 30), np.int32)]),
        {"target_tokens": np.concatenate([short.inputs["target_tokens"], np.arange(30)])},
    )
    garbage = s.forward(run, data.plain([longer])).logprobs[0][: len(short.tokens)]
    yield Figure("tokens that come later", apart([garbage], [whole[1]]), s.limit.same)


def bad_item(s: Subject) -> Figures:
    """L11, G6: a loss that is not finite fails its own request and adds nothing; its neighbour is not disturbed."""
    bad, good = s.hold("a"), s.hold("b")
    s.forward_backward(bad, data.weighted())
    before = s.gradient(bad)
    outcomes = s.train(s.item(bad, data.broken(s.expected)), s.item(good, data.weighted()))
    yield holds("the request is refused", isinstance(outcomes[0], BadRequest))
    yield holds("its run's gradient is as before, to the bit", distance(s.gradient(bad), before) == 0)
    (output,) = trained(outcomes[1:])
    yield from _answer(s, "weighted b", output)
    yield from off("the neighbour's gradient", s.gradient(good), s.expected.loss("weighted b").sketch, s.limit.gradient)
    s.forward_backward(bad, data.payload("ppo", s.expected))
    both = added(s.expected.loss("cross_entropy").sketch, s.expected.loss("ppo").sketch)
    yield from off("gradient of the run's next request", s.gradient(bad), both, s.limit.gradient)


def custom_loss(s: Subject) -> Figures:
    """Protocol 5.9: a loss that a client sent as a graph; this one is cross-entropy."""
    if not registry.runs_custom_losses(s.name):
        raise BadRequest(f"The {s.name} backend runs no custom losses.")
    run = s.hold("a")
    payload = TrainPayload(data.weighted().data, CUSTOM)
    item = s.item(run, payload)
    output = trained(s.train(TrainItem(item.request, run, payload, True, _program())))[0]
    yield from _answer(s, "cross_entropy", output)
    yield from off("gradient", s.gradient(run), s.expected.loss("cross_entropy").sketch, s.limit.gradient)


def _program() -> LossProgram:
    nodes = [
        GraphNode("placeholder", "lp", "logprobs"),
        GraphNode("placeholder", "w", "weights"),
        GraphNode("call_function", "product", "operator.mul", [{"ref": "lp"}, {"ref": "w"}]),
        GraphNode("call_method", "total", "sum", [{"ref": "product"}]),
        GraphNode("call_function", "loss", "operator.neg", [{"ref": "total"}]),
        GraphNode("output", "output", "output", [{"tuple": [{"ref": "loss"}, {"dict": {}}]}]),
    ]
    return check_loss("selftest", [LossInput("logprobs", 1), LossInput("weights", 1)], nodes)


def _answer(s: Subject, name: str, output: TrainOutput) -> Figures:
    yield _loss(s, name, output, f"loss {name}")
    yield holds("metrics are name:reduction", all(key.count(":") == 1 for key in output.metrics))


def _loss(s: Subject, name: str, output: TrainOutput, what: str) -> Figure:
    wanted = s.expected.loss(name)
    return Figure(what, abs(output.metrics["loss:sum"] - wanted.total) / wanted.weight, s.limit.loss)


CASES = (
    Case("logprobs", "logprobs of forward", logprobs),
    *(loss(name) for name in data.LOSSES),
    Case("rank_2", "several targets a position", rank_2),
    Case("custom_loss", "custom losses", custom_loss, optional=True),
    Case("unembed", "adapter of the output head", unembed),
    Case("fresh_adapter", "new adapters", fresh_adapter),
    Case("accumulation", "gradient accumulation", accumulation),
    Case("mixed_runs", "runs together in a pass", mixed_runs),
    Case("batching", "order, splits, padding", batching),
    Case("bad_item", "a failed request apart", bad_item),
)

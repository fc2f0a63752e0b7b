"""Cases about what a run keeps: steps of the optimizer, files, and going on from them."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from openrl.checkpoints.peft import ADAPTER_FILE, GRADIENTS_FILE, OPTIMIZER_FILE
from openrl.errors import BadRequest
from openrl.selftest import data
from openrl.selftest.adam import Adam
from openrl.selftest.case import Case, Figures
from openrl.selftest.measures import Figure, distance, holds
from openrl.selftest.subject import Subject, same_tensors
from openrl.types import AdamParams, LoraSpec, RunId

# Each step has other hyperparameters: all are read anew (O3). Values are ones that float32 holds well.
_STEPS = (
    AdamParams(learning_rate=1e-3),
    AdamParams(learning_rate=5e-4, weight_decay=0.1, grad_clip_norm=0.5),
    AdamParams(learning_rate=2e-3, beta1=0.8, beta2=0.99, eps=1e-8),
)
_RATE = 1e-3


def optimizer(s: Subject) -> Figures:
    """O1 to O7, O11, G1: each step is AdamW's from the accumulated gradient, which is zero afterwards."""
    run = s.hold("a")
    wanted = Adam({name: t.astype(np.float64) for name, t in s.parameters(run).items()})
    for number, adam in enumerate(_STEPS):
        s.forward_backward(run, data.weighted(data.DATA[number:]))
        norm = wanted.step(s.gradient(run), adam)
        told = s.step(run, adam).get("grad_norm:mean", np.nan)
        yield Figure("grad_norm:mean", abs(told / norm - 1), 1e-4)
        yield holds("no gradient is left", not s.gradient(run))
    yield Figure("weights, in steps of the learning rate", wanted.distance(s.parameters(run)) / _RATE, 2e-3)
    moments = s.moments(run)
    for kind, values in (("m", wanted.m), ("v", wanted.v)):
        kept = {name: moments[f"{kind}.{name}"] for name in values if f"{kind}.{name}" in moments}
        yield Figure(f"moments {kind}", distance(kept, values), 1e-4)
    yield holds("steps are counted", int(moments["t"]) == len(_STEPS))


def empty_step(s: Subject) -> Figures:
    """G9: a step without a gradient is a step with a gradient of zero."""
    run = s.hold("a")
    wanted = Adam({name: t.astype(np.float64) for name, t in s.parameters(run).items()})
    s.forward_backward(run, data.weighted())
    gradient = s.gradient(run)
    adam = AdamParams(learning_rate=_RATE)
    for g in (gradient, {name: np.zeros_like(t) for name, t in gradient.items()}):
        wanted.step(g, adam)
        s.step(run, adam)
    yield Figure("weights, in steps of the learning rate", wanted.distance(s.parameters(run)) / _RATE, 2e-3)
    yield holds("it counts as a step", int(s.moments(run)["t"]) == 2)


def three_steps(s: Subject) -> Figures:
    """The losses of three steps of training, and the one after them, against the same in float64."""
    run = s.hold("a")
    totals, weights = s.expected.steps()
    for number, (total, weight) in enumerate(zip(totals, weights, strict=True)):
        output = s.forward_backward(run, data.weighted())
        gap = abs(output.metrics["loss:sum"] - total) / weight
        yield Figure(f"loss after {number} steps", gap, s.limit.steps if number else s.limit.loss)
        s.step(run, AdamParams(learning_rate=0.01, eps=1e-8))


def save_load(s: Subject) -> Figures:
    """C2, C4, O11: what is saved and loaded is the same to the bit, and saving changes nothing."""
    run = _trained(s)
    first = s.save(run, optimizer=True, gradients=True)
    second = s.save(run, optimizer=True, gradients=True)
    again = s.load(first, optimizer=True)
    third = s.save(again, optimizer=True, gradients=True)
    for name in (ADAPTER_FILE, OPTIMIZER_FILE, GRADIENTS_FILE):
        yield holds(f"{name} twice", same_tensors(first / name, second / name))
        yield holds(f"{name} after loading", same_tensors(first / name, third / name))
    yield holds("logprobs after loading", _logprobs(s, run) == _logprobs(s, again))
    for one in (run, again):
        s.step(one, AdamParams(learning_rate=_RATE))
    files = [s.save(one, optimizer=True) for one in (run, again)]
    for name in (ADAPTER_FILE, OPTIMIZER_FILE):
        yield holds(f"{name} after the next step", same_tensors(files[0] / name, files[1] / name))


def loading(s: Subject) -> Figures:
    """C3, G10, O12: weights alone start anew; what does not fit or is not there is refused."""
    run = _trained(s)
    whole, weights = s.save(run, optimizer=True), s.save(run)
    s.load(whole, run=run)
    moments = s.moments(run)
    yield holds("moments are zero after loading weights", not any(t.any() for t in moments.values()))
    yield holds("loading takes the gradient away", not s.gradient(run))
    s.load(whole, optimizer=True, run=run)
    yield holds("a saved state has no gradient unless it is asked for", not s.gradient(run))
    yield holds("moments are refused where there are none", _refuses(s, weights, optimizer=True))
    other = s.fresh(LoraSpec(rank=3, seed=5))
    yield holds("another rank is refused", _refuses(s, weights, run=other))
    narrow = s.fresh(LoraSpec(rank=4, seed=5, train_attn=False, train_mlp=False))
    yield holds("other modules are refused", _refuses(s, weights, run=narrow))
    yield holds("a refusal changes nothing", s.parameters(narrow).keys() == s.parameters(s.hold("head")).keys())


def resume(s: Subject) -> Figures:
    """C6: four steps are two, a checkpoint, and two more."""
    adam = AdamParams(learning_rate=_RATE)
    straight, broken = s.hold("a"), s.hold("a")
    for number in range(4):
        if number == 2:
            broken = s.load(s.save(broken, optimizer=True), optimizer=True)
        losses: list[float] = []
        for run in (straight, broken):
            output = s.forward_backward(run, data.weighted())
            losses.append(output.metrics["loss:sum"])
            s.step(run, adam)
        yield Figure("losses", abs(losses[0] - losses[1]) / abs(losses[0]), 1e-6)
    yield Figure("weights", distance(s.parameters(broken), s.parameters(straight)), 1e-5)


def _trained(s: Subject) -> RunId:
    """A run with moments, and a gradient on top."""
    run = s.hold("a")
    s.forward_backward(run, data.weighted())
    s.step(run, AdamParams(learning_rate=_RATE))
    s.forward_backward(run, data.weighted(data.DATA[2:]))
    return run


def _logprobs(s: Subject, run: RunId) -> list[bytes]:
    return [lp.tobytes() for lp in s.forward(run, data.plain()).logprobs]


def _refuses(s: Subject, folder: Path, *, optimizer: bool = False, run: RunId | None = None) -> bool:
    try:
        s.load(folder, optimizer=optimizer, run=run)
    except BadRequest:
        return True
    return False


CASES = (
    Case("optimizer", "AdamW", optimizer),
    Case("empty_step", "a step without a gradient", empty_step),
    Case("three_steps", "three steps of training", three_steps),
    Case("save_load", "saving and loading, to the bit", save_load),
    Case("loading", "loading weights, refusing misfits", loading),
    Case("resume", "going on from a checkpoint", resume),
)

"""The case about training all parameters."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from openrl.checkpoints.full import MODEL_FILE
from openrl.checkpoints.peft import OPTIMIZER_FILE, read_tensors
from openrl.errors import BadRequest
from openrl.selftest import data
from openrl.selftest.adam import Adam
from openrl.selftest.case import Case, Figures
from openrl.selftest.measures import Figure, far, holds, off
from openrl.selftest.subject import Subject, gaps, same_tensors
from openrl.types import AdamParams, FullSpec

_RATE = 1e-3


def full_tuning(s: Subject) -> Figures:
    """F1 to F5, C4: each parameter's gradient, tied embeddings once; a step in float32; files; the sampler."""
    wanted = s.expected.full()
    if not s.backend.info.full_tuning:
        raise BadRequest(f"Of this model the {s.name} backend trains adapters only.")
    if wanted is None:
        raise BadRequest("The self-test has no answers for all parameters of this family.")
    run = s.fresh(FullSpec())
    output = s.forward_backward(run, data.weighted())
    yield from far("logprobs", output.logprobs, s.expected.logprobs("base"), s.limit)
    yield Figure("loss", abs(output.metrics["loss:sum"] - wanted.total) / wanted.weight, s.limit.loss)
    gradient = s.gradient(run)
    yield from off("gradient", gradient, wanted.sketch, s.limit.gradient)
    adam = AdamParams(learning_rate=_RATE)
    reference = Adam({name: t.astype(np.float64) for name, t in _weights(s.save(run, optimizer=True)).items()})
    norm = reference.step(gradient, adam)
    yield Figure("grad_norm:mean", abs(s.step(run, adam).get("grad_norm:mean", np.nan) / norm - 1), 1e-4)
    yield holds("no gradient is left", not s.gradient(run))
    whole = s.save(run, optimizer=True)
    found = _weights(whole)
    yield Figure("weights, in steps of the learning rate", reference.distance(found) / _RATE, 2e-3)
    s.load(whole, optimizer=True, run=run)
    again = s.save(run, optimizer=True)
    for name in (MODEL_FILE, OPTIMIZER_FILE):
        yield holds(f"{name} after loading", same_tensors(whole / name, again / name))
    drawn = s.sample(data.draws(4, max_tokens=6), s.snapshot(run))
    worst, v2 = gaps(s, run, data.PROMPT, drawn)
    yield Figure("sampler against trainer, worst token", worst, s.limit.logprob)
    yield Figure("sampler against trainer, KL v2", v2, s.limit.agreement)


def _weights(folder: Path) -> dict[str, np.ndarray]:
    return read_tensors(folder / MODEL_FILE)


CASES = (Case("full_tuning", "training all parameters", full_tuning, optional=True),)

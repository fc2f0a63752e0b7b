"""Computes the self-test's right answers in float64 and writes them into the package.

    PYTHONPATH=tests python -m contract.expect [FAMILY ...]

The reference is transformers in float64 with adapters merged into the weights, each datum by itself, gradients by
autograd (`support/reference.py`). Run it after a change of `openrl/selftest/models.py` or `data.py`;
`test_suite.py` fails until then.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from openrl import losses, selftest
from openrl.checkpoints.peft import read_adapter
from openrl.selftest import data, expected, models
from openrl.selftest.expected import Expected
from openrl.selftest.measures import flat, sketch
from openrl.types import Array, TrainPayload
from support.reference import Answer, Reference

FILE = Path(selftest.__file__).parent / expected.FILE
ADAPTERS = ("base", "a", "b", "head")
TOKENS = 6  # of a greedy continuation
DISTINCT = 3  # of these, at least
MARGIN = 0.3  # nats between the likeliest token and the next, so that no rounding changes the choice
_PROMPT, _TOGETHER = 6, 100  # tokens of a prompt, and prompts that are tried together
TOP = 3
STEPS, LEARNING_RATE, EPS = 3, 0.01, 1e-8

Parameters = Mapping[str, Array]


class Teacher:
    """A family's reference and adapters."""

    def __init__(self, family: str, root: Path) -> None:
        self.family = family
        world = models.build(root, family)
        self.reference = Reference(world.folder)
        self.adapters: dict[str, Parameters] = {n: read_adapter(p).tensors for n, p in world.adapters.items()}
        self.adapters["base"] = {}
        self.ranks = {name: models.adapter_spec(name).rank for name in world.adapters} | {"base": 1}

    def answer(self, payload: TrainPayload, adapter: str, parameters: Parameters | None = None) -> Answer:
        if parameters is None:
            parameters = self.adapters[adapter]
        return self.reference.answer(payload, parameters, self.ranks[adapter])

    def logprobs(self, tokens: list[int], adapter: str) -> Array:
        """Log-softmax [N, V]."""
        return _log_softmax(self.reference.logits(tokens, self.adapters[adapter], self.ranks[adapter]))

    def following(self, rows: Array, adapter: str) -> Array:
        """Log-softmax [R, V] of what comes after sequences [R, N]."""
        return _log_softmax(self.reference.last_logits(rows, self.adapters[adapter], self.ranks[adapter]))


def _log_softmax(logits: Array) -> Array:
    shifted = logits - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def family_answers(teacher: Teacher) -> dict[str, Any]:
    """What `expected.Expected` reads, not yet rounded."""
    raw = scores(teacher)
    # Requests are made from the answers as they are stored, since that is all a backend's test has.
    known = Expected(json.loads(dump({"x": raw}))["x"])
    raw["losses"] = all_losses(teacher, known)
    raw["full"] = full(teacher)
    raw["steps"] = steps(teacher)
    raw["greedy"] = {name: search(teacher, name) for name in ADAPTERS}
    raw["until_eos"] = search(teacher, "base", until=models.EOS)
    return raw


def scores(teacher: Teacher) -> dict[str, Any]:
    """Logprobs of given tokens, and the likeliest ones."""
    raw: dict[str, Any] = {"prompt": {}, "top": {}, "following": {}, "logprobs": {}}
    for name in ADAPTERS:
        table = teacher.logprobs(data.PROMPT, name)
        order = np.argsort(-table[:-1], axis=-1, kind="stable")[:, :TOP]
        raw["prompt"][name] = table[np.arange(len(data.PROMPT) - 1), data.PROMPT[1:]]
        raw["top"][name] = {"ids": order, "logprobs": np.take_along_axis(table[:-1], order, -1)}
        raw["following"][name] = table[-1]
        raw["logprobs"][name] = logprobs(teacher, data.plain(), name)
    raw["wide_logprobs"] = logprobs(teacher, data.plain(data.WIDE), "a")
    return raw


def logprobs(teacher: Teacher, payload: TrainPayload, adapter: str) -> list[Array]:
    pieces = [
        np.take_along_axis(
            teacher.logprobs(datum.tokens.tolist(), adapter),
            datum.inputs["target_tokens"].reshape(len(datum.tokens), -1),
            -1,
        )
        for datum in payload.data
    ]
    return [p.reshape(d.inputs["target_tokens"].shape) for p, d in zip(pieces, payload.data, strict=True)]


def all_losses(teacher: Teacher, known: Expected) -> dict[str, Any]:
    """Each loss under "a"; and under their own names, requests of more targets, other adapters and parts."""
    found = {name: answer(teacher, data.payload(name, known), "a") for name in data.LOSSES}
    found |= {f"wide {name}": answer(teacher, data.wide(name, known), "a") for name in data.WIDE_LOSSES}
    found |= {f"weighted {name}": answer(teacher, data.weighted(), name) for name in ("b", "head")}
    found["last"] = answer(teacher, data.weighted(data.DATA[3:]), "a")
    return found


def answer(teacher: Teacher, payload: TrainPayload, adapter: str) -> dict[str, Any]:
    """A `LossAnswer`."""
    return _packed(payload, teacher.answer(payload, adapter))


def full(teacher: Teacher) -> dict[str, Any] | None:
    """By all parameters. transformers names the stacked experts of a mixture otherwise than its files do."""
    if models.FAMILIES[teacher.family].mixtures:
        return None
    payload = data.weighted()
    return _packed(payload, teacher.reference.full_answer(payload, dict(models.weights(teacher.family))))


def _packed(payload: TrainPayload, found: Answer) -> dict[str, Any]:
    """Our own losses, which engines use, must agree on the value."""
    own = [
        losses.evaluate(payload.loss_fn, lp.astype(np.float32), d.inputs, payload.loss_config)
        for lp, d in zip(found.logprobs, payload.data, strict=True)
    ]
    weight = sum(float(np.abs(one.grad).sum()) for one in own)
    if abs(sum(one.total for one in own) - found.total) > 1e-5 * weight:
        raise AssertionError(f"{payload.loss_fn}: openrl.losses and the reference differ")
    norm = float(np.linalg.norm(flat(list(found.gradients.values()))))
    return {"total": found.total, "weight": weight, "norm": norm, "sketch": sketch(found.gradients)}


def steps(teacher: Teacher) -> dict[str, list[float]]:
    """Losses before each step of Adam, in float64, and after the last (training-semantics 3.1)."""
    payload = data.weighted()
    theta = {name: value.astype(np.float64) for name, value in teacher.adapters["a"].items()}
    m, v = ({name: np.zeros_like(value) for name, value in theta.items()} for _ in range(2))
    totals, weights = [], []
    for t in range(1, STEPS + 2):
        found = teacher.answer(payload, "a", theta)
        totals.append(found.total)
        weights.append(float(sum(np.abs(d.inputs["weights"]).sum() for d in payload.data)))
        for name, g in found.gradients.items():
            m[name] = 0.9 * m[name] + 0.1 * g
            v[name] = 0.95 * v[name] + 0.05 * g * g
            root = np.sqrt(v[name] / (1 - 0.95**t)) + EPS
            theta[name] = theta[name] - LEARNING_RATE * (m[name] / (1 - 0.9**t)) / root
    return {"totals": totals, "weights": weights}


def search(teacher: Teacher, adapter: str, until: int | None = None) -> dict[str, Any]:
    """The first prompt of a fixed row whose continuation has clear margins and not always the same token; with `until`,
    one that ends with that token instead."""
    for number in range(200):
        names = [f"greedy {adapter} {until} {number} {i}" for i in range(_TOGETHER)]
        prompts = np.array([data.tokens(name, _PROMPT) for name in names])
        for row, logprobs in continuations(teacher, prompts, adapter, until):
            prompt, tokens = row[:_PROMPT].tolist(), row[_PROMPT:].tolist()
            return {"prompt": prompt, "tokens": tokens, "logprobs": logprobs.tolist()}
    raise AssertionError(f"no prompt of {adapter} has clear margins")


def continuations(teacher: Teacher, rows: Array, adapter: str, until: int | None) -> Iterator[tuple[Array, Array]]:
    """Of the prompts `rows` [R, N], those that go on as `search` wants it: all their tokens, the new ones' logprobs."""
    logprobs = np.zeros((len(rows), 0))
    for step in range(1, TOKENS + 1):
        following = teacher.following(rows, adapter)
        order = np.sort(following, axis=-1)
        best = following.argmax(-1)
        rows = np.concatenate([rows, best[:, None]], axis=1)
        logprobs = np.concatenate([logprobs, order[:, -1:]], axis=1)
        drawn = rows[:, _PROMPT:]
        repeats = step - np.array([len(set(row)) for row in drawn.tolist()])
        good = (order[:, -1] - order[:, -2] > MARGIN) & (repeats <= TOKENS - DISTINCT)
        ended = best == until if until is not None else np.full(len(rows), step == TOKENS)
        if until is None:
            good &= best >= models.FIRST
        yield from ((rows[i], logprobs[i]) for i in np.flatnonzero(good & ended & (step > 2)))
        rows, logprobs = rows[good & ~ended], logprobs[good & ~ended]
        if not len(rows):
            return


# ---- the file ----


def dump(raw: Mapping[str, Any]) -> str:
    """JSON with eight digits, and a line for each piece, so that a change shows where it is."""
    families = []
    for family, answers in raw.items():
        lines = [f"    {json.dumps(key)}: {json.dumps(rounded(value))}" for key, value in answers.items()]
        families.append(f"  {json.dumps(family)}: {{\n" + ",\n".join(lines) + "\n  }")
    return "{\n" + ",\n".join(families) + "\n}\n"


def rounded(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: rounded(inner) for key, inner in value.items()}
    if isinstance(value, np.ndarray):
        return rounded(value.tolist())
    if isinstance(value, list):
        return [rounded(inner) for inner in value]
    return float(f"{value:.8g}") if isinstance(value, float) else value


def main(families: list[str]) -> None:
    raw: dict[str, Any] = json.loads(FILE.read_text()) if FILE.exists() else {}
    for family in families or list(models.FAMILIES):
        with tempfile.TemporaryDirectory() as root:
            raw[family] = family_answers(Teacher(family, Path(root) / family))
        FILE.write_text(dump({name: raw[name] for name in models.FAMILIES if name in raw}))
        print(family, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])

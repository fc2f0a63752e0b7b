"""What this vLLM gets right with this model, found out by drawing."""

from __future__ import annotations

import math
from typing import Any

from .engine import Engine
from .link import Frame, attempt

_ID = 1  # the number of the adapter that the probe loads; openrl's own begin after it


class Probe:
    """Finds out, by drawing, what this vLLM gets right with this model: openrl's own engine does the rest."""

    def __init__(self, engine: Engine, prompt: list[int], vocab: int) -> None:
        self._engine = engine
        self._prompt = prompt
        self._vocab = vocab

    def can(self, head: Frame) -> dict[str, bool]:
        """`temperature`: logprobs are those of the scaled logits (S1); `truncated`: also with top-k or top-p (S2);
        `head`: an adapter of the head is applied, `head` being one that leaves a choice of two tokens."""
        plain = self.table(0)
        scaled = [value / 2 for value in plain]
        total = max(scaled) + math.log(sum(math.exp(value - max(scaled)) for value in scaled))
        wanted = [value - total for value in scaled]
        free = self._one(temperature=2.0, top_p=1.0, top_k=0)
        cut = self._one(temperature=2.0, top_p=1.0, top_k=1)
        return {
            "temperature": near(free[1], wanted[free[0]]),
            "truncated": near(cut[1], wanted[cut[0]]),
            "head": self._applies_heads(head),
        }

    def table(self, shift: int) -> list[float]:
        """All logprobs of the token after the prompt, when each token has a number that is `shift` higher."""
        prompt = [(id_ + shift) % self._vocab for id_ in self._prompt]
        job = self._job(temperature=1.0, top_p=1.0, top_k=0, top=self._vocab, prompt=prompt)
        ids, logprobs = self._engine.run([job])["probe"][3][0]
        table = [-math.inf] * self._vocab
        for id_, logprob in zip(ids, logprobs, strict=True):
            table[(id_ - shift) % self._vocab] = logprob
        return table

    def _applies_heads(self, head: Frame) -> bool:
        drawn, _ = attempt(self._draw_with, head["folder"])
        self._engine.forget(_ID)
        base = self._one(temperature=0.0, top_p=1.0, top_k=0)
        return drawn is not None and drawn[0] in head["tokens"] and near(drawn[1], 0.0) and base != drawn

    def _draw_with(self, folder: str) -> tuple[int, float]:
        """Raises whatever vLLM does with an adapter that it cannot take."""
        self._engine.load(_ID, "openrl-probe", folder)
        return self._one(temperature=0.0, top_p=1.0, top_k=0, adapter=_ID)

    def _one(self, **job: Any) -> tuple[int, float]:
        part = self._engine.run([self._job(**job)])["probe"]
        return part[1][0], part[2][0]

    def _job(self, **job: Any) -> Frame:
        usual = {"key": "probe", "prompt": self._prompt, "adapter": None, "seed": 0, "max_tokens": 1, "stop": []}
        return {**usual, "top": 0, "stream": False, **job}


def near(a: float, b: float) -> bool:
    """Whether two logprobs are meant to be the same."""
    return a == b or abs(a - b) < 0.02  # bf16 logits are rounded; what is looked for is off by far more

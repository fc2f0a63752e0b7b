"""vLLM's life: started, watched, started again after a crash or a hang with growing pauses, and reported."""

from __future__ import annotations

import logging
import shutil
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from openrl.backends.base import VllmSpec
from openrl.backends.vllm.plan import Opening
from openrl.backends.vllm.process import SCRIPT, Child, Frame
from openrl.checkpoints.peft import HEAD_NAME, write_adapter
from openrl.errors import BackendFault, ModelError
from openrl.types import LoraSpec, SamplerReport

log = logging.getLogger(__name__)

_FIRST_PAUSE, _LONGEST_PAUSE = 1.0, 60.0  # seconds before a start that follows a failure
_HOPELESS = 5  # failures in a row, without a token between them, after which samples are refused
_START_SECONDS = 1800.0  # loading, compiling, capturing graphs
_IN_WORDS = {"truncated": "top-p and top-k", "head": "adapters of the head", "weights": "whole models"}


@dataclass(frozen=True, slots=True)
class Skills:
    """What this vLLM was found to get right with this model: by the child's `Probe`, `weights` when it was first to
    take others (`child.weights`)."""

    temperature: bool
    truncated: bool
    head: bool
    weights: bool = True


class Life:
    """One vLLM after another. `wake` is called from other threads when there is something to `take`."""

    def __init__(self, opening: Opening, python: Path, spec: VllmSpec, wake: Callable[[], None]) -> None:
        self.opening = opening
        self.skills = Skills(temperature=False, truncated=False, head=False)
        self._weights = True  # whether it gets other weights right
        self._python = python
        self._spec = spec
        self._wake = wake
        self._child: Child | None = None
        self._version = ""
        self._state = "starting"
        self._detail = ""
        self._restarts = 0
        self._failures = 0
        self.planned = False  # the child was ended on purpose
        self._unusable = ""  # what the child said of why it cannot start
        self._due = 0.0  # when to start the next one

    @property
    def report(self) -> SamplerReport:
        name = f"vLLM {self._version}".rstrip()
        return SamplerReport(name, self._state, self._detail or self.opening.where, self._restarts)

    @property
    def ready(self) -> bool:
        return self._state == "ready"

    @property
    def hopeless(self) -> bool:
        """Whether it failed so often that nobody should wait for it."""
        return self._state == "failed"

    @property
    def eventful(self) -> bool:
        """Whether `take` has something to do."""
        return time.monotonic() >= self._due if self._child is None else self._child.eventful

    def open(self) -> None:
        """Start it for the first time and wait until it is ready. Raises ModelError, with the end of its log."""
        shutil.rmtree(self._spec.scratch, ignore_errors=True)
        self._spec.scratch.mkdir(parents=True)
        self._start()
        assert self._child is not None
        frame = self._child.wait(_START_SECONDS)
        if frame is not None and frame["op"] == "ready":
            self._begin(frame)
            return
        why = str(frame["error"]) if frame is not None else ""
        if frame is None and not self._child.over:
            why = f"not ready after {_START_SECONDS:g} s"
        self._child.kill()
        self._child.close()
        raise ModelError(
            f"vLLM cannot start with {self._python}: {why or self._child.epitaph()}.",
            f"The end of its log ({self._log}):\n{self._child.tail()}\n"
            "Other memory shares: --vllm-memory-fraction. Without vLLM: --sampler engine.",
        )

    def take(self) -> tuple[list[Frame], bool]:
        """What the child sent about its work, and whether it has ended: then all that it had in hand is lost."""
        if self._child is None:
            if self.eventful:
                self._try_again()
            return [], False
        frames = [frame for frame in self._child.take() if not self._noted(frame)]
        if any(frame["op"] == "drawn" for frame in frames):
            self._failures = 0
        if not self._child.over:
            return frames, False
        self._bury(self._child)
        return frames, True

    def send(self, frame: Mapping[str, Any]) -> None:
        """To the child, which must be ready."""
        assert self._child is not None
        self._child.send(frame)

    def widen(self, rank: int) -> None:
        """End this vLLM and start one with room for adapters of `rank`."""
        self.opening = self.opening.with_rank(rank)
        self.renew(f"to make room for adapters of rank {rank}")

    def renew(self, purpose: str) -> None:
        """End this vLLM and start another."""
        assert self._child is not None
        log.warning("vLLM is started again %s", purpose)
        self.planned = True
        self._state, self._detail = "restarting", purpose
        self._child.kill()

    def lose_weights(self) -> None:
        """It gets other weights wrong: no vLLM of this kind is to take them again."""
        self._weights = False
        self._tell_skills(replace(self.skills, weights=False))

    def fault(self) -> BackendFault:
        """Why nothing can be drawn."""
        return BackendFault(
            f"vLLM fails again and again: {self._detail}",
            f"Its log is {self._log}. It is tried again every {_LONGEST_PAUSE:g} s; --sampler engine does without it.",
        )

    def close(self) -> None:
        if self._child is not None:
            self._child.close()

    # ---- from start to end ----

    @property
    def _log(self) -> Path:
        return self._spec.scratch / "vllm.log"

    def _start(self) -> None:
        if self._log.exists():
            self._log.replace(self._log.with_suffix(".before.log"))
        command = [str(self._python), "-u", str(SCRIPT)]
        try:
            self._child = Child(command, self._log, self._wake, self._spec.hang_seconds, _START_SECONDS)
        except OSError as error:
            raise ModelError(f"vLLM's Python cannot be run: {error}.", "Check --vllm-python.") from error
        self.planned, self._unusable = False, ""
        self._child.send({**asdict(self.opening), "probe": self._probe()})

    def _try_again(self) -> None:
        try:
            self._start()
        except ModelError as error:
            self._postpone(str(error))

    def _probe(self) -> Frame:
        """What the child tries itself with: a prompt, and an adapter of the head that makes one of two tokens sure."""
        folder, vocab = self._spec.scratch / "probe", self.opening.vocab
        tokens = [vocab // 3, vocab // 2]
        if not folder.exists():
            folder.mkdir()
            b = np.zeros((vocab, 1), np.float32)
            b[tokens, 0] = 100.0, -100.0  # whichever sign the sum of the hidden state has, one of them wins
            tensors = {f"{HEAD_NAME}.lora_A": np.ones((1, self.opening.hidden), np.float32), f"{HEAD_NAME}.lora_B": b}
            write_adapter(folder, LoraSpec(rank=1, seed=0, train_attn=False, train_mlp=False), tensors, "")
        prompt = [1, vocab // 5, vocab // 7]
        return {"prompt": prompt, "head": {"folder": str(folder.absolute()), "tokens": tokens}}

    def _noted(self, frame: Frame) -> bool:
        """Whether a frame was about the child itself."""
        if frame["op"] == "ready":
            self._begin(frame)
        elif frame["op"] == "unusable":
            self._unusable = f"vLLM cannot start: {frame['error']}"
        return frame["op"] in ("ready", "unusable")

    def _begin(self, frame: Frame) -> None:
        self._version = frame["vllm"]
        self._state, self._detail = "ready", ""
        self._tell_skills(Skills(**frame["can"], weights=self._weights))

    def _tell_skills(self, skills: Skills) -> None:
        self.skills = skills
        left = [_IN_WORDS.get(name, name) for name, able in asdict(skills).items() if not able]
        if left and self.ready:
            self._detail = f"{self.opening.where}; openrl's engine does what it gets wrong: {', '.join(left)}"
            log.warning("vLLM %s with this model: %s", self._version, self._detail)

    def _bury(self, child: Child) -> None:
        """Note how the child ended, and when to start the next."""
        self._child = None
        self._restarts += 1
        if self.planned:
            self._due = 0.0
        else:
            self._postpone(self._unusable or f"vLLM {child.epitaph()}")
            log.error("the end of its log:\n%s", child.tail())

    def _postpone(self, why: str) -> None:
        """Start the next one after a pause that grows with each failure in a row."""
        self._failures += 1
        pause = min(_LONGEST_PAUSE, _FIRST_PAUSE * 2 ** (self._failures - 1))
        self._due = time.monotonic() + pause
        self._state, self._detail = "failed" if self._failures >= _HOPELESS else "restarting", why
        log.error("%s; it is started again in %g s", why, pause)
        timer = threading.Timer(pause, self._wake)
        timer.daemon = True
        timer.start()

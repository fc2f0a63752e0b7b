"""vLLM as a further side of the sampling benchmark: the child process that the server samples with, driven directly."""

from __future__ import annotations

import tempfile
import threading
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import peft
import torch
import transformers

from openrl.backends.base import BackendSpec, VllmSpec
from openrl.backends.vllm.life import Life
from openrl.backends.vllm.plan import plan
from openrl.backends.vllm.process import Frame
from openrl.bench.workload import Tokens
from openrl.types import DeviceReport, ModelInfo

# Our side adapts the head, too, which is to vLLM's advantage.
_TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
_CONTEXT = 2048
_ROWS = 64
_KV_TOKENS = 1 << 16
_ADAPTER = 2  # its number; the child's own probe has 1


class VllmSide:
    """vLLM under the interpreter `python`, with an adapter of the given rank."""

    def __init__(self, python: Path, folder: Path, rank: int, threads: int) -> None:
        self._scratch = tempfile.TemporaryDirectory(prefix="openrl-vllm-")
        self._woken = threading.Event()
        self._keys = 0
        scratch = Path(self._scratch.name)
        vllm = VllmSpec(scratch / "vllm", python, hang_seconds=600)
        spec = BackendSpec(folder, "cpu", "bfloat16", threads, 0, _ROWS, _KV_TOKENS)
        config = transformers.AutoConfig.from_pretrained(folder)
        context = min(_CONTEXT, config.max_position_embeddings)
        info = ModelInfo(config.vocab_size, context, rank, 0, config.model_type)
        report = DeviceReport("torch", "cpu", "bfloat16", threads, 0)
        opening = plan(spec, vllm, info, report).with_rank(rank)
        self._life = Life(opening, python, vllm, self._woken.set)
        self._life.open()
        adapter = _adapter(folder, scratch / "adapter", rank)
        self._life.send({"op": "adapter", "id": _ADAPTER, "name": "bench", "folder": str(adapter)})

    def sample(self, prompts: Sequence[Tokens], new_tokens: int) -> int:
        """Draw `new_tokens` for each prompt; returns how many tokens came."""
        left: set[str] = set()
        for prompt in prompts:
            self._keys += 1
            left.add(str(self._keys))
            self._life.send(_draw(str(self._keys), prompt, new_tokens))
        tokens = 0
        while left:
            self._woken.wait()
            self._woken.clear()
            frames, ended = self._life.take()
            if ended:
                raise RuntimeError(f"vLLM ended: {self._life.report.detail}")
            for part in [part for frame in frames if frame["op"] == "drawn" for part in frame["parts"]]:
                left.discard(part[0])
                tokens += len(part[1])
        return tokens

    def close(self) -> None:
        """End vLLM."""
        self._life.close()
        self._scratch.cleanup()


def _draw(key: str, prompt: Tokens, new_tokens: int) -> Frame:
    usual: Frame = {"op": "draw", "adapter": _ADAPTER, "temperature": 1.0, "top_p": 1.0, "top_k": -1, "stop": []}
    return usual | {
        "key": key,
        "prompt": prompt.tolist(),
        "seed": None,
        "max_tokens": new_tokens,
        "top": 0,
        "stream": False,
    }


def _adapter(folder: Path, into: Path, rank: int) -> Path:
    """A PEFT folder with a fresh adapter for the model."""
    base = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PEFT still uses names that transformers has renamed
        model: Any = peft.get_peft_model(base, peft.LoraConfig(r=rank, lora_alpha=32, target_modules=_TARGETS))
        model.save_pretrained(into)
    return into

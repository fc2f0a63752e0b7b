"""vLLM as a further side of the sampling benchmark: in an environment of its own, through a pipe."""

from __future__ import annotations

import json
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import peft
import torch
import transformers

from openrl.bench.workload import Example, Tokens

_SCRIPT = Path(__file__).with_name("vllm_side.py")
# vLLM adapts no head; ours does, which is to its advantage.
_TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


class VllmSide:
    """vLLM under the interpreter `python`, with an adapter of the given rank. Samples only."""

    def __init__(self, python: Path, folder: Path, rank: int, threads: int) -> None:
        self._scratch = tempfile.TemporaryDirectory(prefix="openrl-vllm-")
        adapter = _adapter(folder, Path(self._scratch.name) / "adapter", rank)
        command = [str(python), str(_SCRIPT), str(folder), str(adapter), str(rank), str(threads)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._read()  # ready

    def train_step(self, batch: Sequence[Example]) -> None:
        raise NotImplementedError("vLLM does not train")

    def sample(self, prompts: Sequence[Tokens], new_tokens: int) -> int:
        """Draw `new_tokens` for each prompt; returns how many tokens came."""
        request = {"prompts": [prompt.tolist() for prompt in prompts], "new_tokens": new_tokens}
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return int(self._read()["tokens"])

    def close(self) -> None:
        """End vLLM."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(60)
        self._scratch.cleanup()

    def _read(self) -> dict[str, Any]:
        """The next answer; vLLM's own lines on stdout are passed over."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):
                return json.loads(line)
        raise RuntimeError(f"vLLM ended with status {self._process.wait()}")


def _adapter(folder: Path, into: Path, rank: int) -> Path:
    """A PEFT folder with a fresh adapter for the model."""
    base = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    model: Any = peft.get_peft_model(base, peft.LoraConfig(r=rank, lora_alpha=32, target_modules=_TARGETS))
    model.save_pretrained(into)
    return into

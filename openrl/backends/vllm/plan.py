"""Who gets which memory, and what vLLM is opened with: plain arithmetic over the model's config."""

from __future__ import annotations

import importlib.util
import json
import math
import re
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from openrl.backends.base import BackendSpec, VllmSpec
from openrl.errors import ModelError
from openrl.types import DeviceReport, ModelInfo

# Ranks that vLLM makes room for; an adapter of another one takes the next.
RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
_FIRST_RANK = 32  # the usual one; a higher one costs a restart when it first comes
ADAPTERS = 8  # held at a time: room for them is taken at the start, also for those that never come
_SHARED, _OWN = 0.45, 0.9  # of a GPU's memory, where training has the rest and where it has not
_GIB = 1 << 30
_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_BLOCK = 128  # tokens in a block of vLLM's KV cache on a CPU: each sequence's last one is half empty


@dataclass(frozen=True, slots=True)
class Opening:
    """What vLLM is opened with; `openrl.backends.vllm.child` reads it as JSON."""

    folder: str
    dtype: str
    vocab: int
    hidden: int  # size of the head's input
    context: int  # tokens of the longest sequence
    rows: int  # sequences drawn together
    adapters: int
    rank: int
    fraction: float  # of the device's memory
    gpu: int | None
    eager: bool
    eos: tuple[int, ...]  # ids that end a sequence where a request names no stop of its own
    env: dict[str, str]
    where: str  # in words

    def with_rank(self, rank: int) -> Opening:
        """With room for adapters of this rank."""
        return replace(self, rank=next((legal for legal in RANKS if legal >= rank), rank))


def plan(spec: BackendSpec, vllm: VllmSpec, info: ModelInfo, report: DeviceReport) -> Opening:
    """What vLLM is opened with beside a training half that is open."""
    config = _config(spec.folder)
    on_gpu = report.device.startswith("cuda")
    fraction = _fraction(vllm, report.device)
    kv_gib = math.ceil((spec.max_kv_tokens + spec.max_sample_rows * _BLOCK) * _kv_bytes(config, report.dtype) / _GIB)
    gpu = (vllm.gpu if vllm.gpu is not None else _index(report.device)) if on_gpu else None
    return Opening(
        folder=str(spec.folder),
        dtype=report.dtype,
        vocab=info.vocab_size,
        hidden=int(config["hidden_size"]),
        context=min(info.max_context, spec.max_kv_tokens),
        rows=spec.max_sample_rows,
        adapters=ADAPTERS,
        rank=_FIRST_RANK,
        fraction=fraction,
        gpu=gpu,
        eager=not on_gpu,
        eos=_eos(spec.folder, config),
        env=_environment(report, kv_gib),
        where=f"cuda:{gpu}, {fraction:.0%} of its memory" if on_gpu else f"cpu, {kv_gib} GiB of KV cache",
    )


def training_share(vllm: VllmSpec, device: str) -> float:
    """Share of the memory of training's GPU that is left to training."""
    return 1.0 if _has_own(vllm, device) else 1.0 - _fraction(vllm, device)


def python_of(vllm: VllmSpec) -> Path:
    """The interpreter that runs vLLM. Raises ModelError with what to do where there is none."""
    if vllm.python is not None:
        return vllm.python
    if importlib.util.find_spec("vllm") is None:
        raise ModelError(
            "vLLM was asked for as the sampler, but this Python has none.",
            "Install it (pip install 'openrl[cuda]'), give the Python that has it with --vllm-python PATH, "
            "or take --sampler engine.",
        )
    return Path(sys.executable)


def _environment(report: DeviceReport, kv_gib: int) -> dict[str, str]:
    env = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # its engine in the child itself, which then is all there is to watch
        "VLLM_USE_V2_MODEL_RUNNER": "0",  # the sampler that openrl's tests run
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    if not report.device.startswith("cuda"):
        env["VLLM_CPU_KVCACHE_SPACE"] = str(kv_gib)
        env["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"  # pinned threads would hold cores that training shares
        env["OMP_NUM_THREADS"] = str(report.threads)
    return env


def _fraction(vllm: VllmSpec, device: str) -> float:
    return vllm.memory_fraction or (_OWN if _has_own(vllm, device) else _SHARED)


def _has_own(vllm: VllmSpec, device: str) -> bool:
    """Whether vLLM has a GPU to itself."""
    return device.startswith("cuda") and vllm.gpu not in (None, _index(device))


def _index(device: str) -> int:
    """Of the first GPU in "cuda:0", or "cuda:0-3" and what else is said of it."""
    digits = re.match(r"cuda:(\d+)", device)
    return int(digits[1]) if digits else 0


def _config(folder: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return config.get("text_config") or config


def _eos(folder: Path, config: dict[str, Any]) -> tuple[int, ...]:
    """End-of-sequence ids: of the generation config where there is one, else of the model config."""
    file = folder / "generation_config.json"
    told = json.loads(file.read_text()).get("eos_token_id") if file.exists() else None
    eos: int | list[int] | None = told if told is not None else config.get("eos_token_id")
    return () if eos is None else (eos,) if isinstance(eos, int) else tuple(eos)


def _kv_bytes(config: dict[str, Any], dtype: str) -> int:
    """Of keys and values of one token."""
    heads = int(config["num_attention_heads"])
    size = int(config.get("head_dim") or config["hidden_size"] // heads)
    kv_heads = int(config.get("num_key_value_heads") or heads)
    return 2 * int(config["num_hidden_layers"]) * kv_heads * size * _BYTES[dtype]

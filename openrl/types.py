"""Ids and nouns of the project as frozen dataclasses: what every layer speaks.

Bytes become these types at the edge (`openrl.wire`) and stay so down to the device. Arrays are numpy, C-contiguous.
Shapes in comments: N tokens of one datum or prompt, K targets a position, T sampled tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, NewType

import numpy as np
import numpy.typing as npt

SessionId = NewType("SessionId", str)
RunId = NewType("RunId", str)
SamplerId = NewType("SamplerId", str)
RequestId = NewType("RequestId", str)

IntArray = npt.NDArray[np.int32] | npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float32]
Array = npt.NDArray[Any]


class Op(StrEnum):
    """Kinds of accepted requests; the values are the wire's own words."""

    CREATE_RUN = "create_model"
    FORWARD = "forward"
    FORWARD_BACKWARD = "forward_backward"
    OPTIM_STEP = "optim_step"
    SAVE_STATE = "save_weights"
    SAVE_SAMPLER = "save_weights_for_sampler"
    SAVE_EXTERNAL = "save_weights_external"
    LOAD_STATE = "load_weights"
    UNLOAD = "unload_model"
    SAMPLE = "sample"


class CheckpointKind(StrEnum):
    """What a checkpoint folder holds; the values are the middle segment of a `tinker://` path."""

    TRAINING = "weights"
    SAMPLER = "sampler_weights"
    EXTERNAL = "external_weights"


# ---- training ----


@dataclass(frozen=True, slots=True)
class LoraSpec:
    """A LoRA adapter's shape. alpha is 32 always (A1); the seed is always set, so that creation can be replayed."""

    rank: int
    seed: int
    train_attn: bool = True
    train_mlp: bool = True
    train_unembed: bool = True


@dataclass(frozen=True, slots=True)
class Datum:
    """One training sequence with all that its loss needs (L1, L2).

    `tokens` is int32 [N]. `inputs` are dense arrays whose first dimension is N: `target_tokens` int64 [N] or [N, K],
    all others float32 of the shapes in L14.
    """

    tokens: npt.NDArray[np.int32]
    inputs: Mapping[str, Array]


@dataclass(frozen=True, slots=True)
class TrainPayload:
    """The content of one `forward` or `forward_backward` request."""

    data: tuple[Datum, ...]
    loss_fn: str
    loss_config: Mapping[str, float | str] = field(default_factory=dict[str, "float | str"])


@dataclass(frozen=True, slots=True)
class AdamParams:
    """AdamW hyperparameters of one step (training-semantics 3.1); `grad_clip_norm` <= 0 means no clipping."""

    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0


@dataclass(frozen=True, slots=True)
class TrainOutput:
    """Result of a pass: per datum the float32 logprobs of its targets ([N] or [N, K]), and metrics `name:reduction`."""

    logprobs: tuple[FloatArray, ...]
    metrics: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class OptimOutput:
    """Result of an optimizer step: metrics such as `grad_norm:mean`."""

    metrics: Mapping[str, float]


# ---- sampling ----


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to draw tokens (S1-S12).

    `stop` None means the model's end-of-sequence tokens; an empty tuple means no stop at all, not even those (S9).
    `max_tokens` None means up to the context limit. `top_k` -1 means all.
    """

    max_tokens: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    stop: tuple[str, ...] | tuple[int, ...] | None = None
    seed: int | None = None


@dataclass(frozen=True, slots=True)
class SamplePayload:
    """The content of one `asample` request. `prompt` is int32 [N]."""

    prompt: npt.NDArray[np.int32]
    num_samples: int = 1
    params: SamplingParams = SamplingParams()
    prompt_logprobs: bool = False
    topk_prompt_logprobs: int = 0
    topk_sample_logprobs: int = 0


@dataclass(frozen=True, slots=True)
class TopK:
    """Most likely tokens a position, descending: `ids` int32 [rows, k], `logprobs` float32 [rows, k].

    Empty cells (position 0 of a prompt) hold id 0 and logprob -99999.0 (T34).
    """

    ids: npt.NDArray[np.int32]
    logprobs: FloatArray


@dataclass(frozen=True, slots=True)
class SampledSequence:
    """One drawn sequence: `tokens` int32 [T], `logprobs` float32 [T]; the token that stopped it is included (S8)."""

    tokens: npt.NDArray[np.int32]
    logprobs: FloatArray
    stop_reason: str  # "stop" | "length"
    topk: TopK | None = None


@dataclass(frozen=True, slots=True)
class SampleOutput:
    """Result of one `asample`: `num_samples` sequences; `prompt_logprobs` float32 [N] with NaN at 0 (S5)."""

    sequences: tuple[SampledSequence, ...]
    prompt_logprobs: FloatArray | None = None
    topk_prompt: TopK | None = None


# ---- models ----


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What the daemon must know of a base model to check requests before they reach a device."""

    vocab_size: int
    max_context: int  # tokens, prompt and completion together
    max_lora_rank: int
    parameters: int  # number of weights
    family: str  # Hugging Face `model_type`


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A base model to serve: `name` is what clients call it, `source` how the user named it.

    `source` is an embedded model's name, a folder, a `.gguf` file or a hub id; `aliases` are further served names.
    """

    name: str
    source: str
    aliases: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class DeviceReport:
    """What a worker says of its device once it is ready, for `openrl status`."""

    backend: str
    device: str  # "cpu", "cuda:0"
    dtype: str  # compute dtype of the base model
    threads: int
    memory_bytes: int  # resident memory of the worker after loading


@dataclass(frozen=True, slots=True)
class AdapterRef:
    """A sampler's adapter: `key` is unique for its content and never reused; `folder` holds the PEFT files."""

    key: str
    folder: Path

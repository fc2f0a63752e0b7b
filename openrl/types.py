"""Ids and nouns of the project as frozen dataclasses: what every layer speaks.

Bytes become these types at the edge (`openrl.wire`) and stay so down to the device. Arrays are numpy, C-contiguous.
Shapes in comments: N tokens of one datum or prompt, K targets a position, T sampled tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, Literal, NewType

import numpy as np
import numpy.typing as npt

SessionId = NewType("SessionId", str)
RunId = NewType("RunId", str)
SamplerId = NewType("SamplerId", str)
RequestId = NewType("RequestId", str)


def session_of(identity: RunId | SamplerId | RequestId) -> SessionId:
    """The session that a run, sampler or request belongs to: their ids begin with it, by convention of the wire."""
    return SessionId(identity.partition(":")[0])


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
    CREATE_CUSTOM_LOSS = "create_custom_loss"


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
class FullSpec:
    """All parameters train (F1). A run begins with the base model's own weights, so nothing else need be replayed.

    `kind` tells it from a `LoraSpec` once both are JSON.
    """

    kind: Literal["full"] = "full"

    @property
    def rank(self) -> None:
        """It has none (C9)."""
        return None


TrainSpec = LoraSpec | FullSpec


def spec_from(fields: Mapping[str, Any]) -> TrainSpec:
    """A spec from its fields, as `dataclasses.asdict` gave them. Raises TypeError for what is none."""
    return FullSpec(**fields) if fields.get("kind") == "full" else LoraSpec(**fields)


@dataclass(frozen=True, slots=True)
class Datum:
    """One training sequence with all that its loss needs (L1, L2).

    `tokens` is int32 [N]. `inputs` are dense arrays whose first dimension is N: `target_tokens` int64 [N] or [N, K],
    all others float32 of the shapes in L14. Those of a custom loss are as the client sent them, int64 or float32.
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
class Cells:
    """Numbers in the cells of a table [rows, columns], which `shape` states.

    Dense: `values` [rows * columns], row by row. Sparse (CSR): `values` [M] are those of the listed cells alone, `crow`
    int64 [rows + 1] says where each row begins among them, `cols` int64 [M] in which column each is.
    """

    values: Array
    shape: tuple[int, int]
    crow: npt.NDArray[np.int64] | None = None
    cols: npt.NDArray[np.int64] | None = None

    def rows(self) -> npt.NDArray[np.int64]:
        """The row of each of `values`, ascending."""
        rows, columns = self.shape
        return np.repeat(np.arange(rows), columns if self.crow is None else np.diff(self.crow))


@dataclass(frozen=True, slots=True)
class SamplePayload:
    """The content of one `asample` request. `prompt` is int32 [N].

    `target_prompt_logprobs` holds token ids, int64 of shape [N - 1, K]: cell [i, j] is to be scored as prompt token
    i + 1, -1 asks for nothing. `prompt_alt_tokens_k` draws are to be made at every prompt token but the first.
    `prompt_logprobs_last_n` (1..N-1, None: all) limits `prompt_logprobs` and `topk_prompt_logprobs` to the last tokens.
    """

    prompt: npt.NDArray[np.int32]
    num_samples: int = 1
    params: SamplingParams = SamplingParams()
    prompt_logprobs: bool = False
    topk_prompt_logprobs: int = 0
    topk_sample_logprobs: int = 0
    target_prompt_logprobs: Cells | None = None
    prompt_alt_tokens_k: int = 0
    prompt_logprobs_last_n: int | None = None


@dataclass(frozen=True, slots=True)
class TopK:
    """Most likely tokens a position, descending: `ids` int32 [rows, k], `logprobs` float32 [rows, k].

    Empty cells (prompt positions that are not scored, such as 0) hold id 0 and logprob -99999.0 (T34).
    """

    ids: npt.NDArray[np.int32]
    logprobs: FloatArray


@dataclass(frozen=True, slots=True)
class AltTokens:
    """Independent draws at every prompt token but the first: `ids` int64 [N - 1, k], `logprobs` float32 [N - 1, k].

    Row i holds alternatives to prompt token i + 1, drawn with replacement at the request's temperature and without
    top-k or top-p; their logprobs are at temperature 1, as those of the prompt's own tokens.
    """

    ids: npt.NDArray[np.int64]
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
    """Result of one `asample`: `num_samples` sequences; `prompt_logprobs` float32 [N] with NaN at 0 (S5) and wherever
    else none was asked for. `target_prompt` has the request's shape and layout, 0.0 where it had -1."""

    sequences: tuple[SampledSequence, ...]
    prompt_logprobs: FloatArray | None = None
    topk_prompt: TopK | None = None
    target_prompt: Cells | None = None
    alt_tokens: AltTokens | None = None


# ---- models ----


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What the daemon must know of a base model to check requests before they reach a device."""

    vocab_size: int
    max_context: int  # tokens, prompt and completion together
    max_lora_rank: int
    parameters: int  # number of weights
    family: str  # Hugging Face `model_type`
    full_tuning: bool | None = None  # whether all parameters can be trained (F1); None: known once the model is opened
    projections: int = 0  # of the parameters, those of its layers' linear maps, which quantisation makes smaller


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
    device_bytes: int = 0  # that the worker has of a device with memory of its own; 0: it has none
    device_free_bytes: int = 0  # that such a device has left
    sampler: str = ""  # what samples and where, if it works in a process of its own
    quantize: str = "none"  # how the base model's linear layers are held, if not in `dtype`: "nf4"


@dataclass(frozen=True, slots=True)
class SamplerReport:
    """How a sampler is that works in a process of its own, for `openrl status`."""

    engine: str  # "vLLM 0.32.0"
    state: str  # starting | ready | restarting | failed
    detail: str  # where it computes, or why it does not
    restarts: int  # since the worker's start


@dataclass(frozen=True, slots=True)
class AdapterRef:
    """A sampler's weights: `key` is unique for their content and never reused; `folder` holds the files.

    These are an adapter in PEFT's form, or a whole model where the run trained all parameters
    (`openrl.checkpoints.full.is_full` tells).
    """

    key: str
    folder: Path

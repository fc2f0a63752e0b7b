"""JSON request bodies as they are on the wire, and what they mean in the project's own types.

Every field may be absent or null (older SDKs send only what the caller set, and nulls), so defaults are filled here;
`type` fields are not asked for (T40) and unknown fields are ignored. Wrong types are a `BadRequest`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field

from openrl.daemon.work import LoadState, NewRun, NewSession, SaveExternal, SaveSampler, SaveState
from openrl.errors import BadRequest
from openrl.types import AdamParams, SamplePayload, SamplingParams, SessionId
from openrl.validation import check_adam, check_checkpoint_name, check_optimizer, check_ttl
from openrl.wire.inputs import ModelInputBody, TensorBody

Sequence64 = Annotated[int, Field(ge=0, lt=2**63)]  # a seq_id as SQLite can hold it
Integer64 = Annotated[int, Field(ge=-(2**63), lt=2**63)]
DEFAULT_RANK = 32  # the client's own default

# ---- sessions ----


@dataclass(frozen=True, slots=True)
class CreateSessionBody:
    tags: tuple[str, ...] | None = None
    user_metadata: dict[str, Any] | None = None
    sdk_version: str | None = None
    project_id: str | None = None
    display_name: str | None = None

    def to_new(self) -> NewSession:
        return NewSession(
            self.sdk_version or "", self.tags or (), self.user_metadata, self.project_id, self.display_name
        )


@dataclass(frozen=True, slots=True)
class SessionBody:
    session_id: str


@dataclass(frozen=True, slots=True)
class FinishReason:
    type: Literal["success", "errored", "interrupted"] = "success"


@dataclass(frozen=True, slots=True)
class FinishSessionBody:
    reason: FinishReason | None = None
    detail: str | None = None


@dataclass(frozen=True, slots=True)
class TelemetryEvent:
    event: Any = None


@dataclass(frozen=True, slots=True)
class TelemetryBody:
    """Only what is counted; the rest can hold the user's key in clear and is never looked at (T52)."""

    events: list[TelemetryEvent] | None = None


# ---- runs ----


@dataclass(frozen=True, slots=True)
class LoraBody:
    rank: int | None = None
    seed: Integer64 | None = None
    train_unembed: bool | None = None
    train_mlp: bool | None = None
    train_attn: bool | None = None

    @property
    def wanted_rank(self) -> int:
        return DEFAULT_RANK if self.rank is None else self.rank


@dataclass(frozen=True, slots=True)
class CreateModelBody:
    session_id: str
    model_seq_id: Sequence64
    base_model: str
    user_metadata: dict[str, Any] | None = None
    lora_config: LoraBody | None = None
    optimizer_config: dict[str, Any] | None = None

    def to_new(self) -> NewRun:
        """A missing `lora_config` is the wire's word for full fine-tuning, and so is rank 0 (F1)."""
        lora = self.lora_config or LoraBody(rank=0)
        return NewRun(
            session_id=SessionId(self.session_id),
            model_seq_id=self.model_seq_id,
            base_model=self.base_model,
            rank=lora.wanted_rank,
            seed=lora.seed,
            train_attn=lora.train_attn is not False,
            train_mlp=lora.train_mlp is not False,
            train_unembed=lora.train_unembed is not False,
            optimizer=self.optimizer_config or {"type": "adamw"},
            user_metadata=self.user_metadata or {},
        )


@dataclass(frozen=True, slots=True)
class ModelBody:
    """`get_info` and `unload_model`."""

    model_id: str
    seq_id: Sequence64 | None = None


@dataclass(frozen=True, slots=True)
class AddressBody:
    """Whom a training request is for; the rest of its body may be wrong."""

    model_id: str
    seq_id: Sequence64


@dataclass(frozen=True, slots=True)
class AdamBody:
    learning_rate: float | None = None
    beta1: float | None = None
    beta2: float | None = None
    eps: float | None = None
    weight_decay: float | None = None
    grad_clip_norm: float | None = None
    type: str | None = None

    def to_params(self) -> AdamParams:
        names = ("learning_rate", "beta1", "beta2", "eps", "weight_decay", "grad_clip_norm")
        given = {name: getattr(self, name) for name in names}
        return AdamParams(**{name: value for name, value in given.items() if value is not None})


@dataclass(frozen=True, slots=True)
class OptimStepBody:
    """`adam_params`, or `optimizer_params` with a `type` (O9); neither means the defaults."""

    adam_params: AdamBody | None = None
    optimizer_params: AdamBody | None = None

    def to_adam(self) -> AdamParams:
        params = self.adam_params or self.optimizer_params or AdamBody()
        check_optimizer({"type": params.type or "adamw"}, "optimizer_params")
        adam = params.to_params()
        check_adam(adam)
        return adam


@dataclass(frozen=True, slots=True)
class SaveWeightsBody:
    path: str | None = None
    ttl_seconds: int | None = None
    overwrite: bool | None = None
    user_metadata: dict[str, str] | None = None

    def to_save(self) -> SaveState:
        if self.path is None:
            raise BadRequest("path is required: the name of the checkpoint")
        check_checkpoint_name(self.path)
        check_ttl(self.ttl_seconds)
        return SaveState(self.path, bool(self.overwrite), self.ttl_seconds, self.user_metadata)


@dataclass(frozen=True, slots=True)
class SaveSamplerBody:
    """`kind` "inflight" is served as a snapshot: it is never older than its own save (6.7)."""

    path: str | None = None
    sampling_session_seq_id: Sequence64 | None = None
    kind: Literal["snapshot", "inflight"] | None = None
    ttl_seconds: int | None = None
    user_metadata: dict[str, str] | None = None

    def to_save(self) -> SaveSampler:
        if self.path is None and self.sampling_session_seq_id is None:
            raise BadRequest("path (a name) or sampling_session_seq_id is required")
        if self.path is not None:
            check_checkpoint_name(self.path)
        check_ttl(self.ttl_seconds)
        return SaveSampler(self.path, self.sampling_session_seq_id, self.ttl_seconds, self.user_metadata)


@dataclass(frozen=True, slots=True)
class SaveExternalBody:
    path: str
    ttl_seconds: int | None = None
    age_encryption_recipients: tuple[str, ...] | None = None

    def to_save(self) -> SaveExternal:
        check_checkpoint_name(self.path)
        check_ttl(self.ttl_seconds)
        return SaveExternal(self.path, self.ttl_seconds, self.age_encryption_recipients or ())


@dataclass(frozen=True, slots=True)
class LoadAddressBody:
    """Both ways to address `load_weights` (7.3): into an existing model, or to create one in a session.

    `openrl_reader` is what the server itself puts in the place of the token before the body is stored.
    """

    model_id: str | None = None
    seq_id: Sequence64 | None = None
    session_id: str | None = None
    model_seq_id: Sequence64 | None = None
    path: Any = None  # whatever it is: a wrong one fails the future, not the call
    weights_access_token: str | None = None
    openrl_reader: Any = None


@dataclass(frozen=True, slots=True)
class LoadWeightsBody:
    path: str
    optimizer: bool | None = None
    base_model: str | None = None
    user_metadata: dict[str, Any] | None = None
    optimizer_config: dict[str, Any] | None = None
    openrl_reader: str | None = None

    def to_load(self) -> LoadState:
        check_optimizer(self.optimizer_config or {"type": "adamw"}, "optimizer_config")
        return LoadState(self.path, bool(self.optimizer), self.openrl_reader)


@dataclass(frozen=True, slots=True)
class WeightsInfoBody:
    tinker_path: str


@dataclass(frozen=True, slots=True)
class CopyWeightsBody:
    """Into a project (0.34.0+), or as a run of a session (0.26.2 to 0.30.4) (7.5)."""

    source_path: str
    destination_project_id: str | None = None
    session_id: str | None = None
    model_seq_id: Sequence64 | None = None
    ttl_seconds: int | None = None
    weights_access_token: str | None = None


@dataclass(frozen=True, slots=True)
class TtlBody:
    """null removes the limit, so the field has to be there."""

    ttl_seconds: int | None


@dataclass(frozen=True, slots=True)
class AdoptBody:
    """Our own: a checkpoint folder that lies in place, relative to the checkpoints folder."""

    folder: str


@dataclass(frozen=True, slots=True)
class RetrieveFutureBody:
    """Also the body of `cancel_future`."""

    request_id: str


@dataclass(frozen=True, slots=True)
class FuturesTarget:
    """One clone of a sampler."""

    sampling_session_id: str
    cloned_sampler_id: Sequence64 | None = None
    type: Literal["sampling_session"] = "sampling_session"


@dataclass(frozen=True, slots=True)
class RetrieveFuturesBody:
    """`timeout` in seconds; absent is the server's own."""

    target: FuturesTarget
    prev_cursor: Sequence64 | None = None
    timeout: float | None = None
    retrieved_request_ids: list[str] | None = None


# ---- sampling ----


@dataclass(frozen=True, slots=True)
class CreateSamplerBody:
    session_id: str
    sampling_session_seq_id: Sequence64
    base_model: str | None = None
    model_path: str | None = None


@dataclass(frozen=True, slots=True)
class SamplerAddressBody:
    sampling_session_id: str
    seq_id: Sequence64


@dataclass(frozen=True, slots=True)
class JoinSamplerBody:
    sampling_session_id: str


@dataclass(frozen=True, slots=True)
class SamplingParamsBody:
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: float | None = None
    stop: Any = None
    seed: Integer64 | None = None

    def to_params(self) -> SamplingParams:
        top_k = -1.0 if self.top_k is None else self.top_k
        if not top_k.is_integer():
            raise BadRequest(f"sampling_params.top_k must be a whole number, got {top_k}")
        return SamplingParams(
            max_tokens=self.max_tokens,
            temperature=1.0 if self.temperature is None else self.temperature,
            top_p=1.0 if self.top_p is None else self.top_p,
            top_k=int(top_k),
            stop=_stop(self.stop),
            seed=self.seed,
        )


def _stop(stop: Any) -> tuple[str, ...] | tuple[int, ...] | None:
    """Absent is the model's end-of-sequence tokens, an empty list is no stop at all (S9, T39)."""
    if stop is None:
        return None
    if isinstance(stop, str):
        return (stop,)
    if isinstance(stop, list):
        entries: list[Any] = stop
        if all(isinstance(entry, str) for entry in entries) or all(type(entry) is int for entry in entries):
            return tuple(entries)
    raise BadRequest(f"sampling_params.stop must be a string, a list of strings or a list of token ids, got {stop!r}")


@dataclass(frozen=True, slots=True)
class SampleBody:
    """`record_stability_info` is taken and not acted on: it asks to keep what only the loss `stable_reinforce` reads,
    the answer has no part of it, and that loss is refused in words (training-semantics 1.9). Recipes ask for it on
    every draw.
    """

    prompt: ModelInputBody
    sampling_params: SamplingParamsBody | None = None
    num_samples: int | None = None
    prompt_logprobs: bool | None = None
    topk_prompt_logprobs: int | None = None
    topk_sample_logprobs: int | None = None
    target_prompt_logprobs: TensorBody | None = None
    prompt_alt_tokens_k: int | None = None
    prompt_logprobs_last_n: int | None = None
    record_stability_info: bool | None = None

    def to_payload(self) -> SamplePayload:
        params = self.sampling_params or SamplingParamsBody()
        targets = self.target_prompt_logprobs
        return SamplePayload(
            prompt=self.prompt.to_tokens("prompt"),
            num_samples=1 if self.num_samples is None else self.num_samples,
            params=params.to_params(),
            prompt_logprobs=bool(self.prompt_logprobs),
            topk_prompt_logprobs=self.topk_prompt_logprobs or 0,
            topk_sample_logprobs=self.topk_sample_logprobs or 0,
            target_prompt_logprobs=None if targets is None else targets.to_cells("target_prompt_logprobs"),
            prompt_alt_tokens_k=self.prompt_alt_tokens_k or 0,
            prompt_logprobs_last_n=self.prompt_logprobs_last_n,
        )

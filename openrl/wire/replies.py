"""JSON answers as they are on the wire: what the SDK's response models ask for, made from the project's own types.

A field whose type is not nullable is left out rather than null, since the SDK refuses nulls there (T12, T29, T32).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from openrl.codec import as_text
from openrl.daemon.work import ModelStatus, Pending
from openrl.store.records import Checkpoint, Completion, Run, RunState, Sampler
from openrl.types import CheckpointKind, LoraSpec, RequestId, TrainSpec
from openrl.wire.identity import user_urn

# Switched on is only what is served (2.2). Values that the SDK has as defaults are stated where they matter to us.
CLIENT_CONFIG: Mapping[str, Any] = {
    "pjwt_auth_enabled": True,
    "credential_default_source": "api_key",
    "parallel_fwdbwd_chunks": True,
    "fwdbwd_max_chunk_len": 1024,
    "fwdbwd_max_chunk_bytes_count": 5_000_000,
    "billing_exception_max_pause_duration_sec": 0,
    "sample_no_retries": False,
    "sample_enable_stuck_detection": True,
    # For clients without the poller, of which each waiting sample holds one connection; this stays below the usual
    # limit of 1024 open files.
    "sample_max_concurrent_requests": 400,
    "sample_use_retrieve_futures": True,
    "sample_join_sampling_session": True,
    "create_model_via_load_weights": True,
}
DYNAMIC_CONFIG: Mapping[str, Any] = {
    "refresh_interval_sec": 300,
    "sample_cancel_enabled": True,
    "sample_cancel_max_batch_size": 64,
}


def client_config(*, remote: bool, custom_losses: bool) -> dict[str, Any]:
    """Every flag. Bodies are worth compressing only where clients come over a network (`remote`); `custom_losses`:
    whether the backend runs them."""
    return {**CLIENT_CONFIG, "proto_compress_fwdbwd": remote, "custom_loss_server_side": custom_losses}


def promise(request: RequestId) -> dict[str, Any]:
    """The answer to every call that takes time (4.1)."""
    return {"request_id": request}


def sample_promise(request: RequestId, num_samples: int) -> dict[str, Any]:
    """With an id for each sequence, exactly `num_samples` of them (T14)."""
    return {"request_id": request, "sample_sequence_ids": [f"{request}:{i}" for i in range(num_samples)]}


def try_again(request: RequestId, pending: Pending) -> dict[str, Any]:
    return {
        "type": "try_again",
        "request_id": request,
        "queue_state": pending.state,
        "queue_state_reason": pending.reason,
    }


def completions(ended: Sequence[Completion], prev_cursor: int) -> dict[str, Any]:
    """News of what ended, and the cursor that asks for what ends next (4.5). Without news it stays where it was."""
    return {
        "completions": [_completion(completion) for completion in ended],
        "cursor": ended[-1].number if ended else prev_cursor,
    }


def _completion(completion: Completion) -> dict[str, Any]:
    """With its size known, the client fetches a result in one call."""
    if completion.failed:
        return {"state": "failed", "request_id": completion.request}
    entry = {"state": "finished", "request_id": completion.request}
    return entry if completion.size is None else {**entry, "response_payload_uncompressed_size": completion.size}


def capabilities(models: Iterable[ModelStatus], *, custom_losses: bool) -> dict[str, Any]:
    """2.8; `max_lora_rank`, `full_tuning` (rank 0), `alias_of`, `state` and `custom_losses` are our own, which the SDK
    ignores."""
    return {"supported_models": [{**_capability(model), "custom_losses": custom_losses} for model in models]}


def _capability(model: ModelStatus) -> dict[str, Any]:
    usable = model.state != "failed"
    entry: dict[str, Any] = {"model_name": model.name, "trainable": usable, "sampleable": usable, "state": model.state}
    if model.alias_of is not None:
        entry["alias_of"] = model.alias_of
    if model.info is not None:
        entry["max_context_length"] = model.info.max_context
        entry["max_lora_rank"] = model.info.max_lora_rank
        if model.info.full_tuning is not None:
            entry["full_tuning"] = model.info.full_tuning
    return entry


def run_info(run: Run, model: ModelStatus | None) -> dict[str, Any]:
    """`get_info` (5.10). `model` is the status of the run's base model, None if it is no longer served."""
    data: dict[str, Any] = {"model_name": run.base_model}
    if model is not None:
        data["tokenizer_id"] = model.tokenizer_id
        if model.info is not None:
            data["arch"] = model.info.family
    return {
        "type": "get_info",
        "model_id": run.id,
        "model_data": data,
        "model_name": run.base_model,
        **_adaptation(run.spec),
        "optimizer_config": {"type": "adamw"},
    }


def training_run(run: Run) -> dict[str, Any]:
    """8.2. Metadata goes in as any JSON but comes back as strings (T24)."""
    return {
        "training_run_id": run.id,
        "base_model": run.base_model,
        "model_owner": user_urn(run.owner),
        **_adaptation(run.spec),
        "corrupted": run.state is RunState.BROKEN,
        "last_request_time": timestamp(run.last_request_at),
        "user_metadata": {key: as_text(value) for key, value in run.user_metadata.items()},
    }


def sampler(record: Sampler) -> dict[str, Any]:
    """8.4."""
    return {"sampler_id": record.id, "base_model": record.base_model, "model_path": record.model_path}


CHECKPOINT_TYPES: Mapping[CheckpointKind, str] = {
    CheckpointKind.TRAINING: "training",
    CheckpointKind.SAMPLER: "sampler",
    CheckpointKind.EXTERNAL: "external",
}


def checkpoint(record: Checkpoint) -> dict[str, Any]:
    """8.1."""
    answer: dict[str, Any] = {
        "checkpoint_id": f"{record.kind}/{record.name}",
        "checkpoint_type": CHECKPOINT_TYPES[record.kind],
        "time": timestamp(record.created_at),
        "tinker_path": record.path,
        "size_bytes": record.size_bytes,
        "public": record.public,
        "user_metadata": dict(record.user_metadata),
    }
    if record.expires_at is not None:
        answer["expires_at"] = timestamp(record.expires_at)
    return answer


def checkpoint_page(page: Iterable[Checkpoint], offset: int, limit: int, total: int) -> dict[str, Any]:
    """8.1, a list with its place in the whole."""
    cursor = {"offset": offset, "limit": limit, "total_count": total}
    return {"checkpoints": [checkpoint(record) for record in page], "cursor": cursor}


def weights_info(checkpoint: Checkpoint) -> dict[str, Any]:
    """7.4."""
    return {
        "base_model": checkpoint.base_model,
        **_adaptation(checkpoint.spec),
        **_trained(checkpoint.spec),
        "optimizer_config": {"type": "adamw"},
    }


def _adaptation(spec: TrainSpec) -> dict[str, Any]:
    """C9: a run that trains all parameters has no rank."""
    return {"is_lora": isinstance(spec, LoraSpec), "lora_rank": spec.rank}


def _trained(spec: TrainSpec) -> dict[str, bool]:
    if isinstance(spec, LoraSpec):
        return {"train_attn": spec.train_attn, "train_mlp": spec.train_mlp, "train_unembed": spec.train_unembed}
    return {"train_attn": True, "train_mlp": True, "train_unembed": True}


def timestamp(seconds: float) -> str:
    """RFC 3339 with an offset, without which the CLI crashes (T31)."""
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")

"""Probes of `RestClient` and `AdminClient`."""

from __future__ import annotations

import urllib.request
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
import tinker
from tinker import types

from compat.registry import Call, probe
from compat.stage import MODEL, PROJECT, TIMEOUT, Stage, close, step

# ---- runs ----


@probe("RestClient", "get_server_capabilities")
def get_server_capabilities(stage: Stage, call: Call) -> None:
    assert MODEL in [model.model_name for model in call().supported_models]


def _check_run(stage: Stage, run: types.TrainingRun) -> None:
    assert (run.training_run_id, run.base_model, run.lora_rank) == (stage.run, MODEL, 4)
    assert (run.is_lora, run.corrupted, run.user_metadata) == (True, False, {"n": "1"})
    assert abs((datetime.now(UTC) - run.last_request_time).total_seconds()) < 600
    assert run.last_checkpoint is not None
    assert run.last_sampler_checkpoint is not None
    assert run.last_checkpoint.checkpoint_type == "training"


@probe("RestClient", "get_training_run", "get_training_run_async")
def get_training_run(stage: Stage, call: Call) -> None:
    _check_run(stage, call(stage.run))
    with pytest.raises(tinker.NotFoundError):
        call("nobody:train:0")


@probe("RestClient", "get_training_run_by_tinker_path", "get_training_run_by_tinker_path_async")
def get_training_run_by_tinker_path(stage: Stage, call: Call) -> None:
    _check_run(stage, call(stage.trained.state))


@probe("RestClient", "list_training_runs", "list_training_runs_async")
def list_training_runs(stage: Stage, call: Call) -> None:
    """Pages add up to the whole; a project narrows it."""
    stage.new_trainer()
    whole = call(limit=100, offset=0, project_id=PROJECT)
    _check_run(stage, next(run for run in whole.training_runs if run.training_run_id == stage.run))
    total = whole.cursor.total_count
    assert total == len(whole.training_runs) >= 2
    pages = [call(limit=1, offset=offset, project_id=PROJECT).training_runs for offset in range(total)]
    assert [page[0].training_run_id for page in pages] == [run.training_run_id for run in whole.training_runs]
    assert call(project_id="no such project").training_runs == []


@probe("RestClient", "get_weights_info_by_tinker_path")
def get_weights_info_by_tinker_path(stage: Stage, call: Call) -> None:
    info = call(stage.trained.state)
    assert (info.base_model, info.is_lora, info.lora_rank) == (MODEL, True, 4)
    assert (info.train_attn, info.train_mlp, info.train_unembed) == (True, True, True)


# ---- checkpoints ----


@probe("RestClient", "list_checkpoints", "list_checkpoints_async")
def list_checkpoints(stage: Stage, call: Call) -> None:
    listed = {entry.tinker_path: entry for entry in call(stage.run).checkpoints}
    state, weights = listed[stage.trained.state], listed[stage.trained.weights]
    assert (state.checkpoint_id, state.checkpoint_type) == ("weights/state", "training")
    assert (weights.checkpoint_id, weights.checkpoint_type) == ("sampler_weights/weights", "sampler")
    assert state.size_bytes is not None
    assert weights.size_bytes is not None
    assert state.size_bytes > weights.size_bytes > 0
    assert state.time.tzinfo is not None


@probe("RestClient", "list_user_checkpoints", "list_user_checkpoints_async")
def list_user_checkpoints(stage: Stage, call: Call) -> None:
    newest = stage.save()
    page = call(limit=1000)
    assert page.checkpoints[0].tinker_path == newest
    assert page.cursor is not None
    assert page.cursor.total_count == len(page.checkpoints)
    second = call(limit=1, offset=1)
    assert second.checkpoints[0].tinker_path == page.checkpoints[1].tinker_path
    times = [entry.time for entry in page.checkpoints]
    assert times == sorted(times, reverse=True)


@probe("RestClient", "delete_checkpoint", "delete_checkpoint_async")
def delete_checkpoint(stage: Stage, call: Call) -> None:
    path = stage.save()
    call(stage.run, "/".join(path.split("/")[-2:]))
    _check_deleted(stage, path)


@probe("RestClient", "delete_checkpoint_from_tinker_path", "delete_checkpoint_from_tinker_path_async")
def delete_checkpoint_from_tinker_path(stage: Stage, call: Call) -> None:
    path = stage.save()
    call(path)
    _check_deleted(stage, path)


def _check_deleted(stage: Stage, path: str) -> None:
    assert stage.checkpoint(path) is None
    with pytest.raises(tinker.NotFoundError):
        stage.rest.get_weights_info_by_tinker_path(path).result(TIMEOUT)


@probe("RestClient", "publish_checkpoint_from_tinker_path", "publish_checkpoint_from_tinker_path_async")
def publish(stage: Stage, call: Call) -> None:
    path = stage.save()
    for _ in range(2):  # idempotent
        call(path)
        assert _public(stage, path)


@probe("RestClient", "unpublish_checkpoint_from_tinker_path", "unpublish_checkpoint_from_tinker_path_async")
def unpublish(stage: Stage, call: Call) -> None:
    path = stage.save()
    stage.rest.publish_checkpoint_from_tinker_path(path).result(TIMEOUT)
    for _ in range(2):
        call(path)
        assert not _public(stage, path)


def _public(stage: Stage, path: str) -> bool:
    entry = stage.checkpoint(path)
    assert entry is not None
    return entry.public


@probe("RestClient", "set_checkpoint_ttl_from_tinker_path", "set_checkpoint_ttl_from_tinker_path_async")
def set_checkpoint_ttl(stage: Stage, call: Call) -> None:
    path = stage.save()
    call(path, 7200)
    entry = stage.checkpoint(path)
    assert entry is not None
    assert entry.expires_at is not None
    assert 7000 < (entry.expires_at - datetime.now(UTC)).total_seconds() <= 7200
    call(path, None)
    entry = stage.checkpoint(path)
    assert entry is not None
    assert entry.expires_at is None
    with pytest.raises(tinker.BadRequestError):
        call(path, 60)


@probe("RestClient", "copy_weights", "copy_weights_async")
def copy_weights(stage: Stage, call: Call) -> None:
    copied = call(stage.trained.state, "other-project")
    assert copied.endswith("/weights/state")
    trainer = stage.service.create_training_client_from_state_with_optimizer(copied).result(TIMEOUT)
    close(step(trainer), stage.trained.later[0])
    run = copied.split("/")[2]
    listed = stage.rest.list_training_runs(limit=100, project_id="other-project").result(TIMEOUT).training_runs
    assert run in [entry.training_run_id for entry in listed]


@probe("RestClient", "get_external_weights_urls", "get_external_weights_urls_async")
def get_external_weights_urls(stage: Stage, call: Call) -> None:
    """Signed addresses that need no key, hold what they say, and stand for at least a quarter of an hour."""
    path = stage.trained.trainer.save_weights_external(stage.unique("urls")).result(TIMEOUT).path
    answer = call(path)
    assert {"adapter_config.json", "adapter_model.safetensors"} <= answer.urls.keys()
    assert (answer.expires - datetime.now(UTC)).total_seconds() > 15 * 60 - 5
    sizes = [len(urllib.request.urlopen(url).read()) for url in answer.urls.values()]
    entry = stage.checkpoint(path)
    assert entry is not None
    assert sum(sizes) == entry.size_bytes


# ---- sessions ----


@probe("RestClient", "get_session", "get_session_async")
def get_session(stage: Stage, call: Call) -> None:
    session = call(stage.session)
    assert stage.run in session.training_run_ids
    assert stage.sampler._sampling_session_id in session.sampler_ids
    assert session.user_metadata == {"suite": "compat"}
    assert session.display_name == "compat"


@probe("RestClient", "list_sessions", "list_sessions_async")
def list_sessions(stage: Stage, call: Call) -> None:
    service = stage.new_service("one more")
    service.create_sampling_client(base_model=MODEL).result(TIMEOUT)
    sessions = call(limit=1000).sessions
    assert stage.session in sessions
    assert len(sessions) == len(set(sessions)) >= 2
    assert call(limit=1, offset=1).sessions == sessions[1:2]


@probe("RestClient", "search_sessions")
def search_sessions(stage: Stage, call: Call) -> None:
    request = types.SessionSearchRequest(user_metadata={"suite": "compat"}, display_name="COMP", limit=200)
    found = next(entry for entry in call(request).sessions if entry.session_id == stage.session)
    assert (found.project_id, found.display_name) == (PROJECT, "compat")
    assert found.status is not None
    assert found.status.type == "active"
    assert found.checkpoints_count >= 2
    assert call(types.SessionSearchRequest(user_metadata={"suite": "another"})).sessions == []
    first = call(types.SessionSearchRequest(limit=1))
    second = call(types.SessionSearchRequest(limit=1, cursor=first.next_cursor))
    assert first.sessions[0].session_id != second.sessions[0].session_id
    assert first.sessions[0].created_at >= second.sessions[0].created_at


@probe("RestClient", "assign_session_project", "assign_session_project_async")
def assign_session_project(stage: Stage, call: Call) -> None:
    service = stage.new_service(stage.unique("to be moved"))
    trainer = service.create_lora_training_client(MODEL, rank=1).result(TIMEOUT)
    run = trainer.get_info().model_id
    project = stage.unique("project")
    call(run.split(":")[0], project)
    listed = stage.rest.list_training_runs(project_id=project).result(TIMEOUT).training_runs
    assert [entry.training_run_id for entry in listed] == [run]


@probe("RestClient", "export_session_trace", "export_session_trace_async")
def export_session_trace(stage: Stage, call: Call) -> None:
    assert stage.trained
    with urllib.request.urlopen(call(stage.session)) as file:
        assert stage.run.encode() in file.read()


@probe("RestClient", "get_sampler", "get_sampler_async")
def get_sampler(stage: Stage, call: Call) -> None:
    """Of a named checkpoint, of a base model, and of an ephemeral save."""
    ephemeral = stage.trained.trainer.save_weights_and_get_sampling_client().result(TIMEOUT)
    named, base, unnamed = (call(s._sampling_session_id) for s in (stage.sampler, stage.base, ephemeral))
    assert (named.base_model, named.model_path) == (MODEL, stage.trained.weights)
    assert (base.base_model, base.model_path) == (MODEL, None)
    assert unnamed.base_model == MODEL


@probe("RestClient", "whoami")
def whoami(stage: Stage, call: Call) -> str:
    me = call()
    assert me.user_urn
    assert me.org_urn.startswith("tml:organization:")
    assert me.email
    return "from the claims of a token of this server"


@probe("RestClient", "get_telemetry")
def get_telemetry(stage: Stage, call: Call) -> None:
    assert call() is not None


# ---- audit and billing, under both clients ----


def both(*names: str) -> Callable[[Any], Any]:
    def register(function: Any) -> Any:
        probe("RestClient", *names)(function)
        return probe("AdminClient", *names)(function)

    return register


@both("get_audit_log", "get_audit_log_async")
def get_audit_log(stage: Stage, call: Call) -> None:
    """Who published what, today and not on another day."""
    path = stage.save()
    stage.rest.publish_checkpoint_from_tinker_path(path).result(TIMEOUT)
    entries = call("checkpoints").entries
    assert any("publish" in entry.event and path in str(entry.event_details) for entry in entries)
    times = [entry.timestamp for entry in entries]
    assert times == sorted(times)
    assert call("all", (datetime.now(UTC) - timedelta(days=3)).date()).entries == []


@both("get_billing_usage", "get_billing_usage_async")
def get_billing_usage(stage: Stage, call: Call) -> None:
    assert stage.sampler
    assert stage.weights_logprobs
    hour = datetime.now(UTC).replace(minute=0, second=0, microsecond=0)
    answer = call(hour - timedelta(hours=1), hour + timedelta(hours=1))
    ours = [event for event in answer.data if event.session_id == stage.session]
    kinds = {event.event_info.type: event.event_info for event in ours}
    assert kinds["training"].token_count > 0  # type: ignore[union-attr]
    assert kinds["sampling_prefill"].token_count > 0  # type: ignore[union-attr]
    assert kinds["sampling_sample"].token_count > 0  # type: ignore[union-attr]
    assert {event.base_model for event in ours} == {MODEL}
    assert answer.sessions[stage.session].user_metadata == {"suite": "compat"}
    assert call(hour - timedelta(hours=30), hour - timedelta(hours=29)).data == []


@both("get_current_checkpoint_storage_usage", "get_current_checkpoint_storage_usage_async")
def get_current_checkpoint_storage_usage(stage: Stage, call: Call) -> None:
    project = stage.unique("stored")
    service = stage.new_service(project)
    trainer = service.create_lora_training_client(MODEL, rank=1).result(TIMEOUT)
    trainer.save_state("one").result(TIMEOUT)
    session = trainer.get_info().model_id.split(":")[0]
    stage.rest.assign_session_project(session, project).result(TIMEOUT)
    (row,) = call(project_id=project).data
    entry = stage.checkpoint(f"tinker://{trainer.get_info().model_id}/weights/one")
    assert entry is not None
    assert (row.checkpoint_count, row.size_bytes, row.project_id) == (1, entry.size_bytes, project)
    assert row.size_gigabytes > 0
    assert sum(other.checkpoint_count for other in call().data) > 1


@probe("AdminClient", "get_telemetry")
def admin_telemetry(stage: Stage, call: Call) -> None:
    assert call() is not None

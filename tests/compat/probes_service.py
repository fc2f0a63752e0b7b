"""Probes of `ServiceClient`."""

from __future__ import annotations

import tinker
import torch
from tinker import types

from compat.registry import Call, probe
from compat.stage import MODEL, TIMEOUT, Stage, close, datum, prompt, step


@probe("ServiceClient", "holder")
def holder(stage: Stage, call: Call) -> str:
    assert call() is stage.service.holder
    assert stage.session in stage.rest.list_sessions(limit=1000).result(TIMEOUT).sessions
    return "brings the session up"


@probe("ServiceClient", "get_console_url")
def get_console_url(stage: Stage, call: Call) -> str:
    assert call().startswith("https://")
    return "an address on the vendor's web site; nothing is asked of the server"


@probe("ServiceClient", "get_telemetry")
def get_telemetry(stage: Stage, call: Call) -> str:
    assert call() is not None
    return "events are counted and thrown away"


@probe("ServiceClient", "get_server_capabilities", "get_server_capabilities_async")
def get_server_capabilities(stage: Stage, call: Call) -> None:
    _check_capabilities(call())


def _check_capabilities(answer: types.GetServerCapabilitiesResponse) -> None:
    model = next(model for model in answer.supported_models if model.model_name == MODEL)
    assert model.max_context_length == 256
    assert model.trainable
    assert model.sampleable


@probe("ServiceClient", "create_lora_training_client", "create_lora_training_client_async")
def create_lora_training_client(stage: Stage, call: Call) -> None:
    trainer = call(MODEL, rank=2, seed=3, train_mlp=False, user_metadata={"k": "v"})
    info = trainer.get_info()
    assert (info.model_data.model_name, info.lora_rank, info.is_lora) == (MODEL, 2, True)
    assert info.model_id.startswith(f"{stage.session}:train:")
    assert stage.rest.get_training_run(info.model_id).result(TIMEOUT).user_metadata == {"k": "v"}
    fresh = trainer.forward([datum([1, 5, 9])], "cross_entropy").result(TIMEOUT).loss_fn_outputs[0]["logprobs"].data
    close(fresh, stage.base_logprobs)


@probe("ServiceClient", "create_training_client_from_state", "create_training_client_from_state_async")
def create_training_client_from_state(stage: Stage, call: Call) -> None:
    """The same weights and a new optimizer: the first loss is that of the run, the second is not."""
    trainer = call(stage.trained.state)
    assert trainer.get_info().lora_rank == 4
    losses = [step(trainer) for _ in range(2)]
    close(losses[0], stage.trained.later[0])
    assert abs(losses[1] - stage.trained.later[1]) > 0.01


@probe(
    "ServiceClient",
    "create_training_client_from_state_with_optimizer",
    "create_training_client_from_state_with_optimizer_async",
)
def create_training_client_from_state_with_optimizer(stage: Stage, call: Call) -> None:
    trainer = call(stage.trained.state, base_model=MODEL)
    close([step(trainer) for _ in range(2)], stage.trained.later)


@probe("ServiceClient", "create_sampling_client", "create_sampling_client_async")
def create_sampling_client(stage: Stage, call: Call) -> None:
    base, tuned = call(base_model=MODEL), call(model_path=stage.trained.weights)
    assert base.get_base_model() == tuned.get_base_model() == MODEL
    drifted = [client.compute_logprobs(prompt()).result(TIMEOUT)[1:] for client in (base, tuned)]
    assert max(abs(a - b) for a, b in zip(*drifted, strict=True)) > 0.1


def squares(logprobs: torch.Tensor, weights: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    loss = (logprobs * logprobs * weights).sum()
    return loss, {"custom/squares:sum": loss}


@probe("ServiceClient", "create_custom_loss")
def create_custom_loss(stage: Stage, call: Call) -> str:
    handle = call(squares, input_ranks={"logprobs": 1, "weights": 1})
    trainer = stage.new_trainer()
    done = trainer.forward_backward_custom([datum([1, 5, 9])], handle).result(TIMEOUT)
    expected = sum(lp * lp for lp in stage.base_logprobs)
    close([done.metrics["loss:sum"], done.metrics["custom/squares:sum"]], [expected, expected])
    assert trainer.optim_step(types.AdamParams()).result(TIMEOUT).metrics["grad_norm:mean"] > 0
    return "runs on the server" if handle.loss_id else "runs in the client"


@probe("ServiceClient", "copy_weights")
def copy_weights(stage: Stage, call: Call) -> None:
    copied = call(stage.trained.state, ttl_seconds=7200)
    assert copied.endswith("/weights/state")
    assert copied != stage.trained.state
    trainer = stage.service.create_training_client_from_state_with_optimizer(copied).result(TIMEOUT)
    close(step(trainer), stage.trained.later[0])
    entry = stage.checkpoint(copied)
    assert entry is not None
    assert entry.expires_at is not None


@probe("ServiceClient", "create_rest_client")
def create_rest_client(stage: Stage, call: Call) -> None:
    rest = call()
    assert isinstance(rest, tinker.RestClient)
    assert rest.get_training_run(stage.run).result(TIMEOUT).base_model == MODEL


@probe("ServiceClient", "close")
def close_service(stage: Stage, call: Call) -> None:
    name = stage.unique("to be closed")
    service = stage.new_service(name)
    service.create_sampling_client(base_model=MODEL).result(TIMEOUT)
    call("interrupted", "on purpose", on=service)
    found = stage.rest.search_sessions(types.SessionSearchRequest(display_name=name)).result(TIMEOUT).sessions
    assert [(entry.status.type, entry.status.reason.type, entry.status.detail) for entry in found] == [  # type: ignore[union-attr]
        ("client_finished", "interrupted", "on purpose")
    ]

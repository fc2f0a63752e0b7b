"""Probes of `TrainingClient`."""

from __future__ import annotations

import urllib.request
from typing import Any

import torch
from safetensors.numpy import load as load_safetensors
from tinker import types

from compat.registry import Call, probe
from compat.stage import MODEL, TIMEOUT, Stage, close, datum, prompt, step


@probe("TrainingClient", "forward", "forward_async")
def forward(stage: Stage, call: Call) -> None:
    """The logprobs are those that the sampler sees, and no gradient is left."""
    trainer = stage.new_trainer()
    output = call([datum([1, 5, 9]), datum([1, 5])], "cross_entropy", on=trainer)
    rows = [list(record["logprobs"].data) for record in output.loss_fn_outputs]
    close(rows[0], stage.base_logprobs)
    close(rows[1], stage.base_logprobs[:1])
    close(output.metrics["loss:sum"], -sum(map(sum, rows)))
    assert trainer.optim_step(types.AdamParams()).result(TIMEOUT).metrics["grad_norm:mean"] == 0


@probe("TrainingClient", "forward_backward", "forward_backward_async")
def forward_backward(stage: Stage, call: Call) -> None:
    """Two calls add up: the gradient of both is that of one with both datums."""
    one, both = stage.new_trainer(), stage.new_trainer()
    for tokens in ([1, 5, 9], [1, 2]):
        call([datum(tokens)], "cross_entropy", on=one)
    output = call([datum([1, 5, 9]), datum([1, 2])], "cross_entropy", on=both)
    close(output.loss_fn_outputs[0]["logprobs"].data, stage.base_logprobs)
    norms = [t.optim_step(types.AdamParams()).result(TIMEOUT).metrics["grad_norm:mean"] for t in (one, both)]
    close(*norms)
    assert norms[0] > 0


@probe("TrainingClient", "forward_backward_custom", "forward_backward_custom_async")
def forward_backward_custom(stage: Stage, call: Call) -> None:
    """A loss of the caller's own that equals cross-entropy has its gradient."""

    def cross_entropy(_data: Any, logprobs: list[torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
        return -logprobs[0].sum(), {"n": float(len(logprobs[0]))}

    custom, plain = stage.new_trainer(), stage.new_trainer()
    output = call([datum([1, 5, 9])], cross_entropy, on=custom)
    expected = plain.forward_backward([datum([1, 5, 9])], "cross_entropy").result(TIMEOUT)
    close(output.metrics["loss:sum"], expected.metrics["loss:sum"])
    assert output.metrics["n"] == 2
    norms = [t.optim_step(types.AdamParams()).result(TIMEOUT).metrics["grad_norm:mean"] for t in (custom, plain)]
    close(*norms)


@probe("TrainingClient", "optim_step", "optim_step_async")
def optim_step(stage: Stage, call: Call) -> None:
    trainer = stage.new_trainer()
    loss = trainer.forward_backward([datum([1, 5, 9])], "cross_entropy").result(TIMEOUT).metrics["loss:sum"]
    metrics = call(types.AdamParams(learning_rate=1e-2), on=trainer).metrics
    assert metrics["grad_norm:mean"] > 0
    assert trainer.forward([datum([1, 5, 9])], "cross_entropy").result(TIMEOUT).metrics["loss:sum"] < loss - 0.01


@probe("TrainingClient", "save_state", "save_state_async")
def save_state(stage: Stage, call: Call) -> None:
    name = stage.unique("saved")
    path = call(name, ttl_seconds=7200, user_metadata={"note": "x"}).path
    assert path == f"tinker://{stage.run}/weights/{name}"
    again = call(name, overwrite=True, user_metadata={"note": "y"}).path
    entry = stage.checkpoint(again)
    assert entry is not None
    assert (entry.checkpoint_type, entry.user_metadata, entry.expires_at) == ("training", {"note": "y"}, None)
    assert entry.size_bytes


@probe("TrainingClient", "save_weights_for_sampler", "save_weights_for_sampler_async")
def save_weights_for_sampler(stage: Stage, call: Call) -> None:
    path = call(stage.unique("sampled"), ttl_seconds=7200).path
    entry = stage.checkpoint(path)
    assert entry is not None
    assert entry.checkpoint_type == "sampler"
    assert entry.expires_at is not None
    sampler = stage.service.create_sampling_client(model_path=path).result(TIMEOUT)
    _same_as_trainer(stage.trained.trainer, sampler)


@probe("TrainingClient", "save_weights_and_get_sampling_client", "save_weights_and_get_sampling_client_async")
def save_weights_and_get_sampling_client(stage: Stage, call: Call) -> None:
    for kind in ("snapshot", "inflight"):
        _same_as_trainer(stage.trained.trainer, call(kind=kind))


def _same_as_trainer(trainer: Any, sampler: Any) -> None:
    """Training and sampling agree on what the weights say."""
    trained = trainer.forward([datum([1, 5, 9])], "cross_entropy").result(TIMEOUT).loss_fn_outputs[0]["logprobs"].data
    close(sampler.compute_logprobs(prompt()).result(TIMEOUT)[1:], trained)


@probe("TrainingClient", "save_weights_external", "save_weights_external_async")
def save_weights_external(stage: Stage, call: Call) -> None:
    name = stage.unique("external")
    answer = call(name, ttl_seconds=7200)
    assert answer.path == f"tinker://{stage.run}/external_weights/{name}"
    urls = stage.rest.get_external_weights_urls(answer.path).result(TIMEOUT).urls
    with urllib.request.urlopen(urls["adapter_model.safetensors"]) as file:
        assert len(load_safetensors(file.read())) > 0


@probe("TrainingClient", "load_state", "load_state_async")
def load_state(stage: Stage, call: Call) -> None:
    trainer = stage.new_trainer()
    call(stage.trained.state, on=trainer)
    losses = [step(trainer) for _ in range(2)]
    close(losses[0], stage.trained.later[0])
    assert abs(losses[1] - stage.trained.later[1]) > 0.01


@probe("TrainingClient", "load_state_with_optimizer", "load_state_with_optimizer_async")
def load_state_with_optimizer(stage: Stage, call: Call) -> None:
    trainer = stage.new_trainer()
    call(stage.trained.state, on=trainer)
    close([step(trainer) for _ in range(2)], stage.trained.later)


@probe("TrainingClient", "create_sampling_client", "create_sampling_client_async")
def create_sampling_client(stage: Stage, call: Call) -> None:
    sampler = call(stage.trained.weights)
    close(sampler.compute_logprobs(prompt()).result(TIMEOUT)[1:], stage.weights_logprobs)


@probe("TrainingClient", "get_info", "get_info_async")
def get_info(stage: Stage, call: Call) -> None:
    info = call()
    assert info.model_id == stage.run
    assert (info.model_data.model_name, info.lora_rank) == (MODEL, 4)
    assert info.optimizer_config.type == "adamw"


@probe("TrainingClient", "get_tokenizer")
def get_tokenizer(stage: Stage, call: Call) -> str:
    assert call().decode([65, 66]) == "ab"
    return "from the local cache, which the server has filled"


@probe("TrainingClient", "get_console_url")
def get_console_url(stage: Stage, call: Call) -> str:
    assert call().startswith("https://")
    return "an address on the vendor's web site; nothing is asked of the server"


@probe("TrainingClient", "get_telemetry")
def get_telemetry(stage: Stage, call: Call) -> None:
    assert call() is not None

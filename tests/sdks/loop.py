"""Train, save, sample, resume: one flat script that works under every release of the SDK since 0.7.0.

Run by `tests/sdks/run.py` under each release's own interpreter, with TINKER_BASE_URL and TINKER_API_KEY set. It asserts
what must hold within one release, and prints its figures as JSON on the last line: they must be the same under all.
"""

from __future__ import annotations

import asyncio
import io
import json
import math
import pickle
import sys
import tarfile
import urllib.request

import tinker
import torch
from tinker import types

MODEL = sys.argv[1]
VERSION = tuple(int(part) for part in tinker.__version__.split("."))
FIGURES = {"release": tinker.__version__}


def settled(outcome):
    """Releases before 0.38 return clients, newer ones futures of clients."""
    return outcome.result(timeout=60) if hasattr(outcome, "result") else outcome


def datum(tokens):
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={"target_tokens": tokens[1:], "weights": [1.0] * (len(tokens) - 1)},
    )


def step(client, rate=1e-2):
    """One pipelined step; returns the loss before it."""
    data = [datum([1, 5, 9, 11, 2 + i]) for i in range(4)]
    loss = client.forward_backward(data, "cross_entropy")
    client.optim_step(types.AdamParams(learning_rate=rate)).result(timeout=60)
    return loss.result(timeout=60).metrics["loss:sum"]


def same(one, other, tolerance=1e-4):
    assert len(one) == len(other), (one, other)
    assert all(math.isclose(a, b, rel_tol=tolerance, abs_tol=1e-6) for a, b in zip(one, other, strict=True)), (
        one,
        other,
    )


def refused(future, text):
    """A failed future with the server's words in it, of category `user`."""
    error = future.exception(timeout=60) if hasattr(future, "exception") else future.future().exception(timeout=60)
    assert isinstance(error, tinker.RequestFailedError), error
    assert text in str(error), error
    assert str(getattr(error.category, "value", error.category)).lower() == "user", error.category


service = tinker.ServiceClient(user_metadata={"release": tinker.__version__})
served = settled(service.get_server_capabilities()).supported_models
assert MODEL in [model.model_name for model in served]

# Train.
trainer = settled(service.create_lora_training_client(MODEL, rank=4, seed=7, user_metadata={"n": "1"}))
info = trainer.get_info()
assert info.model_data.model_name == MODEL
assert info.lora_rank == 4
run = info.model_id
FIGURES["train"] = [step(trainer) for _ in range(4)]
assert FIGURES["train"][-1] < FIGURES["train"][0]

# A defaulted optimizer: whatever the release sends or leaves out means the same.
other = settled(service.create_lora_training_client(MODEL, rank=2, seed=7))
other.forward_backward([datum([1, 2, 3])], "cross_entropy").result(timeout=60)
other.optim_step(types.AdamParams()).result(timeout=60)
evaluated = other.forward([datum([1, 2, 3])], "cross_entropy").result(timeout=60)
FIGURES["defaults"] = [evaluated.metrics["loss:sum"], *evaluated.loss_fn_outputs[0]["logprobs"].data]

# Forward only: one logprob per target, no gradient; many datums arrive in chunks and are merged in order.
many = [datum([1, 2 + i % 90, 3]) for i in range(1100)]
output = trainer.forward(many, "cross_entropy").result(timeout=120)
logprobs = [output.loss_fn_outputs[i]["logprobs"] for i in range(len(many))]
assert all(list(tensor.shape or [2]) == [2] for tensor in logprobs)
same([output.metrics["loss:sum"]], [-sum(sum(tensor.data) for tensor in logprobs)])
FIGURES["forward"] = [output.metrics["loss:sum"], *logprobs[1099].data]

# The other losses, with their inputs.
reinforce = types.Datum(
    model_input=types.ModelInput.from_ints([1, 2]),
    loss_fn_inputs={"target_tokens": [3, 4], "logprobs": [-4.0, -4.5], "advantages": [1.0, -0.5]},
)
for loss_fn in ("importance_sampling", "ppo"):
    result = trainer.forward_backward([reinforce], loss_fn).result(timeout=60)
    FIGURES[loss_fn] = [result.metrics["loss:sum"]]
trainer.optim_step(types.AdamParams(learning_rate=0.0)).result(timeout=60)  # clears the gradient, moves nothing

# A loss of the caller's own.
custom = trainer.forward_backward_custom(
    [datum([1, 5, 9])], lambda data, logprobs: ((logprobs[0] ** 2).sum(), {"mine": float(torch.numel(logprobs[0]))})
).result(timeout=60)
assert custom.metrics["mine"] == 2.0
FIGURES["custom"] = [
    trainer.optim_step(types.AdamParams(learning_rate=0.0)).result(timeout=60).metrics["grad_norm:mean"]
]

# Bad input fails its own call, and the client goes on.
refused(trainer.forward_backward([datum([1, 10**6])], "cross_entropy"), "1000000")

# Save.
state = trainer.save_state("mid").result(timeout=60).path
assert state == f"tinker://{run}/weights/mid"
refused(trainer.save_state("mid"), "exists")
weights = trainer.save_weights_for_sampler("mid").result(timeout=60).path
assert weights == f"tinker://{run}/sampler_weights/mid"

# Sample, from a named and from an unnamed checkpoint.
prompt = types.ModelInput.from_ints([1, 5, 9])
params = types.SamplingParams(max_tokens=5, seed=11, temperature=0.7, stop=[])
sampler = settled(service.create_sampling_client(model_path=weights))
drawn = sampler.sample(prompt, 2, params, include_prompt_logprobs=True, topk_prompt_logprobs=2).result(timeout=60)
assert [len(sequence.tokens) for sequence in drawn.sequences] == [5, 5]
assert {str(sequence.stop_reason) for sequence in drawn.sequences} == {"length"}
assert drawn.prompt_logprobs[0] is None
assert drawn.topk_prompt_logprobs[0] is None
FIGURES["tokens"] = [list(sequence.tokens) for sequence in drawn.sequences]
FIGURES["sampled"] = [value for sequence in drawn.sequences for value in sequence.logprobs]
FIGURES["prompt"] = list(drawn.prompt_logprobs[1:])
FIGURES["topk"] = [number for row in drawn.topk_prompt_logprobs[1:] for pair in row for number in pair]
same(FIGURES["prompt"], sampler.compute_logprobs(prompt).result(timeout=60)[1:])
greedy = types.SamplingParams(max_tokens=5, temperature=0.0)
FIGURES["greedy"] = [list(sampler.sample(prompt, 1, greedy).result(timeout=60).sequences[0].tokens)]
stop = types.SamplingParams(max_tokens=20, seed=3, stop=[FIGURES["tokens"][0][0]])
FIGURES["stopped"] = [list(sampler.sample(prompt, 1, stop).result(timeout=60).sequences[0].tokens)]
unnamed = settled(trainer.save_weights_and_get_sampling_client())
again = asyncio.run(unnamed.sample_async(prompt, 2, params))
assert [list(sequence.tokens) for sequence in again.sequences] == FIGURES["tokens"]
base = settled(service.create_sampling_client(base_model=MODEL))
FIGURES["base"] = base.compute_logprobs(prompt).result(timeout=60)[1:]
if VERSION >= (0, 13):
    clone = pickle.loads(pickle.dumps(sampler))
    assert list(clone.sample(prompt, 1, greedy).result(timeout=60).sequences[0].tokens) == FIGURES["greedy"][0]
assert trainer.get_tokenizer().encode("a") == [65]
if VERSION >= (0, 13):
    assert sampler.get_tokenizer().encode("a") == [65]

# Resume: with the optimizer's state as if nothing had happened, without it at the same weights.
straight = [step(trainer) for _ in range(2)]
resumed = settled(service.create_training_client_from_state_with_optimizer(state))
same([step(resumed) for _ in range(2)], straight)
fresh = settled(service.create_training_client_from_state(state))
assert fresh.get_info().lora_rank == 4
same([step(fresh)], straight[:1])
trainer.load_state_with_optimizer(state).result(timeout=60)
same([step(trainer), step(trainer)], straight)
trainer.load_state(state).result(timeout=60)
same([step(trainer)], straight[:1])
FIGURES["resumed"] = straight

# What the server tells about it, and what it does with checkpoints.
rest = service.create_rest_client()
about = settled(rest.get_training_run(run))
assert (about.base_model, about.lora_rank, about.user_metadata) == (MODEL, 4, {"n": "1"})
assert about.last_checkpoint.tinker_path == state
assert run in [entry.training_run_id for entry in settled(rest.list_training_runs(limit=100)).training_runs]
assert settled(rest.get_weights_info_by_tinker_path(state)).lora_rank == 4
session = run.split(":")[0]
assert run in settled(rest.get_session(session)).training_run_ids
assert session in settled(rest.list_sessions(limit=100)).sessions
if VERSION >= (0, 30):
    trainer.save_weights_external("out").result(timeout=60)  # older releases must not see it in any list
entries = {entry.tinker_path: entry for entry in settled(rest.list_checkpoints(run)).checkpoints}
assert entries[state].size_bytes > entries[weights].size_bytes > 0
assert {state, weights} <= {entry.tinker_path for entry in settled(rest.list_user_checkpoints(limit=1000)).checkpoints}
settled(rest.publish_checkpoint_from_tinker_path(state))
assert [entry.public for entry in settled(rest.list_checkpoints(run)).checkpoints if entry.tinker_path == state] == [
    True
]
settled(rest.unpublish_checkpoint_from_tinker_path(state))
if hasattr(rest, "get_checkpoint_archive_url_from_tinker_path"):
    archive = settled(rest.get_checkpoint_archive_url_from_tinker_path(weights))
    with urllib.request.urlopen(archive.url) as answer, tarfile.open(fileobj=io.BytesIO(answer.read())) as tar:
        assert {"adapter_config.json", "adapter_model.safetensors", "checkpoint_complete"} <= set(tar.getnames())
if hasattr(service, "copy_weights"):
    copied = settled(service.copy_weights(state))
    assert copied != state
    same([step(settled(service.create_training_client_from_state(copied)))], straight[:1])
settled(rest.delete_checkpoint_from_tinker_path(state))
assert state not in [entry.tinker_path for entry in settled(rest.list_checkpoints(run)).checkpoints]
if hasattr(service, "close"):
    settled(service.close("success"))
print(json.dumps(FIGURES))

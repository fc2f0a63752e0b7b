"""One base model on several devices: two processes on the CPU give the numbers of one (docs/backends.md)."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from openrl.backends import cuda
from openrl.backends.base import BackendSpec, SampleJob, VllmSpec
from openrl.backends.torch.distributed.commands import State
from openrl.backends.torch.distributed.group import GroupBroken
from openrl.backends.torch.distributed.memory import Footprint
from openrl.backends.torch.distributed.spread import spread
from openrl.backends.torch.distributed.trainer import SpreadTrainer
from openrl.backends.torch.model import open_model
from openrl.backends.torch.sample import Sampler
from openrl.backends.torch.train import Trainer
from openrl.errors import BackendFault, BadRequest, ModelError, NoRoom, OutOfMemory
from openrl.selftest.subject import same_tensors
from openrl.types import (
    AdamParams,
    Datum,
    FullSpec,
    LoraSpec,
    OptimOutput,
    RequestId,
    RunId,
    SamplePayload,
    SamplingParams,
    TrainOutput,
    TrainPayload,
)
from support.ranks import Ranks, open_ranks
from support.training import RUN, ce, create, datum, forward, forward_backward, item, run_pass, same, size, trainer

OTHER = RunId("other")
ADAM = AdamParams(learning_rate=1e-3, weight_decay=0.01, grad_clip_norm=1.0)
LENGTHS = (20, 30, 7, 50, 3, 9)


@pytest.fixture(
    scope="module",
    params=["llama", *(pytest.param(f, marks=pytest.mark.slow) for f in ("qwen3", "gemma3", "qwen3_moe"))],
)
def folder(request: pytest.FixtureRequest, model_folder: Callable[..., Path]) -> Path:
    return model_folder(request.param)


@pytest.fixture(scope="module")
def opened(folder: Path) -> Iterator[Ranks]:
    with open_ranks(folder) as ranks:
        yield ranks


@pytest.fixture
def two(opened: Ranks) -> Iterator[Ranks]:
    yield opened
    for run in (RUN, OTHER):
        opened.trainer.drop(run)
    assert not opened.lost


@pytest.fixture
def one(folder: Path) -> Trainer:
    return trainer(folder, max_batch_tokens=64)


def _close(found: TrainOutput, wanted: TrainOutput) -> None:
    for a, b in zip(found.logprobs, wanted.logprobs, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
    assert found.metrics == pytest.approx(wanted.metrics, rel=1e-5)


def _gradients_close(two: Ranks, one: Trainer, run: RunId = RUN) -> None:
    found, wanted = two.trainer.gradients(run), one.gradients(run)
    assert size([found[n] - wanted[n] for n in wanted]) <= 1e-5 * size(list(wanted.values()))


def test_same_numbers_as_one_process(two: Ranks, one: Trainer, tmp_path: Path) -> None:
    """L3, G1, O1: logprobs, losses, the gradient and steps of AdamW."""
    for held in (two.trainer, one):
        create(held, tmp_path)
    for seed in (0, 10):
        payload = ce(*LENGTHS, seed=seed)
        _close(forward_backward(two.trainer, payload), forward_backward(one, payload))
        _gradients_close(two, one)
        assert two.trainer.optim_step(RUN, ADAM).metrics == pytest.approx(one.optim_step(RUN, ADAM).metrics, rel=1e-5)
    found, wanted = two.trainer.parameters(RUN), one.parameters(RUN)
    for name in wanted:  # Adam divides by the gradient's size: where that is nothing but rounding, so is the step
        np.testing.assert_allclose(found[name], wanted[name], atol=3e-4)
        assert np.abs(found[name] - wanted[name]).mean() < 1e-6
    _close(forward(two.trainer, ce(5)), forward(one, ce(5)))


def test_runs_together_with_losses_and_adapters_of_their_own(two: Ranks, one: Trainer, tmp_path: Path) -> None:
    """B3: each run has what it would have alone."""
    ppo = TrainPayload(tuple(datum("ppo", n, n) for n in (12, 25, 4)), "ppo")
    for held in (two.trainer, one):
        create(held, tmp_path)
        create(held, tmp_path, OTHER, LoraSpec(rank=2, seed=3, train_mlp=False), seed=1)
    payloads = {RUN: ce(*LENGTHS), OTHER: ppo}
    outcomes = run_pass(two.trainer, *(item(payload, run) for run, payload in payloads.items()))
    for run, payload in payloads.items():
        outcome = outcomes[item(payload, run).request]
        assert isinstance(outcome, TrainOutput)
        _close(outcome, forward_backward(one, payload, run))
        _gradients_close(two, one, run)


def test_a_pass_with_work_for_one_rank_alone(two: Ranks, one: Trainer, tmp_path: Path) -> None:
    for held in (two.trainer, one):
        create(held, tmp_path)
        forward_backward(held, ce(12))
    _gradients_close(two, one)


def test_a_request_that_is_not_finite_fails_alone(two: Ranks, one: Trainer, tmp_path: Path) -> None:
    """L11, G6: its own gradient is dropped on all ranks, that of the other run is not."""
    for held in (two.trainer, one):
        create(held, tmp_path)
        create(held, tmp_path, OTHER)
    forward_backward(one, ce(*LENGTHS))
    good = ce(*LENGTHS)
    weights = np.full(9, np.inf, np.float32)
    bad = TrainPayload(
        (
            *ce(8, 30).data,
            replace(datum("cross_entropy", 9, 1), inputs={"target_tokens": np.zeros(9, np.int64), "weights": weights}),
        ),
        "cross_entropy",
    )
    outcomes = run_pass(two.trainer, item(bad, OTHER), item(good))
    assert isinstance(outcomes[item(bad, OTHER).request], BadRequest)
    assert size(list(two.trainer.gradients(OTHER).values())) == 0
    _gradients_close(two, one)


def test_a_gradient_of_zero_is_none(two: Ranks, tmp_path: Path) -> None:
    """G9: what no rank has a gradient for is not made one by adding up."""
    create(two.trainer, tmp_path)
    zero = Datum(
        np.arange(6, dtype=np.int32), {"target_tokens": np.ones(6, np.int64), "weights": np.zeros(6, np.float32)}
    )
    forward_backward(two.trainer, TrainPayload((zero, zero), "cross_entropy"))
    (tmp_path / "saved").mkdir()
    two.trainer.save(RUN, tmp_path / "saved", optimizer=True, gradients=True)
    assert not (tmp_path / "saved" / "gradients.safetensors").exists()


def test_checkpoints_go_from_two_processes_to_one_and_back(two: Ranks, one: Trainer, tmp_path: Path) -> None:
    """C4, O11: to the bit, moments and gradients included; and training goes on alike."""
    create(two.trainer, tmp_path)
    forward_backward(two.trainer, ce(*LENGTHS))
    two.trainer.optim_step(RUN, ADAM)
    forward_backward(two.trainer, ce(7, 8))
    saved, again = tmp_path / "saved", tmp_path / "again"
    saved.mkdir()
    two.trainer.save(RUN, saved, optimizer=True, gradients=True)
    one.load(RUN, saved, optimizer=True)
    assert same(one.parameters(RUN), two.trainer.parameters(RUN))
    again.mkdir()
    one.save(RUN, again, optimizer=True, gradients=True)
    for name in ("adapter_model", "optimizer", "gradients"):
        assert same_tensors(again / f"{name}.safetensors", saved / f"{name}.safetensors"), name
    two.trainer.load(OTHER, again, optimizer=True)
    assert two.trainer.optim_step(OTHER, ADAM) == two.trainer.optim_step(RUN, ADAM)
    assert same(two.trainer.parameters(OTHER), two.trainer.parameters(RUN))


def test_no_rank_holds_the_whole_base(two: Ranks, folder: Path) -> None:
    """Of the decoder layers' matrices this rank has half, and two layers at a time."""
    whole = AutoModelForCausalLM.from_pretrained(folder)
    matrices = {name: p for name, p in whole.named_parameters() if "proj" in name and p.ndim > 1}
    layers = sum(p.nbytes for p in matrices.values())
    largest = max(sum(p.nbytes for name, p in matrices.items() if f".layers.{i}." in name) for i in range(3))
    windows = two.trainer.team.member.windows
    assert windows.layers == 3
    assert layers // 2 <= windows.held_bytes <= 1.02 * layers / 2  # the rest is alignment
    assert 2 * largest <= windows.window_bytes <= 1.02 * 2 * largest
    storages = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in two.model.backbone.parameters()}
    rest = sum(p.nbytes for p in whole.parameters()) - layers
    assert sum(storages.values()) <= windows.window_bytes + rest


def test_sampling_from_layers_that_are_gathered(two: Ranks, one: Trainer, folder: Path, tmp_path: Path) -> None:
    """S1: a base that is nowhere whole samples what the trainer scores, also while a pass is in hand."""
    create(two.trainer, tmp_path)
    two.model.fetch = two.trainer.fetch
    sampler = Sampler(two.model, folder, 4, 512)
    steps = two.trainer.train_pass((item(ce(*LENGTHS, *LENGTHS)),))
    outcomes = dict(next(steps))
    prompt = np.arange(3, 9, dtype=np.int32)
    params = SamplingParams(max_tokens=5, temperature=1.0, seed=1, stop=())
    sampler.add(SampleJob(RequestId("sample"), SamplePayload(prompt, params=params), None))
    drawn = []
    while sampler.busy:
        drawn += sampler.step()
    for finished in steps:
        outcomes |= finished
    assert all(isinstance(outcome, TrainOutput) for outcome in outcomes.values())
    ((_, output),) = drawn
    (sequence,) = output.sequences
    tokens = np.concatenate([prompt, sequence.tokens]).astype(np.int32)
    one.create(RUN, LoraSpec(rank=2, seed=0))  # does nothing yet
    scored = forward(
        one, TrainPayload((Datum(tokens[:-1], {"target_tokens": tokens[1:].astype(np.int64)}),), "cross_entropy")
    )
    np.testing.assert_allclose(scored.logprobs[0][len(prompt) - 1 :], sequence.logprobs, atol=1e-4)


def test_running_out_of_memory_on_one_rank(
    two: Ranks, one: Trainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """G6: the round is computed again in halves by all ranks; one datum that is too much fails its request alone."""
    for held in (two.trainer, one):
        create(held, tmp_path)
        create(held, tmp_path, OTHER)
    passes = two.trainer.team.member.trainer.passes
    plain = passes.differentiate

    def starved(rows: list[Any], *args: Any, **kwargs: Any) -> Any:
        if any(row.tokens == 50 for row in rows):
            plain(rows, *args, **kwargs)
            raise torch.OutOfMemoryError("out of memory, says the test")
        return plain(rows, *args, **kwargs)

    monkeypatch.setattr(passes, "differentiate", starved)
    large, small = ce(50, 50, 6), ce(*(n for n in LENGTHS if n != 50))
    outcomes = run_pass(two.trainer, item(large, OTHER), item(small))
    assert isinstance(outcomes[item(large, OTHER).request], OutOfMemory)
    assert size(list(two.trainer.gradients(OTHER).values())) == 0
    forward_backward(one, small)
    _gradients_close(two, one)


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_two_gpus_give_the_numbers_of_one(model_folder: Callable[..., Path], tmp_path: Path, dtype: str) -> None:
    """Over NCCL; `scripts/gpu_check.sh` runs it."""
    kind, limit = getattr(torch, dtype), 1e-4 if dtype == "float32" else 0.05
    one = Trainer(open_model(model_folder("llama"), torch.device("cuda", 0), kind), 64)
    with open_ranks(model_folder("llama"), device="cuda", dtype=dtype) as two:
        for held in (two.trainer, one):
            create(held, tmp_path)
        payload = ce(*LENGTHS)
        found, wanted = forward_backward(two.trainer, payload), forward_backward(one, payload)
        for a, b in zip(found.logprobs, wanted.logprobs, strict=True):
            np.testing.assert_allclose(a, b, atol=limit)
        g, h = two.trainer.gradients(RUN), one.gradients(RUN)
        assert size([g[n] - h[n] for n in h]) <= limit * size(list(h.values()))
        two.trainer.optim_step(RUN, ADAM)
        assert not two.lost


def test_more_gpus_than_there_are_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    spec = BackendSpec(folder, "auto", "auto", 1, 64, 8, 4096, devices=4)
    with pytest.raises(ModelError, match=r"devices is 4, but PyTorch sees 2 GPUs"):
        cuda.open_backend(spec)
    vllm = VllmSpec(folder, gpu=1)
    with pytest.raises(ModelError, match=r"vllm_gpu is 1, one of the 2 GPUs \(0-1\) that train"):
        cuda.open_backend(replace(spec, devices=2, vllm=vllm))


def test_all_parameters_are_refused(two: Ranks) -> None:
    with pytest.raises(BadRequest, match="2 devices"):
        two.trainer.create(RUN, FullSpec())


class _Split:
    """A team whose ranks do not hold the same any more."""

    size = 2

    def __init__(self) -> None:
        self.fault: GroupBroken | None = None

    def ask(self, *_: object) -> list[State]:
        return [State(b"one", OptimOutput({})), State(b"other", OptimOutput({}))]

    def lose(self, error: GroupBroken) -> GroupBroken:
        self.fault = error
        return error


def test_ranks_that_no_longer_hold_the_same_are_given_up() -> None:
    team: Any = _Split()
    with pytest.raises(BackendFault, match="no longer hold the same adapter"):
        SpreadTrainer(team).optim_step(RUN, ADAM)
    assert team.fault is not None


# ---- arithmetic ----


def test_the_longest_datums_are_placed_first() -> None:
    assert spread([3, 9, 4, 1, 8], lambda n: n, 2) == [[9, 3, 1], [8, 4]]
    assert spread([5], lambda n: n, 3) == [[5], [], []]


def test_what_does_not_fit_is_refused_with_the_numbers() -> None:
    gib = 1 << 30
    base = Footprint(layers=60 * gib, layer=1 * gib, rest=2 * gib)
    assert base.of_rank(4) == 19 * gib
    with pytest.raises(NoRoom, match=r"19\.0 GiB on each of them .* only 18\.0 GiB are free"):
        base.keeps_whole(4, 18 * gib, shared=False)
    assert not base.keeps_whole(4, 140 * gib, shared=False)
    assert base.keeps_whole(4, 160 * gib, shared=False)


# ---- the end: nothing works afterwards ----


def _within(seconds: float, condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
    return condition()


def test_a_rank_that_dies_ends_the_others(opened: Ranks, tmp_path: Path) -> None:
    """The backend says that it is lost, and every later call fails at once."""
    create(opened.trainer, tmp_path)
    (pid,) = opened.pids
    os.kill(pid, signal.SIGKILL)
    assert _within(10, lambda: bool(opened.lost))
    assert "rank 1 was ended by SIGKILL" in opened.lost[0]
    for _ in range(2):
        with pytest.raises(BackendFault):
            forward_backward(opened.trainer, ce(5, 6))
    opened.lost.clear()

"""Gradient accumulation G1-G9, batch invariance B1-B6, and several runs in one pass."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from openrl.types import AdamParams, Array, Datum, LoraSpec, RunId, TrainOutput, TrainPayload
from support.reference import Reference, distance
from support.training import (
    RUN,
    SPEC,
    Held,
    ce,
    create,
    datum,
    forward,
    forward_backward,
    item,
    on_policy,
    run_pass,
    same,
)

FLOAT32 = {"lp": 1e-5, "mean": 1e-6, "gradient": 1e-5, "loss": 1e-6}
BFLOAT16 = {"lp": 5e-2, "mean": 5e-3, "gradient": 2e-2, "loss": 1e-3}

Folders = Callable[..., Path]
Opened = Callable[..., Held]


@pytest.fixture
def llama(opened: Opened, model_folder: Folders) -> Held:
    return opened(model_folder("llama"))


@pytest.fixture
def held(llama: Held, tmp_path: Path) -> Held:
    create(llama, tmp_path)
    return llama


def gradient_of(held: Held, *payloads: TrainPayload) -> dict[str, Array]:
    """G after these requests, from zero."""
    held.optim_step(RUN, AdamParams(learning_rate=0.0))  # the only way to clear G; with lr 0 nothing else moves
    for payload in payloads:
        forward_backward(held, payload)
    return held.gradients(RUN)


def weighted(payload: TrainPayload, factor: float) -> TrainPayload:
    data = tuple(
        Datum(d.tokens, {**d.inputs, "weights": (factor * d.inputs["weights"]).astype(np.float32)})
        for d in payload.data
    )
    return TrainPayload(data, payload.loss_fn)


def test_doubling(held: Held) -> None:
    """Section 10 item 3: FB(d) twice = 2 G = FB([d, d]) = FB with weights 2 w (G1)."""
    payload = ce(13)
    twice = {name: 2 * value for name, value in gradient_of(held, payload).items()}
    assert same(gradient_of(held, payload, payload), twice)
    assert distance(gradient_of(held, TrainPayload(payload.data * 2, "cross_entropy")), twice) < 1e-5
    assert distance(gradient_of(held, weighted(payload, 2)), twice) < 1e-5


def test_g4_order_and_splitting(held: Held) -> None:
    """G3, G4: chunks, calls and their order do not matter beyond rounding."""
    payload = ce(13, 40, 7)
    whole = gradient_of(held, payload)
    parts = [TrainPayload((d,), "cross_entropy") for d in payload.data]
    assert distance(gradient_of(held, *parts), whole) < 1e-5
    assert distance(gradient_of(held, *reversed(parts)), whole) < 1e-5


def test_g2_losses_mix_within_a_step(held: Held) -> None:
    """G2: gradients of different losses add."""
    one = ce(9)
    two = on_policy(held, TrainPayload((datum("ppo", 12, 5),), "ppo"))
    apart = [gradient_of(held, payload) for payload in (one, two)]
    total = {name: apart[0][name] + apart[1][name] for name in apart[0]}
    assert distance(gradient_of(held, one, two), total) < 1e-6


def test_g5_forward_changes_nothing_and_agrees(held: Held) -> None:
    """G5: bit for bit the same outputs, and no trace in G, the weights or the random state."""
    payload = ce(9, 21)
    forward_backward(held, payload)
    before = held.gradients(RUN), held.parameters(RUN), torch.random.get_rng_state()
    first = forward(held, payload)
    assert same(held.gradients(RUN), before[0])
    assert same(held.parameters(RUN), before[1])
    assert torch.equal(torch.random.get_rng_state(), before[2])
    again = forward_backward(held, payload)
    assert first.metrics == again.metrics
    assert all(np.array_equal(a, b) for a, b in zip(first.logprobs, again.logprobs, strict=True))


def test_g1_step_uses_the_sum_and_clears_it(held: Held) -> None:
    """G1: the norm reported is that of the undivided sum; afterwards G is zero."""
    payload = ce(9, 21)
    gradients = gradient_of(held, payload, payload)
    norm = np.sqrt(sum((g.astype(np.float64) ** 2).sum() for g in gradients.values()))
    assert held.optim_step(RUN, AdamParams()).metrics["grad_norm:mean"] == pytest.approx(norm, rel=1e-5)
    assert not any(g.any() for g in held.gradients(RUN).values())


def test_a3_first_step(llama: Held) -> None:
    """A3, and 4.1 A2: a fresh adapter leaves the base model's logprobs bit-equal; step 1 leaves A alone."""
    for run, seed in (("one", 1), ("two", 2)):
        llama.create(RunId(run), LoraSpec(rank=4, seed=seed))
    payload = ce(9, 21)
    base = [forward(llama, payload, RunId(run)).logprobs for run in ("one", "two")]
    assert all(np.array_equal(a, b) for a, b in zip(*base, strict=True))
    before = llama.parameters(RunId("one"))
    forward_backward(llama, payload, RunId("one"))
    llama.optim_step(RunId("one"), AdamParams(learning_rate=1e-3))
    after = llama.parameters(RunId("one"))
    for name, value in after.items():
        if name.endswith("lora_A"):
            assert np.array_equal(value, before[name])
        else:
            np.testing.assert_allclose(np.abs(value), 1e-3, rtol=1e-3)


def compare(alone: TrainOutput, found: TrainOutput, table: dict[str, float]) -> None:
    gaps = [np.abs(a - b) for a, b in zip(alone.logprobs, found.logprobs, strict=True)]
    # The table's float32 numbers suppose logits of ordinary size; float32 itself allows no more than relative 1e-6.
    size = max(1.0, max(float(np.abs(lp).max()) for lp in alone.logprobs) / 10)
    assert max(float(gap.max()) for gap in gaps) <= table["lp"] * size
    assert float(np.concatenate([gap.ravel() for gap in gaps]).mean()) <= table["mean"] * size
    magnitude = sum(float(np.abs(lp).sum()) for lp in alone.logprobs)
    assert found.metrics["loss:sum"] == pytest.approx(alone.metrics["loss:sum"], abs=table["loss"] * magnitude)


@pytest.mark.parametrize(("dtype", "table"), [("float32", FLOAT32), ("bfloat16", BFLOAT16)])
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3"])
def test_b1_b3_batch_invariance(
    family: str, dtype: str, table: dict[str, float], opened: Opened, model_folder: Folders, tmp_path: Path
) -> None:
    """B1-B3: (a) beside a 10 times longer neighbour, (b) permuted, (c) split, with either row of the table."""
    held = opened(model_folder(family), dtype, max_batch_tokens=4096)
    create(held, tmp_path)
    short, long, middle = ce(6).data[0], ce(60, seed=5).data[0], ce(20, seed=9).data[0]
    alone = [forward_backward(held, TrainPayload((d,), "cross_entropy")) for d in (short, long, middle)]
    solo = held.gradients(RUN)
    orders = [(0, 1, 2), (1, 2, 0), (2, 1, 0)]
    for order in orders:
        data = tuple((short, long, middle)[i] for i in order)
        found = gradient_of(held, TrainPayload(data, "cross_entropy"))
        assert distance(found, solo) <= table["gradient"]
        output = forward(held, TrainPayload(data, "cross_entropy"))
        lps = tuple(alone[i].logprobs[0] for i in order)
        total = sum(alone[i].metrics["loss:sum"] for i in order)
        compare(TrainOutput(lps, {"loss:sum": total}), output, table)


def test_b3_padding_in_one_micro_batch(opened: Opened, model_folder: Folders, tmp_path: Path) -> None:
    """B2, B3 (d): what follows a position, be it padding or other tokens, does not reach it."""
    held = opened(model_folder("gemma3"), max_batch_tokens=4096)
    create(held, tmp_path)
    base = ce(30).data[0]
    rng = np.random.default_rng(3)
    longer = Datum(
        np.concatenate([base.tokens, rng.integers(0, 97, 25).astype(np.int32)]),
        {
            "target_tokens": np.concatenate([base.inputs["target_tokens"], rng.integers(0, 97, 25)]),
            "weights": np.concatenate([base.inputs["weights"], np.zeros(25, np.float32)]),
        },
    )
    plain = forward(held, TrainPayload((base,), "cross_entropy")).logprobs[0]
    garbage = forward(held, TrainPayload((longer,), "cross_entropy")).logprobs[0]
    np.testing.assert_allclose(garbage[:30], plain, atol=2e-5)
    alike = distance(
        gradient_of(held, TrainPayload((longer,), "cross_entropy")),
        gradient_of(held, TrainPayload((base,), "cross_entropy")),
    )
    assert alike < 1e-5


def test_b5_identical_datums(held: Held) -> None:
    """B5: within one float32 step of each other."""
    payload = ce(19)
    one, two = forward(held, TrainPayload(payload.data * 2, "cross_entropy")).logprobs
    np.testing.assert_array_max_ulp(one, two, maxulp=4)


def test_b6_runs_and_losses_in_one_pass(opened: Opened, model_folder: Folders, tmp_path: Path) -> None:
    """B6, L2: three runs of different rank, modules and loss together give what each gives alone."""
    held = opened(model_folder("qwen3"), max_batch_tokens=128)
    specs = {
        RunId("a"): LoraSpec(rank=4, seed=1),
        RunId("b"): LoraSpec(rank=2, seed=2, train_mlp=False),
        RunId("c"): LoraSpec(rank=8, seed=3, train_attn=False, train_unembed=False),
    }
    losses = dict(zip(specs, ("cross_entropy", "ppo", "gspo"), strict=True))
    payloads: dict[RunId, TrainPayload] = {}
    for number, (run, spec) in enumerate(specs.items()):
        create(held, tmp_path, run, spec, seed=number)
        data = tuple(datum(losses[run], n, n + number) for n in (8, 21, 13, 30))
        payload = TrainPayload(data, losses[run])
        payloads[run] = payload if number == 0 else on_policy(held, payload, run)
    together = run_pass(held, *(item(payload, run) for run, payload in payloads.items()))
    for run, payload in payloads.items():
        joined = held.gradients(run)
        held.optim_step(run, AdamParams(learning_rate=0.0))
        alone = forward_backward(held, payload, run)
        assert distance(joined, held.gradients(run)) < 1e-5
        output = together[item(payload, run).request]
        assert isinstance(output, TrainOutput)
        compare(alone, output, FLOAT32)


def test_b6_other_runs_leave_g_alone(held: Held, tmp_path: Path) -> None:
    """B6: a run's G and weights are bit-unchanged by what others do."""
    create(held, tmp_path, RunId("other"), seed=4)
    forward_backward(held, ce(12))
    before = held.gradients(RUN), held.parameters(RUN)
    forward_backward(held, ce(30, 9, seed=3), RunId("other"))
    held.optim_step(RunId("other"), AdamParams())
    held.drop(RunId("other"))
    assert same(held.gradients(RUN), before[0])
    assert same(held.parameters(RUN), before[1])


def test_forward_and_backward_items_in_one_pass(held: Held, tmp_path: Path) -> None:
    """G5: a `forward` beside a `forward_backward` of another run."""
    create(held, tmp_path, RunId("other"), seed=4)
    outcomes = run_pass(held, item(ce(12, 5)), item(ce(9), RunId("other"), backward=False))
    assert all(isinstance(outcome, TrainOutput) for outcome in outcomes.values())
    assert any(g.any() for g in held.gradients(RUN).values())
    assert not any(g.any() for g in held.gradients(RunId("other")).values())


def test_yields_between_micro_batches(opened: Opened, model_folder: Folders, tmp_path: Path) -> None:
    """The pass gives way after each micro-batch, so that the sampler gets its turns."""
    held = opened(model_folder("llama"), max_batch_tokens=32)
    create(held, tmp_path)
    turns = list(held.train_pass((item(ce(*[30] * 5)),)))
    assert len(turns) == 5
    assert [len(turn) for turn in turns] == [0, 0, 0, 0, 1]


def test_bf16_gradient(
    opened: Opened, model_folder: Folders, references: Callable[..., Reference], tmp_path: Path
) -> None:
    """bf16 compute against the float64 truth: sane, with float32 masters and gradients (A7)."""
    held = opened(model_folder("qwen3"), "bfloat16")
    create(held, tmp_path)
    payload = ce(20, 33)
    output = forward_backward(held, payload)
    truth = references("qwen3").answer(payload, held.parameters(RUN), SPEC.rank)
    assert max(float(np.abs(a - b).max()) for a, b in zip(output.logprobs, truth.logprobs, strict=True)) < 1.0
    assert distance(held.gradients(RUN), truth.gradients) < 0.1
    assert all(g.dtype == np.float32 for g in held.gradients(RUN).values())

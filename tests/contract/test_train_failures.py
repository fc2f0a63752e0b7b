"""What fails alone: non-finite results (L11), lack of memory, and that a failed request leaves no trace (G6)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from openrl.backends.torch.joint import Casts
from openrl.backends.torch.lora import Adapter
from openrl.backends.torch.train import Trainer
from openrl.backends.torch.train_backbone import TrainBackbone
from openrl.errors import BackendFault, BadRequest, OutOfMemory
from openrl.types import AdamParams, RunId, TrainOutput, TrainPayload
from support.training import (
    RUN,
    SPEC,
    Held,
    ce,
    create,
    datum,
    forward_backward,
    item,
    on_policy,
    run_pass,
    same,
    trainer,
)

OTHER = RunId("other")


@pytest.fixture
def llama(opened: Callable[..., Held], model_folder: Callable[..., Path]) -> Held:
    """A float32 trainer on the tiny llama, of each backend."""
    return opened(model_folder("llama"))


class Cramped:
    """A backbone on a device with room for so many tokens; fails on the way in or on the way back."""

    def __init__(self, inner: TrainBackbone, room: int, *, on_the_way_back: bool, kept: float = 1.0) -> None:
        self.inner = inner
        self.room = room
        self.on_the_way_back = on_the_way_back
        self.kept = kept  # room that a token takes whose layers keep nothing
        self.seen: list[int] = []
        self.sparing: list[bool] = []

    def run(
        self, sequences: Sequence[Tensor], adapters: Sequence[Adapter], casts: Casts, *, recomputed: int = 0
    ) -> Tensor:
        self.seen.append(len(sequences))
        self.sparing.append(recomputed > 0)
        too_large = sum(map(len, sequences)) * (self.kept if recomputed else 1.0) > self.room
        if too_large and not self.on_the_way_back:
            raise torch.OutOfMemoryError("no room")
        hidden = self.inner.run(sequences, adapters, casts, recomputed=recomputed)
        if too_large and hidden.requires_grad:
            hidden.register_hook(_refuse)
        return hidden

    def clear(self) -> None:
        self.inner.clear()


def _refuse(grad: Tensor) -> Tensor:
    raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate a lot")


def cramped(folder: Path, room: int, *, on_the_way_back: bool = False, kept: float = 1.0) -> tuple[Trainer, Cramped]:
    held = trainer(folder, max_batch_tokens=4096)
    backbone = Cramped(held.passes._backbone, room, on_the_way_back=on_the_way_back, kept=kept)
    held.passes._backbone = backbone  # type: ignore[assignment]
    return held, backbone


def overflowing(held: Held, bad: int) -> TrainPayload:
    """Three datums, one of which has a probability ratio beyond float32."""
    payload = on_policy(
        held, TrainPayload(tuple(datum("importance_sampling", n, n) for n in (9, 25, 14)), "importance_sampling")
    )
    broken = payload.data[bad]
    logprobs = broken.inputs["logprobs"].copy()
    logprobs[np.flatnonzero(broken.inputs["advantages"])[0]] = -1000
    data = list(payload.data)
    data[bad] = replace(broken, inputs={**broken.inputs, "logprobs": logprobs})
    return replace(payload, data=tuple(data))


@pytest.mark.parametrize("bad", [0, 1, 2])
@pytest.mark.parametrize("max_batch_tokens", [30, 4096])
def test_g6_l11_a_bad_datum_fails_the_whole_request_and_nothing_else(
    bad: int, max_batch_tokens: int, opened: Callable[..., Held], model_folder: Callable[..., Path], tmp_path: Path
) -> None:
    """G6: wherever the bad datum sits, G is bit-identical afterwards, and the neighbour run is served."""
    held = opened(model_folder("llama"), max_batch_tokens=max_batch_tokens)
    create(held, tmp_path)
    create(held, tmp_path, OTHER, seed=1)
    forward_backward(held, ce(10))
    before = held.gradients(RUN)
    good = ce(17, 8)
    outcomes = run_pass(held, item(overflowing(held, bad)), item(good, OTHER))
    failed, served = outcomes[item(good).request], outcomes[item(good, OTHER).request]
    assert isinstance(failed, BadRequest)
    assert f"data[{bad}]" in failed.message
    assert failed.category == "user"
    assert same(held.gradients(RUN), before)
    assert isinstance(served, TrainOutput)
    assert any(g.any() for g in held.gradients(OTHER).values())
    assert isinstance(forward_backward(held, good), TrainOutput)  # G7: the run goes on


def test_g11_empty_data(llama: Held) -> None:
    """G11."""
    llama.create(RUN, SPEC)
    (outcome,) = run_pass(llama, item(TrainPayload((), "cross_entropy"))).values()
    assert isinstance(outcome, BadRequest)


@pytest.mark.parametrize("on_the_way_back", [False, True])
def test_out_of_memory_halves_the_micro_batch(
    on_the_way_back: bool, model_folder: Callable[..., Path], tmp_path: Path
) -> None:
    """Memory ran out: the same work is done in smaller parts, and counts once."""
    payload = ce(20, 20, 20, 20, 20)
    plenty = trainer(model_folder("llama"))
    create(plenty, tmp_path)
    expected = forward_backward(plenty, payload)
    held, backbone = cramped(model_folder("llama"), room=45, on_the_way_back=on_the_way_back)
    create(held, tmp_path)
    output = forward_backward(held, payload)
    assert backbone.seen == [5, 3, 2, 1, 2]
    assert backbone.sparing == [False, True, True, True, True]
    assert output.metrics["loss:sum"] == pytest.approx(expected.metrics["loss:sum"], rel=1e-5)
    for name, value in plenty.gradients(RUN).items():
        np.testing.assert_allclose(held.gradients(RUN)[name], value, rtol=1e-3, atol=1e-4)


def test_out_of_memory_on_one_datum_fails_its_request_only(model_folder: Callable[..., Path], tmp_path: Path) -> None:
    """A datum that does not fit alone fails its request, without a trace; others are served."""
    held, _ = cramped(model_folder("llama"), room=50)
    create(held, tmp_path)
    create(held, tmp_path, OTHER, seed=1)
    outcomes = run_pass(held, item(ce(60, 10)), item(ce(12, 13), OTHER))
    failed = outcomes[item(ce(1)).request]
    assert isinstance(failed, OutOfMemory)
    assert "60 tokens" in failed.message
    assert not any(g.any() for g in held.gradients(RUN).values())
    assert isinstance(outcomes[item(ce(1), OTHER).request], TrainOutput)


def test_out_of_memory_on_one_datum_is_tried_again_sparingly(model_folder: Callable[..., Path], tmp_path: Path) -> None:
    """A datum that does not fit while layers keep what they can fits when they compute it again."""
    held, backbone = cramped(model_folder("llama"), room=50, kept=0.5)
    create(held, tmp_path)
    assert isinstance(forward_backward(held, ce(60)), TrainOutput)
    assert (backbone.seen, backbone.sparing) == ([1, 1], [False, True])


def test_other_faults_are_not_swallowed(
    model_folder: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bug is raised to the worker loop, not retried as if memory had run out."""
    held, backbone = cramped(model_folder("llama"), room=50)
    create(held, tmp_path)

    def broken(*_: Any, **__: Any) -> Tensor:
        raise RuntimeError("index out of range in self")

    monkeypatch.setattr(backbone, "run", broken)
    with pytest.raises(RuntimeError, match="index out of range"):
        run_pass(held, item(ce(10)))


def test_an_abandoned_pass_leaves_no_trace(llama: Held, tmp_path: Path) -> None:
    """Closing the generator between micro-batches adds nothing (G6)."""
    create(llama, tmp_path)
    turns = llama.train_pass((item(ce(*[100] * 6)),))
    next(turns)
    next(turns)
    turns.close()  # type: ignore[attr-defined]
    assert not any(g.any() for g in llama.gradients(RUN).values())


def test_unknown_run(llama: Held) -> None:
    """The daemon never asks for a run that it has not created; if it does, that is a fault of ours."""
    with pytest.raises(BackendFault, match="ghost"):
        llama.optim_step(RunId("ghost"), AdamParams())
    llama.drop(RunId("ghost"))  # ignored

"""Sequences longer than a model's context: the engines themselves refuse them, since beyond it some compute something
else without a word (a window that mlx-lm does not have; positions that the model has never seen)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from openrl.backends.base import Backend, BackendSpec, SampleJob, TrainItem
from openrl.backends.registry import opener
from openrl.errors import BadRequest, OpenRLError
from openrl.types import FullSpec, LoraSpec, RequestId, RunId, SampleOutput, TrainOutput, TrainSpec
from support.sampling import payload
from support.training import RUN, SPEC, ce, item, needs_mlx

Folders = Callable[..., Path]
OTHER = RunId("other")
# gemma2 has a window of 16, which MLX does not compute: its context ends there.
MODELS = [
    ("cpu", "llama", 256),
    pytest.param("mps", "llama", 256, marks=needs_mlx),
    pytest.param("mps", "gemma2", 16, marks=needs_mlx),
]


def opened(engine: str, folder: Path) -> Backend:
    return opener(engine)(BackendSpec(folder, "cpu", "float32", 1, 1024, 8, 4096, name="tiny/model"))


def outcomes(backend: Backend, *items: TrainItem) -> dict[RequestId, TrainOutput | OpenRLError]:
    return {request: outcome for finished in backend.train.train_pass(items) for request, outcome in finished.items()}


@pytest.mark.parametrize(("spec", "backward"), [(SPEC, True), (SPEC, False), (FullSpec(), True)])
@pytest.mark.parametrize(("engine", "family", "limit"), MODELS)
def test_a_request_with_a_datum_that_is_too_long_fails_alone(
    engine: str, family: str, limit: int, backward: bool, spec: TrainSpec, model_folder: Folders
) -> None:
    """L12, G6: named by datum, length and limit; it adds nothing, and a request in the same pass is not disturbed."""
    backend = opened(engine, model_folder(family))
    assert backend.info.max_context == limit
    backend.train.create(RUN, spec)
    backend.train.create(OTHER, LoraSpec(rank=2, seed=1))
    too_long = item(ce(limit, limit + 1, 5), RUN, backward=backward)
    fine = item(ce(limit, 5), OTHER)
    found = outcomes(backend, too_long, fine)
    refused = found[too_long.request]
    assert isinstance(refused, BadRequest)
    assert f"data[1].model_input has {limit + 1} tokens; the model takes 1..{limit} tokens" in str(refused)
    assert isinstance(found[fine.request], TrainOutput)
    assert not any(g.any() for g in backend.train.gradients(RUN).values())  # type: ignore[attr-defined]


@pytest.mark.parametrize(("engine", "family", "limit"), MODELS)
def test_a_sample_that_is_too_long_is_refused(engine: str, family: str, limit: int, model_folder: Folders) -> None:
    """S10: prompt and tokens to draw together; as many as there is room for are drawn where no number is given."""
    backend = opened(engine, model_folder(family))
    prompt = (np.arange(limit - 3) % 90).tolist()
    wanted = payload(prompt, 1, max_tokens=4, stop=(), seed=1)
    with pytest.raises(BadRequest, match=rf"{limit - 3} prompt tokens \+ 4 .* = {limit + 1}; .*context holds {limit}"):
        backend.sample.add(SampleJob(RequestId("s"), wanted, None))
    backend.sample.add(SampleJob(RequestId("s"), payload(prompt, 1, max_tokens=None, stop=(), seed=1), None))
    found: list[SampleOutput | OpenRLError] = []
    while backend.sample.busy:
        found += [output for _, output in backend.sample.step()]
    (output,) = found
    assert isinstance(output, SampleOutput)
    assert 1 <= len(output.sequences[0].tokens) <= 3

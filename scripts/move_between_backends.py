"""Train on one backend, save, stop the daemon, go on with another: the losses are those of the run that never moved.

    python scripts/move_between_backends.py mps cpu mps --model smollm2-135m-instruct
    python scripts/move_between_backends.py cuda cpu --model Qwen/Qwen3-0.6B --rank 16

Each backend is served in turn over one data folder, by `openrl serve`, and used through the `tinker` SDK. A run is
trained, saved with its optimizer, and trained on; the next backend loads what was saved and does the same steps, which
must give the same losses (C3, O11), and draws the same tokens for the same seed. All is float32, where backends differ
by rounding alone (C5). The status is 1 if they do not agree.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tinker
from tinker import types

from openrl_recipes.local_server import local_server


@dataclass(frozen=True)
class Moved:
    """A saved run, and what it did next where it was."""

    path: str
    tokens: list[list[int]]
    losses: list[float]


def move(backends: Sequence[str], model: str, folder: Path, arguments: Sequence[str] = (), rank: int = 8) -> float:
    """Move a run along `backends`; the largest relative difference of a loss. `arguments`: more of `openrl serve`.

    Raises `ValueError` if one draws other tokens for a seed than the one before.
    """
    moved: Moved | None = None
    worst = 0.0
    for number, backend in enumerate(backends):
        serve = ["--backend", backend, "--dtype", "float32", "--data-dir", str(folder / "data"), *arguments]
        with local_server(folder / f"{number}-{backend}.log", serve) as endpoint:
            service = tinker.ServiceClient(base_url=endpoint.base_url, api_key=endpoint.api_key)
            if moved is None:
                run = service.create_lora_training_client(model, rank=rank, seed=1).result()
                print(f"{backend}: trained     {_shown(train(run))}", flush=True)
            else:
                run = service.create_training_client_from_state_with_optimizer(moved.path).result()
                if sample(run) != moved.tokens:
                    raise ValueError(f"{backend} draws other tokens than {backends[number - 1]} for the same seed")
                losses = train(run)
                worst = max(worst, float(np.abs(np.divide(losses, moved.losses) - 1).max()))
                print(f"{backend}: resumed     {_shown(losses)}   largest difference so far {worst:.0e}", flush=True)
            if number + 1 < len(backends):
                moved = Moved(run.save_state(f"moving-{number}").result().path, sample(run), train(run))
                print(f"{backend}: not moved   {_shown(moved.losses)}", flush=True)
            service.close("success")
    return worst


def train(run: tinker.TrainingClient, steps: int = 3) -> list[float]:
    """Losses of the next steps, in nats a token."""
    batch = [_datum([(7 * i + 5 * row) % 89 + 3 for i in range(24 + 6 * row)]) for row in range(4)]
    tokens = sum(datum.model_input.length for datum in batch)
    losses: list[float] = []
    for _ in range(steps):
        passed = run.forward_backward(batch, "cross_entropy")
        stepped = run.optim_step(types.AdamParams(learning_rate=3e-3))
        losses.append(passed.result().metrics["loss:sum"] / tokens)
        stepped.result()
    return losses


def sample(run: tinker.TrainingClient) -> list[list[int]]:
    """Tokens that the weights of this moment draw for a seed."""
    sampler = run.save_weights_and_get_sampling_client().result()
    params = types.SamplingParams(max_tokens=12, temperature=1.0, seed=5, stop=[])
    drawn = sampler.sample(types.ModelInput.from_ints(list(range(3, 20))), num_samples=3, sampling_params=params)
    return [list(sequence.tokens) for sequence in drawn.result().sequences]


def _datum(tokens: list[int]) -> types.Datum:
    inputs = {"target_tokens": np.array(tokens[1:], np.int64), "weights": np.ones(len(tokens) - 1, np.float32)}
    return types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs)


def _shown(losses: Sequence[float]) -> str:
    return "  ".join(f"{loss:.6f}" for loss in losses)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("backends", nargs="+", help="two or more, in order: cpu, mps, cuda")
    parser.add_argument("--model", default="smollm2-135m-instruct", help="any that `openrl serve --model` takes")
    parser.add_argument("--name", help="what it is served as, if the SDK is to ask for another name")
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--tolerance", type=float, default=1e-4, help="largest relative difference of a loss")
    options = parser.parse_args()
    if len(options.backends) < 2:
        parser.error("give two backends at least")
    with tempfile.TemporaryDirectory(prefix="openrl-move-") as folder:
        model = ["--model", options.model]
        worst = move(options.backends, options.name or options.model, Path(folder), model, options.rank)
    print(f"largest relative difference of a loss: {worst:.1e} (allowed: {options.tolerance:.0e})")
    return int(worst > options.tolerance)


if __name__ == "__main__":
    sys.exit(main())

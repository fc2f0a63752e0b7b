"""Small helpers on the `tinker` SDK: a service that has the model, a datum, Adam's settings."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import tinker
from tinker import types

from openrl_recipes.shared.options import OptionError


@contextmanager
def service_with(model: str) -> Generator[tinker.ServiceClient]:
    """A service client, for a `with` block. Raises `OptionError` if no server answers or it lacks `model`."""
    try:
        service = tinker.ServiceClient()
        answer = tinker.RestClient().get_server_capabilities().result()
        served = [str(each.model_name) for each in answer.supported_models]
    except (tinker.TinkerError, ValueError) as error:
        raise OptionError(
            f"No server: {error}\nStart one with `openrl serve --model {model}` and export the lines that it prints."
        ) from error
    with service:
        if model not in served:
            raise OptionError(f"--model {model}: the server has {', '.join(served)}. Or: openrl serve --model {model}")
        yield service


def shifted(prompt: Sequence[int], completion: Sequence[int], **values: Sequence[float]) -> types.Datum:
    """A datum that predicts `completion` after `prompt`; `values` are given per completion token, 0 before it.

    Position t of the input predicts target t, so the input lacks the last token and the targets the first.
    """
    padding = [0.0] * (len(prompt) - 1)
    tokens = [*prompt, *completion]
    inputs: dict[str, Any] = {"target_tokens": tokens[1:]} | {key: [*padding, *row] for key, row in values.items()}
    return types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs)


def supervised_batch(pairs: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[types.Datum]:
    """A datum a (prompt, answer) pair; weights on the answers, such that the summed loss is a mean a token."""
    total = sum(len(answer) for _, answer in pairs)
    return [shifted(prompt, answer, weights=[1 / total] * len(answer)) for prompt, answer in pairs]


@dataclass(frozen=True, slots=True)
class SentStep:
    """A training step on its way: its number, its two futures, its tokens, and when it was sent."""

    step: int
    forward_backward: tinker.APIFuture[types.ForwardBackwardOutput]
    optim: tinker.APIFuture[types.OptimStepResponse]
    tokens: int
    sent: float

    def loss(self) -> float:
        """Wait for both results; the summed loss."""
        loss = self.forward_backward.result().metrics["loss:sum"]
        self.optim.result()
        return loss


def adam(learning_rate: float) -> types.AdamParams:
    """Adam as all recipes use it: the gradient clipped to norm 1."""
    return types.AdamParams(learning_rate=learning_rate, eps=1e-8, grad_clip_norm=1.0)


def decayed(step: int, steps: int, warmup: int = 2) -> float:
    """Share of the full learning rate at `step`: a linear warm-up, then a linear fall to a tenth."""
    return min(1.0, (step + 1) / warmup) * (1 - 0.9 * step / max(1, steps))


def count_tokens(data: Sequence[types.Datum]) -> int:
    """Input tokens of a batch."""
    return sum(datum.model_input.length for datum in data)

"""What a teacher gives: logprobs of what a student wrote, or its own answers with its k likeliest tokens at each place.

The second can be kept in a file, a line an example, and learnt from where the teacher is not at hand.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tinker
from tinker import types

from openrl_recipes.shared.grpo import Rollout
from openrl_recipes.shared.options import OptionError


@dataclass(frozen=True, slots=True)
class Example:
    """A teacher's answer to a prompt. `top_tokens` and `top_logprobs` have k entries for each token of the answer."""

    prompt: list[int]
    tokens: list[int]
    top_tokens: list[list[int]]
    top_logprobs: list[list[float]]


def ask(
    teacher: tinker.SamplingClient, prompts: Sequence[Sequence[int]], top_k: int, params: types.SamplingParams
) -> list[Example]:
    """The teacher's answers, one a prompt, all requests in flight together."""
    futures = [
        teacher.sample(types.ModelInput.from_ints(list(prompt)), 1, params, topk_sample_logprobs=top_k)
        for prompt in prompts
    ]
    made: list[Example] = []
    for prompt, future in zip(prompts, futures, strict=True):
        sequence = future.result().sequences[0]
        top = sequence.topk_logprobs_np
        if top is None:
            raise OptionError("the teacher's server sends no topk_sample_logprobs")
        made.append(Example(list(prompt), list(sequence.tokens), top.token_ids.tolist(), top.logprobs.tolist()))
    return made


def score(teacher: tinker.SamplingClient, rollouts: Sequence[Rollout]) -> list[list[float]]:
    """The teacher's logprob of each token that the student sampled, after the same prompt and the tokens before it."""
    futures = [teacher.compute_logprobs(types.ModelInput.from_ints([*r.prompt, *r.tokens])) for r in rollouts]
    # Only the first of all tokens has None for a logprob, and it belongs to the prompt.
    return [[p or 0.0 for p in f.result()[len(r.prompt) :]] for r, f in zip(rollouts, futures, strict=True)]


def soft_targets(example: Example) -> np.ndarray:
    """The teacher's probabilities of its k likeliest tokens, [answer tokens, k] float32; each row sums to 1.

    What the teacher gave to all other tokens is spread over the k in proportion.
    """
    logprobs = np.asarray(example.top_logprobs)
    weights = np.exp(logprobs - logprobs.max(axis=1, keepdims=True))
    return (weights / weights.sum(axis=1, keepdims=True)).astype(np.float32)


def soft_targets_batch(examples: Sequence[Example]) -> list[types.Datum]:
    """One datum an example with targets of rank 2: at each place k tokens, weighted by the teacher's probabilities.

    Rows before the answer have weight 0. Dividing by the number of answer tokens turns the server's sum into a mean.
    """
    total = sum(len(example.tokens) for example in examples)
    data: list[types.Datum] = []
    for example in examples:
        k = len(example.top_tokens[0])
        before = len(example.prompt) - 1
        targets = np.concatenate([np.zeros((before, k), np.int64), np.asarray(example.top_tokens, np.int64)])
        weights = np.concatenate([np.zeros((before, k), np.float32), soft_targets(example) / np.float32(total)])
        data.append(
            types.Datum(
                model_input=types.ModelInput.from_ints([*example.prompt, *example.tokens[:-1]]),
                loss_fn_inputs={
                    "target_tokens": types.TensorData.from_numpy(targets),
                    "weights": types.TensorData.from_numpy(weights),
                },
            )
        )
    return data


def entropy(examples: Sequence[Example]) -> float:
    """Mean entropy of the soft targets in nats a token: the loss of a student that agrees with them entirely."""
    targets = np.concatenate([soft_targets(example).ravel() for example in examples]).astype(np.float64)
    positive = targets[targets > 0]
    return float(-(positive * np.log(positive)).sum() / sum(len(example.tokens) for example in examples))


def write_examples(file: Path, examples: Sequence[Example]) -> None:
    """Write a teacher file: JSON lines with the fields of `Example`."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(dataclasses.asdict(example)) + "\n" for example in examples))


def read_examples(file: Path) -> list[Example]:
    """Read a teacher file. Raises `OptionError` if there is none, or a line of it is no example."""
    try:
        return [_example(json.loads(line)) for line in file.read_text().splitlines()]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise OptionError(f"--teacher-file {file}: {error!r}. Write one with --make-teacher.") from None


def _example(record: dict[str, list[int]]) -> Example:
    made = Example(**record)  # pyright: ignore[reportArgumentType]
    if {np.shape(made.top_tokens), np.shape(made.top_logprobs)} != {(len(made.tokens), len(made.top_tokens[0]))}:
        raise ValueError(f"{len(made.tokens)} tokens with top_tokens of shape {np.shape(made.top_tokens)}")
    return made

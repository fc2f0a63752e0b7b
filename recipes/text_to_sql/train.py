"""Teach a small model to answer questions with SQL: a supervised start, then GRPO on what the queries return.

Works against any server that speaks the Tinker API; this file knows only the `tinker` SDK:

    export TINKER_BASE_URL=http://127.0.0.1:8000 TINKER_API_KEY=tml-...      # as `openrl serve` prints them
    python -m openrl_recipes.text_to_sql.train --sft-steps 10 --rl-steps 8

Stage 1 (SFT) shows the model questions with their reference queries: cross-entropy, loss on the query alone.
Stage 2 (GRPO) lets it write queries itself, 8 for a question. The only reward is whether a query, run on three
databases, returns what the reference returns. Queries better than their group's mean become likelier, worse ones
less likely. Questions, databases and references are generated; the test questions are about tables that training
never shows.
"""

from __future__ import annotations

import argparse
import dataclasses
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import numpy as np
import tinker
from tinker import types

from openrl_recipes.text_to_sql import report
from openrl_recipes.text_to_sql.generator import Item, items, make_items
from openrl_recipes.text_to_sql.scoring import answer_query


@dataclass(frozen=True, slots=True)
class Options:
    """Every dial of the run; the defaults take about five minutes on two CPU cores."""

    model: Annotated[str, "base model, as the server names it"] = "HuggingFaceTB/SmolLM2-135M-Instruct"
    rank: Annotated[int, "LoRA rank"] = 16
    seed: Annotated[int, "seed of adapter, questions and samples"] = 0
    out: Annotated[str, "folder for metrics.jsonl, curves.png and report.md"] = "demo-out"
    eval_items: Annotated[int, "held-out questions"] = 64
    max_tokens: Annotated[int, "longest query in tokens"] = 40
    sft_steps: Annotated[int, "supervised steps"] = 10
    sft_batch: Annotated[int, "examples a supervised step"] = 16
    sft_lr: Annotated[float, "learning rate of the supervised stage"] = 1e-3
    rl_steps: Annotated[int, "GRPO steps"] = 12
    rl_groups: Annotated[int, "questions a GRPO step"] = 8
    rl_samples: Annotated[int, "queries sampled for a question"] = 8
    rl_lr: Annotated[float, "learning rate of the GRPO stage"] = 1e-3
    rl_loss: Annotated[types.LossFnType, "importance_sampling or ppo"] = "importance_sampling"


@dataclass(frozen=True, slots=True)
class Run:
    """What every stage needs: the run on the server, its tokenizer, the dials, and where to show and log progress."""

    trainer: tinker.TrainingClient
    tokenizer: Any
    options: Options
    bars: report.Bars
    log: report.MetricLog

    def encode(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    def query(self, tokens: list[int]) -> str:
        return answer_query(self.tokenizer.decode(tokens))

    def sampling(self, temperature: float, seed: int | None = None) -> types.SamplingParams:
        """A query ends with its line."""
        return types.SamplingParams(max_tokens=self.options.max_tokens, temperature=temperature, seed=seed, stop=["\n"])


def main(options: Options) -> report.Summary:
    """Run both stages and write the results to `options.out`; returns what the final table shows."""
    log = report.MetricLog(Path(options.out))
    held_out = make_items("held-out", options.eval_items, options.seed)
    with tinker.ServiceClient() as service, report.progress() as bars:
        trainer = service.create_lora_training_client(options.model, rank=options.rank, seed=options.seed).result()
        run = Run(trainer, trainer.get_tokenizer(), options, bars, log)
        policy = trainer.save_weights_and_get_sampling_client().result()
        before = evaluate(run, policy, held_out, "before")
        policy = supervised(run)
        after_sft = evaluate(run, policy, held_out, "after SFT")
        policy = grpo(run, policy)
        after_rl = evaluate(run, policy, held_out, "after RL")
    summary = report.Summary(held_out, (before, after_sft, after_rl), log.records)
    report.write(summary, Path(options.out))
    return summary


# ------------------------------------------------------------------------------------------------------------------
# Stage 1: supervised fine-tuning


def supervised(run: Run) -> tinker.SamplingClient:
    """Cross-entropy on reference queries. Each step is sent before the result of the one before it is read."""
    options, trainer = run.options, run.trainer
    questions = items("train", options.seed)
    bar = run.bars.add("SFT", options.sft_steps)
    sent_steps: list[SentStep] = []
    for step in range(options.sft_steps):
        data = supervised_batch(run, list(islice(questions, options.sft_batch)))
        sent = time.monotonic()
        forward_backward = trainer.forward_backward(data, "cross_entropy")
        optim = trainer.optim_step(adam(options.sft_lr * schedule(step, options.sft_steps)))
        sent_steps.append(SentStep(forward_backward, optim, count_tokens(data), sent))
        if step > 0:
            sent_steps.pop(0).finish(run.log, bar)
    policy = trainer.save_weights_and_get_sampling_client()
    for sent_step in sent_steps:
        sent_step.finish(run.log, bar)
    return policy.result()


@dataclass(frozen=True, slots=True)
class SentStep:
    """A supervised step on its way: its two futures, its tokens, and when it was sent."""

    forward_backward: tinker.APIFuture[types.ForwardBackwardOutput]
    optim: tinker.APIFuture[types.OptimStepResponse]
    tokens: int
    sent: float

    def finish(self, log: report.MetricLog, bar: report.Bar) -> None:
        """Wait for both results and log them."""
        loss = self.forward_backward.result().metrics["loss:sum"]
        self.optim.result()
        log.add("sft", loss=loss, train_tokens=self.tokens, sent=self.sent)
        bar.advance(f"loss {loss:.3f}")


def supervised_batch(run: Run, batch: Sequence[Item]) -> list[types.Datum]:
    """Prompt and query as one sequence; weights of 0 on the prompt, and such that the summed loss is a mean."""
    pairs = [(run.encode(item.prompt), run.encode(item.answer)) for item in batch]
    answer_tokens = sum(len(answer) for _, answer in pairs)
    return [shifted(prompt, answer, weights=[1 / answer_tokens] * len(answer)) for prompt, answer in pairs]


# ------------------------------------------------------------------------------------------------------------------
# Stage 2: GRPO


@dataclass(frozen=True, slots=True)
class Rollout:
    """One sampled query: the prompt's tokens, the sampled ones, their logprobs when sampled, and the reward."""

    prompt: list[int]
    tokens: list[int]
    logprobs: list[float]
    reward: float


def grpo(run: Run, policy: tinker.SamplingClient) -> tinker.SamplingClient:
    """Sample with the newest weights, score by running the queries, update, and so on."""
    options = run.options
    questions = items("train", options.seed + 1)
    bar = run.bars.add("GRPO", options.rl_steps)
    for step in range(options.rl_steps):
        sent = time.monotonic()
        groups = rollouts(run, policy, list(islice(questions, options.rl_groups)), seed=1000 * (step + 1))
        mixed = [group for group in groups if len({rollout.reward for rollout in group}) > 1]
        if mixed:
            policy = update(run, mixed)
        reward = float(np.mean([rollout.reward for group in groups for rollout in group]))
        run.log.add("grpo", reward=reward, mixed_groups=len(mixed) / len(groups), sent=sent)
        bar.advance(f"reward {reward:.2f}, {len(mixed)} of {len(groups)} groups mixed")
    return policy


def rollouts(run: Run, policy: tinker.SamplingClient, batch: Sequence[Item], seed: int) -> list[list[Rollout]]:
    """`rl_samples` queries at temperature 1 for each question, all requests in flight together."""
    sent = time.monotonic()
    prompts = [run.encode(item.prompt) for item in batch]
    futures = [
        policy.sample(types.ModelInput.from_ints(prompt), run.options.rl_samples, run.sampling(1.0, seed + 100 * i))
        for i, prompt in enumerate(prompts)
    ]
    groups: list[list[Rollout]] = []
    for item, prompt, future in zip(batch, prompts, futures, strict=True):
        sequences = future.result().sequences
        rewards = [float(item.solved_by(run.query(sequence.tokens))) for sequence in sequences]
        pairs = zip(sequences, rewards, strict=True)
        groups.append([Rollout(prompt, s.tokens, s.logprobs or [], reward) for s, reward in pairs])
    run.log.add("sample", sampled_tokens=sum(len(r.tokens) for group in groups for r in group), sent=sent)
    return groups


def update(run: Run, groups: Sequence[Sequence[Rollout]]) -> tinker.SamplingClient:
    """One step on the groups' rollouts; returns a sampler of the new weights.

    The three calls go out together: the server runs them in this order, and no round trip is waited for in between.
    """
    data = policy_gradient_batch(groups)
    sent = time.monotonic()
    forward_backward = run.trainer.forward_backward(data, run.options.rl_loss)
    optim = run.trainer.optim_step(adam(run.options.rl_lr))
    policy = run.trainer.save_weights_and_get_sampling_client()
    forward_backward.result()
    optim.result()
    run.log.add("update", train_tokens=count_tokens(data), sent=sent)
    return policy.result()


def policy_gradient_batch(groups: Sequence[Sequence[Rollout]]) -> list[types.Datum]:
    """One datum a rollout, with its advantage (reward minus the group's mean) on every sampled token.

    A group whose rewards are all alike has advantages of zero and teaches nothing, so callers leave it out. We do
    not divide by the group's deviation: it would push the lone success at a hard question hardest of all. Dividing
    by the number of sampled tokens turns the server's sum into a mean, which keeps the meaning of the clip.
    """
    total = sum(len(rollout.tokens) for group in groups for rollout in group)
    data: list[types.Datum] = []
    for group in groups:
        baseline = sum(rollout.reward for rollout in group) / len(group)
        for r in group:
            advantages = [(r.reward - baseline) / total] * len(r.tokens)
            data.append(shifted(r.prompt, r.tokens, logprobs=r.logprobs, advantages=advantages))
    return data


# ------------------------------------------------------------------------------------------------------------------
# Evaluation and small helpers


def evaluate(run: Run, policy: tinker.SamplingClient, held_out: Sequence[Item], name: str) -> report.Evaluation:
    """Execution accuracy on the held-out questions, one greedy query each."""
    bar, sent = run.bars.add(f"evaluate {name}", len(held_out)), time.monotonic()
    prompts = [types.ModelInput.from_ints(run.encode(item.prompt)) for item in held_out]
    futures = [policy.sample(prompt, 1, run.sampling(temperature=0.0)) for prompt in prompts]
    queries: list[str] = []
    solved: list[bool] = []
    sampled_tokens = 0
    for item, future in zip(held_out, futures, strict=True):
        tokens = future.result().sequences[0].tokens
        sampled_tokens += len(tokens)
        queries.append(run.query(tokens))
        solved.append(item.solved_by(queries[-1]))
        bar.advance(f"accuracy {sum(solved) / len(solved):.0%}")
    evaluation = report.Evaluation(name, queries, solved)
    run.log.add("evaluate", name=name, accuracy=evaluation.accuracy, sampled_tokens=sampled_tokens, sent=sent)
    return evaluation


def shifted(prompt: list[int], completion: list[int], **values: list[float]) -> types.Datum:
    """A datum that predicts `completion` after `prompt`; `values` are given per completion token, 0 before it.

    Position t of the input predicts target t, so the input lacks the last token and the targets the first.
    """
    padding = [0.0] * (len(prompt) - 1)
    tokens = [*prompt, *completion]
    inputs: dict[str, Any] = {"target_tokens": tokens[1:]} | {key: padding + row for key, row in values.items()}
    return types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs)


def adam(learning_rate: float) -> types.AdamParams:
    return types.AdamParams(learning_rate=learning_rate, eps=1e-8, grad_clip_norm=1.0)


def schedule(step: int, steps: int) -> float:
    """Share of the full learning rate: two steps of warm-up, then a linear fall to a tenth."""
    return min(1.0, (step + 1) / 2) * (1 - 0.9 * step / max(1, steps))


def count_tokens(data: Sequence[types.Datum]) -> int:
    return sum(datum.model_input.length for datum in data)


def parse_options(arguments: Sequence[str] | None = None) -> Options:
    """Options from the command line, one flag a field of `Options`."""
    parser = argparse.ArgumentParser(
        description="Text-to-SQL: SFT, then GRPO", formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    hints = get_type_hints(Options, include_extras=True)
    for f in dataclasses.fields(Options):
        flag, text = f"--{f.name.replace('_', '-')}", hints[f.name].__metadata__[0]
        parser.add_argument(flag, type=type(f.default), default=f.default, help=text)
    return Options(**vars(parser.parse_args(arguments)))


if __name__ == "__main__":
    report.show(main(parse_options()))

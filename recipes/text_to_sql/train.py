"""Teach a small model to answer questions with SQL: a supervised start, then GRPO on what the queries return.

    openrl recipe run text_to_sql                  # starts a server if none answers
    python -m openrl_recipes.text_to_sql.train     # the same against the server that TINKER_BASE_URL names

Stage 1 (SFT) shows the model questions with their reference queries: cross-entropy, loss on the query alone. It
saturates this task, so it is kept short here, to leave something to stage 2.
Stage 2 (GRPO, in grpo.py) lets the model write queries itself, several for a question. The only reward is whether a
query, run on three databases, returns what the reference returns. Queries better than their group's mean become
likelier, worse ones less likely. The questions of the evaluations (evaluate.py) are about tables that training never
shows.

SFT alone, to the end (Gemma 3 270M has never seen a chat; the prompt is plain text that ends in SELECT):

    openrl recipe run text_to_sql model=google/gemma-3-270m stages=sft sft_steps=64 sft_batch=8

On a GPU, with Spider in a folder, and the next batch sampled while a step trains:

    python -m openrl_recipes.text_to_sql.train --model MODEL --source folder:spider --max-tokens 128 --max-staleness 1

Stop the run whenever you like, even with kill -9: the same command goes on where it was. Options: `--help`.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import tinker
from rich.console import Console

from openrl_recipes.shared.client import SentStep, adam, count_tokens, decayed, service_with, supervised_batch
from openrl_recipes.shared.folder import RunFolder
from openrl_recipes.shared.options import run as run_command
from openrl_recipes.shared.progress import Bar, progress
from openrl_recipes.shared.report import show, write_report
from openrl_recipes.text_to_sql.evaluate import evaluate, keep_best
from openrl_recipes.text_to_sql.grpo import grpo
from openrl_recipes.text_to_sql.judge import Judge
from openrl_recipes.text_to_sql.options import Options
from openrl_recipes.text_to_sql.run import Best, Run, open_run
from openrl_recipes.text_to_sql.sources import open_source

__all__ = ["Options", "Summary", "main"]


@dataclass(frozen=True, slots=True)
class Summary:
    """Held-out execution accuracy before and after each stage that ran; the best and the last checkpoint."""

    accuracy: dict[str, float]
    best: Best
    state: str | None


def main(options: Options) -> Summary:
    """Run the stages, or what is left of them; returns what came of it."""
    source = open_source(options.source, options.seed)
    folder = RunFolder(Path(options.out), options, tensorboard=options.tensorboard, goes_on=True)
    stages = options.stages.split(",")
    with service_with(options.model) as service, Judge() as judge, progress() as bars:
        run = open_run(options, folder, service, source, judge, bars)
        if run.stage == "before":
            evaluate(run, run.policy(), "before", 0)
            run.reached(stages[0], 0)
        if run.stage == "sft":
            supervised(run)
            finish(run, run.policy(), options.sft_steps, last=stages[-1] == "sft")
        if run.stage == "grpo":
            finish(run, grpo(run), options.rl_steps, last=True)
    write_report(folder.path)
    show_results(run, Console())
    accuracy = {record["stage"]: record["held_out"] for record in folder.records if "held_out" in record}
    return Summary(accuracy, run.best, run.state)


def finish(run: Run, policy: tinker.SamplingClient, steps: int, *, last: bool) -> None:
    """Evaluate at the end of a stage and save a point from which the next one begins."""
    stage = "after" if last else f"after {run.stage}"
    keep_best(run, evaluate(run, policy, stage, steps), steps)
    run.reached("done" if last else "grpo", 0)


def show_results(run: Run, console: Console) -> None:
    """The final tables, and where the weights are."""
    show(run.folder.path, console)
    for reason, rows in run.source.left_out.items():
        console.print(f"{rows} rows of {run.options.source} were left out: {reason}", soft_wrap=True)
    console.print(f"Last weights, to train on from: {run.state}", soft_wrap=True)
    if run.best.path is not None:
        score = f"{run.best.score:.1%}, chosen by that held-out score"
        console.print(f"Best weights, to sample from: {run.best.path} ({score})", soft_wrap=True)


# ------------------------------------------------------------------------------------------------------------------
# Stage 1: supervised fine-tuning


def supervised(run: Run) -> None:
    """Cross-entropy on reference queries. Each step is sent before the result of the one before it is read."""
    options, first = run.options, run.step
    questions = islice(run.source.train(options.seed), first * options.sft_batch, None)
    bar = run.bars.add("sft", options.sft_steps, done=first)
    on_the_way: list[SentStep] = []
    for step in range(first, options.sft_steps):
        batch = list(islice(questions, options.sft_batch))
        data = supervised_batch([(run.prompt(item), run.answer(item)) for item in batch])
        sent = time.monotonic()
        forward_backward = run.trainer.forward_backward(data, "cross_entropy")
        optim = run.trainer.optim_step(adam(options.sft_lr * decayed(step, options.sft_steps)))
        on_the_way.append(SentStep(step + 1, forward_backward, optim, count_tokens(data), sent))
        point = bool(options.save_every) and (step + 1) % options.save_every == 0
        while len(on_the_way) > (0 if point or step + 1 == options.sft_steps else 1):
            finish_step(run, on_the_way.pop(0), bar)
        if point and step + 1 < options.sft_steps:
            run.reached("sft", step + 1)


def finish_step(run: Run, step: SentStep, bar: Bar) -> None:
    """Wait for a step's results and log them."""
    loss = step.loss()
    run.folder.log("sft", step.step, loss=loss, train_tokens=step.tokens, sent=step.sent)
    bar.advance(f"loss {loss:.3f}")


if __name__ == "__main__":
    run_command(main, Options)

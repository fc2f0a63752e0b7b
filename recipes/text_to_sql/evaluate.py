"""Evaluation: one greedy query for each held-out question, run on its databases."""

from __future__ import annotations

import time
from collections.abc import Sequence

import tinker
from tinker import types

from openrl_recipes.shared.agreement import agreement
from openrl_recipes.text_to_sql.item import Item
from openrl_recipes.text_to_sql.run import Best, Run

AGREEMENT_ITEMS = 32


def evaluate(run: Run, policy: tinker.SamplingClient, stage: str, step: int) -> float:
    """Execution accuracy of `policy` on the held-out questions, 0 to 1; logged, with what the model wrote."""
    bar, sent = run.bars.add(stage, len(run.held_out)), time.monotonic()
    prompts = [types.ModelInput.from_ints(run.prompt(item)) for item in run.held_out]
    futures = [policy.sample(prompt, 1, run.sampling(temperature=0.0)) for prompt in prompts]
    queries: list[str] = []
    sampled_tokens = 0
    for future in futures:
        tokens = future.result().sequences[0].tokens
        sampled_tokens += len(tokens)
        queries.append(run.query(tokens))
        bar.advance("")
    scores = run.judge.score(list(zip(run.held_out, queries, strict=True)))
    solved = [score.match for score in scores]
    values = accuracies(run.held_out, solved) | {"held_out_runs": mean([score.runs for score in scores])}
    if stage == "after":  # does the sampler still agree with the trainer?
        some = [run.prompt(item) for item in run.held_out[:AGREEMENT_ITEMS]]
        values |= agreement(run.trainer, policy, some, run.sampling(1.0, run.options.seed))
    run.folder.log(stage, step, sampled_tokens=sampled_tokens, sent=sent, **values)
    if stage != "evaluate":
        for item, query, ok in zip(run.held_out, queries, solved, strict=True):
            run.folder.sample(stage, prompt=item.prompt, completion=query, score=float(ok), wanted=item.gold)
    bar.note(f"{values['held_out']:.1%} right")
    return values["held_out"]


def accuracies(items: Sequence[Item], solved: Sequence[float]) -> dict[str, float]:
    """Accuracy over all questions, and over those of each level."""
    found = {"held_out": mean(solved)}
    for level in sorted({item.level for item in items}):
        of_level = [ok for item, ok in zip(items, solved, strict=True) if item.level == level]
        found[f"held_out_level_{level}"] = mean(of_level)
    return found


def keep_best(run: Run, score: float, step: int) -> None:
    """Save the sampler's weights if no evaluation of this run was better. Call it before the next update."""
    if run.options.keep_best and score > run.best.score:
        path = run.trainer.save_weights_for_sampler(f"best-{run.stage}-{step}").result().path
        run.outdated += [run.best.path] if run.best.path is not None else []
        run.best = Best(score, run.stage, step, path)


def mean(values: Sequence[float]) -> float:
    """The mean as a float; booleans count as 0 and 1."""
    return sum(map(float, values)) / len(values)

"""The GRPO stage: sample queries, run them, make those that beat their group's mean likelier.

While a step trains, the next batches are sampled and scored already, up to `max_staleness` of them. They come from
weights that old, always: batch k from the weights after k - max_staleness steps, however fast the machine is, so a
run can be repeated. The loss corrects for the distance by the ratio of the two policies; `kl_v2` shows how far it is.

At a point to go on from, the next batch waits for the point's weights, since a run that goes on there has no others.
So a run that was stopped and one that was not see the same batches from the same weights.
"""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice

import tinker
from tinker import types

from openrl_recipes.shared.client import adam, count_tokens
from openrl_recipes.shared.grpo import Group, Rollout, is_mixed, policy_gradient_batch, watch
from openrl_recipes.text_to_sql.evaluate import evaluate, keep_best, mean
from openrl_recipes.text_to_sql.item import Item
from openrl_recipes.text_to_sql.rewards import reward
from openrl_recipes.text_to_sql.run import Run
from openrl_recipes.text_to_sql.scoring import Score


@dataclass(frozen=True, slots=True)
class Batch:
    """The rollouts of one step, a group a question; the parts of their scores; how long sampling them took."""

    groups: Sequence[Group]
    scores: Sequence[Score]
    seconds: float

    def metrics(self) -> dict[str, float]:
        """Means over *all* rollouts, also those of groups that teach nothing."""
        rollouts = [rollout for group in self.groups for rollout in group]
        return {
            "reward": mean([rollout.reward for rollout in rollouts]),
            "mixed_groups": mean([is_mixed(group) for group in self.groups]),
            "match": mean([score.match for score in self.scores]),
            "parses": mean([score.parses for score in self.scores]),
            "runs": mean([score.runs for score in self.scores]),
            "columns": mean([score.columns for score in self.scores]),
            "values": mean([score.values for score in self.scores]),
        }


def grpo(run: Run) -> tinker.SamplingClient:
    """The steps from `run.step` on; returns a sampler of the last weights."""
    options, first = run.options, run.step
    questions = islice(run.source.train(options.seed + 1), first * options.rl_groups, None)
    bar = run.bars.add("grpo", options.rl_steps, done=first)
    policy = run.policy()
    pending: deque[Future[Batch]] = deque()
    with ThreadPoolExecutor(1 + options.max_staleness) as threads:
        for step in range(first, options.rl_steps):
            while (batch := step + len(pending)) < options.rl_steps and sampled_after(run, batch) <= step:
                pending.append(draw(run, policy, list(islice(questions, options.rl_groups)), batch, threads))
            policy = train_step(run, policy, pending.popleft().result(), step)
            bar.advance(f"reward {run.folder.records[-1]['reward']:.2f}")
            done = step + 1
            if options.eval_every and done % options.eval_every == 0 and done < options.rl_steps:
                keep_best(run, evaluate(run, policy, "evaluate", done), done)
            if is_point(run, done):
                run.reached("grpo", done)
    return policy


def is_point(run: Run, done: int) -> bool:
    """Whether a stopped run can go on after `done` steps."""
    every = run.options.save_every
    return bool(every) and done % every == 0 and 0 < done < run.options.rl_steps


def sampled_after(run: Run, batch: int) -> int:
    """After how many steps the weights are made that `batch` is sampled with."""
    oldest = max(0, batch - run.options.max_staleness)
    every = run.options.save_every
    newest_point = batch // every * every if every else 0
    return max(oldest, newest_point)


def draw(
    run: Run, policy: tinker.SamplingClient, questions: Sequence[Item], batch: int, threads: ThreadPoolExecutor
) -> Future[Batch]:
    """Send off the requests of a batch, all together; a thread waits for the samples and has them judged."""
    sent = time.monotonic()
    prompts = [run.prompt(item) for item in questions]
    seeds = random.Random(f"{run.options.seed}/{batch}")
    futures = [
        policy.sample(
            types.ModelInput.from_ints(prompt),
            run.options.rl_samples,
            run.sampling(run.options.temperature, seeds.getrandbits(31)),
        )
        for prompt in prompts
    ]
    return threads.submit(collect, run, questions, prompts, futures, sent)


def collect(
    run: Run,
    questions: Sequence[Item],
    prompts: Sequence[list[int]],
    futures: Sequence[tinker.APIFuture[types.SampleResponse]],
    sent: float,
) -> Batch:
    """Wait for the samples; each question's are judged in the judge's processes while the others are sampled."""
    groups: list[list[types.SampledSequence]] = []
    judged: list[Future[list[Score]]] = []
    for item, future in zip(questions, futures, strict=True):
        groups.append(list(future.result().sequences))
        judged.append(run.judge.submit([(item, run.query(sequence.tokens)) for sequence in groups[-1]]))
    seconds = time.monotonic() - sent
    scores = [future.result() for future in judged]
    rollouts = [
        [rollout(run, prompt, sequence, score) for sequence, score in zip(group, row, strict=True)]
        for prompt, group, row in zip(prompts, groups, scores, strict=True)
    ]
    return Batch(rollouts, [score for row in scores for score in row], seconds)


def rollout(run: Run, prompt: list[int], sequence: types.SampledSequence, score: Score) -> Rollout:
    """A sampled query with what it earns."""
    tokens = list(sequence.tokens)
    earned = reward(score, run.options.weights)
    return Rollout(prompt, tokens, list(sequence.logprobs or []), run.query(tokens), earned)


def train_step(run: Run, policy: tinker.SamplingClient, batch: Batch, step: int) -> tinker.SamplingClient:
    """One update on the groups that teach something, logged; returns a sampler of the new weights.

    The three calls go out together: the server runs them in this order, and no round trip is waited for in between.
    """
    sampled = sum(len(rollout.tokens) for group in batch.groups for rollout in group)
    run.folder.log("grpo", step + 1, sampled_tokens=sampled, seconds=round(batch.seconds, 3))
    mixed = [group for group in batch.groups if is_mixed(group)]
    if not mixed:
        run.folder.log("grpo", step + 1, **batch.metrics())
        return policy
    data = policy_gradient_batch(mixed, sequence_ratio=run.options.rl_loss == "gspo")
    sent = time.monotonic()
    forward_backward = run.trainer.forward_backward(data, run.options.rl_loss)
    optim = run.trainer.optim_step(adam(run.options.rl_lr))
    newer = run.trainer.save_weights_and_get_sampling_client()
    trained = forward_backward.result()
    optim.result()
    newer_policy = newer.result()
    measured = batch.metrics() | watch(mixed, trained) | {"policy_loss": trained.metrics["loss:sum"]}
    run.folder.log("grpo", step + 1, train_tokens=count_tokens(data), sent=sent, **measured)
    return newer_policy

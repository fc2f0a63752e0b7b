"""GRPO in its plainest form: reinforcement learning on rewards that a program checks, without any fine-tuning before.

    openrl recipe run rlvr                       # starts a server if none answers; four minutes on two CPU cores
    python -m openrl_recipes.rlvr.train          # the same against the server that TINKER_BASE_URL names
    openrl recipe run rlvr --task record         # or gsm8k, on a larger model and a GPU

Nobody shows the model a solution. It tries each problem 8 times, a program says which tries are right, and the right
ones are made likelier, the wrong ones less likely. Read `train`: a step is

 1. sample   a group of completions for each of a few problems, with the newest weights, at temperature 1;
 2. verify   each completion: the reward is 1 or 0, and `tasks.py` says exactly for what;
 3. centre   the rewards in their group: the advantage is the reward minus the group's mean. It says how much better
             this try was than what the model usually does here, so no second network has to guess that;
 4. drop     the groups in which all were right or all were wrong: their advantages are 0;
 5. update   one gradient step on advantage * logprob, then sample with the new weights.

Each rollout is used once, by the weights that sampled it (on-policy), so nothing needs clipping and there is no
reference model. `text_to_sql` has the version with staleness, other losses, and a run that can be resumed.

What to look at: `held_out` must rise with `reward`, or the check is being cheated; `kl_v2`, sampler against trainer,
stays near 0; `mixed_groups`, the share of groups that teach anything; `entropy`, how much is still being tried.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import tinker
from rich.console import Console
from tinker import types

from openrl_recipes.rlvr.tasks import Problem, Task, TaskName, load_task
from openrl_recipes.shared.client import adam, count_tokens, service_with
from openrl_recipes.shared.folder import RunFolder
from openrl_recipes.shared.grpo import Rollout, is_mixed, policy_gradient_batch, watch
from openrl_recipes.shared.options import run
from openrl_recipes.shared.progress import progress
from openrl_recipes.shared.report import show, write_report


@dataclass(frozen=True, slots=True)
class Options:
    """Every dial of the run."""

    model: Annotated[str, "base model, as the server names it"] = "HuggingFaceTB/SmolLM2-135M-Instruct"
    rank: Annotated[int, "LoRA rank: how much the model can change"] = 16
    seed: Annotated[int, "seed of the adapter, the order of the problems and the samples"] = 0
    out: Annotated[str, "run folder"] = "runs/rlvr"
    tensorboard: Annotated[bool, "write TensorBoard event files, too"] = False
    task: Annotated[TaskName, "what to learn"] = "arithmetic"
    data: Annotated[str, "for gsm8k, instead of the hub: a .jsonl file or a folder with train.jsonl, test.jsonl"] = ""
    steps: Annotated[int, "training steps"] = 16
    groups: Annotated[int, "problems a step"] = 8
    samples: Annotated[int, "tries at a problem"] = 8
    lr: Annotated[float, "learning rate"] = 3e-4
    max_tokens: Annotated[int, "longest completion in tokens; 0: what the task needs"] = 0
    eval_items: Annotated[int, "held-out problems"] = 128
    eval_every: Annotated[int, "steps between evaluations"] = 8

    @property
    def online(self) -> bool:
        """Whether something of the Hugging Face hub is asked for."""
        return self.task == "gsm8k" and not self.data


@dataclass(frozen=True, slots=True)
class Summary:
    """Share of held-out problems solved, before and after."""

    before: float
    after: float


def main(options: Options) -> Summary:
    """Evaluate, train, evaluate; returns what came of it."""
    task = load_task(options.task, options.eval_items, options.data)
    folder = RunFolder(Path(options.out), options, tensorboard=options.tensorboard)
    with service_with(options.model) as service:
        trainer = service.create_lora_training_client(options.model, rank=options.rank, seed=options.seed).result()
        model = Model(trainer, trainer.get_tokenizer(), options.max_tokens or task.max_tokens)
        policy = trainer.save_weights_and_get_sampling_client().result()
        before = evaluate(folder, "before", 0, model, policy, task)
        policy = train(folder, model, policy, task, options)
        after = evaluate(folder, "after", options.steps, model, policy, task)
    folder.finished()
    write_report(folder.path)
    show(folder.path, Console())
    return Summary(before, after)


@dataclass(frozen=True, slots=True)
class Model:
    """The adapter being trained, its tokenizer, and how long a completion may get."""

    trainer: tinker.TrainingClient
    tokenizer: Any
    max_tokens: int

    def encode(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    def decode(self, tokens: Sequence[int]) -> str:
        return str(self.tokenizer.decode(tokens, skip_special_tokens=True))

    def sampling(self, temperature: float, seed: int | None = None) -> types.SamplingParams:
        """A completion ends with its line."""
        return types.SamplingParams(max_tokens=self.max_tokens, temperature=temperature, seed=seed, stop=["\n"])


def train(
    folder: RunFolder, model: Model, policy: tinker.SamplingClient, task: Task, options: Options
) -> tinker.SamplingClient:
    """`steps` steps of GRPO from `policy` on; returns the sampler of the last weights."""
    problems = task.stream(options.seed)
    draw = random.Random(f"samples {options.seed}")
    with progress() as bars:
        bar = bars.add("GRPO", options.steps)
        for step in range(options.steps):
            sent = time.monotonic()
            groups = sample(model, policy, list(islice(problems, options.groups)), task, options.samples, draw)  # 1, 2
            mixed = [group for group in groups if is_mixed(group)]  # 4
            measured = {
                "reward": float(np.mean([rollout.reward for group in groups for rollout in group])),
                "mixed_groups": len(mixed) / len(groups),
                "sampled_tokens": sum(len(rollout.tokens) for group in groups for rollout in group),
            }
            if mixed:
                policy, of_update = update(model.trainer, mixed, options.lr)  # 3, 5
                measured |= of_update
            folder.log("grpo", step, **measured, sent=sent)
            bar.advance(f"reward {measured['reward']:.2f}, {len(mixed)} of {len(groups)} groups teach")
            if (step + 1) % options.eval_every == 0 and step + 1 < options.steps:
                evaluate(folder, "evaluate", step + 1, model, policy, task)
    return policy


def sample(
    model: Model,
    policy: tinker.SamplingClient,
    problems: Sequence[Problem],
    task: Task,
    samples: int,
    draw: random.Random,
) -> list[list[Rollout]]:
    """A group of `samples` verified completions for each problem, all requests in flight together."""
    prompts = [model.encode(problem.prompt) for problem in problems]
    futures = [
        policy.sample(types.ModelInput.from_ints(prompt), samples, model.sampling(1.0, draw.getrandbits(31)))
        for prompt in prompts
    ]
    groups: list[list[Rollout]] = []
    for problem, prompt, future in zip(problems, prompts, futures, strict=True):
        group: list[Rollout] = []
        for sequence in future.result().sequences:
            tokens, text = list(sequence.tokens), model.decode(sequence.tokens)
            reward = task.score(text, problem.answer)
            group.append(Rollout(prompt, tokens, list(sequence.logprobs or []), text, reward))
        groups.append(group)
    return groups


def update(
    trainer: tinker.TrainingClient, groups: Sequence[Sequence[Rollout]], lr: float
) -> tuple[tinker.SamplingClient, dict[str, float]]:
    """One gradient step on the groups; returns a sampler of the new weights, and what was measured.

    The three calls go out together: the server runs them in this order, and no round trip is waited for in between.
    `policy_gradient_batch` puts each rollout's advantage on its tokens. `importance_sampling` is the plain policy
    gradient, advantage * p / p_sampled; on-policy the ratio is 1 but for the numerical noise that `kl_v2` shows.
    """
    data = policy_gradient_batch(groups)
    forward_backward = trainer.forward_backward(data, "importance_sampling")
    optim = trainer.optim_step(adam(lr))
    policy = trainer.save_weights_and_get_sampling_client()
    trained = forward_backward.result()
    optim.result()
    measured = {"loss": trained.metrics["loss:sum"], "train_tokens": count_tokens(data), **watch(groups, trained)}
    return policy.result(), measured


def evaluate(
    folder: RunFolder, stage: str, step: int, model: Model, policy: tinker.SamplingClient, task: Task
) -> float:
    """Share of the held-out problems that the model solves greedily, all requests in flight together."""
    sent = time.monotonic()
    prompts = [types.ModelInput.from_ints(model.encode(problem.prompt)) for problem in task.held_out]
    futures = [policy.sample(prompt, 1, model.sampling(0.0)) for prompt in prompts]
    sequences = [future.result().sequences[0] for future in futures]
    scores: list[float] = []
    for problem, sequence in zip(task.held_out, sequences, strict=True):
        text = model.decode(sequence.tokens)
        scores.append(task.score(text, problem.answer))
        if stage != "evaluate":
            folder.sample(stage, prompt=problem.question, completion=text, score=scores[-1], wanted=problem.answer)
    held_out = float(np.mean(scores))
    folder.log(stage, step, held_out=held_out, sampled_tokens=sum(len(s.tokens) for s in sequences), sent=sent)
    return held_out


if __name__ == "__main__":
    run(main, Options)

"""Distillation: a small student learns from what a teacher finds likely, on words without answers.

    openrl recipe run distill                    # starts a server if none answers; three minutes on two CPU cores
    python -m openrl_recipes.distill.train       # the same against the server that TINKER_BASE_URL names

The task is pig latin (see `openrl_recipes.pig_latin`). The teacher, of LoRA rank 32, is trained on one half of the
words with their answers. The student, of rank 4, gets the other half without answers, and the teacher. By `--mode`:

  soft_targets  the teacher writes, and gives its k likeliest tokens at each place; the student learns these
                probabilities by cross-entropy with targets of rank 2. Needs no teacher at hand, only its answers.
  on_policy     the student writes, and the teacher says how likely it finds each token of that. A token's advantage is
                the teacher's logprob minus the student's: taken over what the student samples, the mean is minus the
                reverse KL divergence, KL(student || teacher), which the policy gradient brings down. The student is
                corrected where it goes itself (arXiv:2306.13649).
  both          a few steps of the first, then the second. A student that cannot do the task at all writes noise, and
                from scores of noise it learns to write next to nothing: first it must write what a teacher might.

Keep the teacher's answers, and learn from them later, or elsewhere:

    python -m openrl_recipes.distill.train --mode soft_targets --make-teacher teacher.jsonl
    python -m openrl_recipes.distill.train --mode soft_targets --teacher-file teacher.jsonl --out runs/distill-again

Other teachers: `--teacher tinker://...` (weights saved for sampling) or `--teacher NAME` (a base model), on this server
or on the one at `--teacher-url`; `--teacher-model NAME` trains the teacher from another, larger model. Teacher and
student must share a vocabulary.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import tinker
from rich.console import Console
from tinker import types

from openrl_recipes.distill.teacher import (
    Example,
    ask,
    entropy,
    read_examples,
    score,
    soft_targets_batch,
    write_examples,
)
from openrl_recipes.pig_latin import train as pig_latin
from openrl_recipes.pig_latin.train import MAX_TOKENS, encode, evaluate
from openrl_recipes.pig_latin.words import prompt, split
from openrl_recipes.shared.agreement import sample_each
from openrl_recipes.shared.client import SentStep, adam, count_tokens, decayed, service_with, shifted
from openrl_recipes.shared.folder import RunFolder
from openrl_recipes.shared.grpo import Rollout, policy_gradient_batch, watch
from openrl_recipes.shared.options import OptionError, run
from openrl_recipes.shared.progress import progress
from openrl_recipes.shared.report import show, write_report


@dataclass(frozen=True, slots=True)
class Options:
    """Every dial of the run."""

    model: Annotated[str, "the student's base model, as the server names it"] = "HuggingFaceTB/SmolLM2-135M-Instruct"
    rank: Annotated[int, "the student's LoRA rank"] = 4
    seed: Annotated[int, "seed of adapters, words and samples"] = 0
    out: Annotated[str, "run folder"] = "runs/distill"
    tensorboard: Annotated[bool, "write TensorBoard event files, too"] = False
    mode: Annotated[Literal["both", "on_policy", "soft_targets"], "who writes what the student learns from"] = "both"
    soft_steps: Annotated[int, "steps on the teacher's soft targets"] = 8
    policy_steps: Annotated[int, "steps on what the student writes"] = 10
    batch: Annotated[int, "words a step"] = 32
    soft_lr: Annotated[float, "learning rate of the first steps on soft targets; it falls to a tenth"] = 2e-3
    policy_lr: Annotated[float, "learning rate of the first steps on-policy; it falls to a tenth"] = 1e-3
    top_k: Annotated[int, "soft targets: how many tokens the teacher gives at each place"] = 8
    eval_words: Annotated[int, "held-out words"] = 128
    teacher: Annotated[str, "a tinker:// path or a base model's name; none: train one"] = ""
    teacher_url: Annotated[str, "server that has --teacher; none: the student's"] = ""
    teacher_file: Annotated[str, "mode soft_targets: learn from this file instead of a teacher"] = ""
    make_teacher: Annotated[str, "soft targets: keep the teacher's answers in this file"] = ""
    teacher_model: Annotated[str, "base model to train the teacher from; none: the student's"] = ""
    teacher_rank: Annotated[int, "LoRA rank of a teacher that is trained here"] = 32
    teacher_steps: Annotated[int, "training steps of a teacher that is trained here"] = 25


@dataclass(frozen=True, slots=True)
class Summary:
    """Shares of held-out words without a mistake (the teacher's is NaN if it came as a file)."""

    before: float
    teacher: float
    after: float


@dataclass(frozen=True, slots=True)
class Student:
    """The run that learns, its tokenizer, and where it logs."""

    trainer: tinker.TrainingClient
    tokenizer: Any
    folder: RunFolder
    options: Options

    def prompts(self, words: Sequence[str]) -> list[list[int]]:
        return [encode(self.tokenizer, prompt(word)) for word in words]


def main(options: Options) -> Summary:
    """Get a teacher, distil, compare; returns what came of it."""
    check(options)
    train_words, held_out = split(options.seed, options.eval_words)
    labelled, unlabelled = train_words[::2], train_words[1::2]
    folder = RunFolder(Path(options.out), options, tensorboard=options.tensorboard)
    with service_with(options.model) as service, service_of_teacher(service, options) as elsewhere:
        trainer = service.create_lora_training_client(options.model, rank=options.rank, seed=options.seed).result()
        student = Student(trainer, trainer.get_tokenizer(), folder, options)
        policy = trainer.save_weights_and_get_sampling_client().result()
        before = evaluate(folder, "before", 0, policy, student.tokenizer, held_out)

        teacher = None if options.teacher_file else find_teacher(elsewhere, student, labelled)
        taught = float("nan")
        if teacher is not None:
            taught = evaluate(folder, "evaluate teacher", 0, teacher, student.tokenizer, held_out)

        done = 0
        if options.mode != "on_policy":
            policy = from_soft_targets(student, examples_for(student, teacher, unlabelled))
            done = options.soft_steps
        if teacher is not None and options.mode != "soft_targets":
            if done:
                evaluate(folder, "evaluate", done, policy, student.tokenizer, held_out)
            policy = on_policy(student, policy, teacher, unlabelled, done)
            done += options.policy_steps

        after = evaluate(folder, "after", done, policy, student.tokenizer, held_out)
        folder.log("after", done, **distances(student, policy, teacher, held_out[:64]))
    folder.finished()
    write_report(folder.path)
    show(folder.path, Console())
    return Summary(before, taught, after)


# ------------------------------------------------------------------------------------------------------------------
# The teacher


def check(options: Options) -> None:
    """Refuse options that do not go together, before anything is computed."""
    if options.teacher_file and options.mode != "soft_targets":
        raise OptionError("--teacher-file needs --mode soft_targets: on-policy, the teacher must be there.")
    if options.teacher_file and options.teacher:
        raise OptionError("--teacher-file or --teacher, not both.")
    if options.make_teacher and (options.mode == "on_policy" or options.teacher_file):
        raise OptionError("--make-teacher needs a teacher that is no file, and a --mode with soft targets.")
    if options.teacher_url and not options.teacher:
        raise OptionError("--teacher-url needs --teacher, what that server is to be asked for.")


def service_of_teacher(service: tinker.ServiceClient, options: Options) -> AbstractContextManager[tinker.ServiceClient]:
    """The server at `--teacher-url`, which takes the same API key, or else the student's."""
    return tinker.ServiceClient(base_url=options.teacher_url) if options.teacher_url else nullcontext(service)


def find_teacher(service: tinker.ServiceClient, student: Student, labelled: Sequence[str]) -> tinker.SamplingClient:
    """The teacher that the options name, or one that is trained now on words with answers."""
    options = student.options
    if options.teacher:
        path, base = (options.teacher, None) if options.teacher.startswith("tinker://") else (None, options.teacher)
        teacher = service.create_sampling_client(model_path=path, base_model=base).result()
    else:
        model = options.teacher_model or options.model
        trainer = service.create_lora_training_client(model, rank=options.teacher_rank, seed=options.seed).result()
        how = pig_latin.Options(seed=options.seed, steps=options.teacher_steps)
        pig_latin.train(student.folder, trainer, student.tokenizer, labelled, how)
        teacher = trainer.save_weights_and_get_sampling_client().result()
    if teacher.get_tokenizer().get_vocab() != student.tokenizer.get_vocab():
        raise OptionError(f"The teacher's vocabulary differs from that of {options.model}: it cannot score its tokens.")
    return teacher


def examples_for(student: Student, teacher: tinker.SamplingClient | None, words: Sequence[str]) -> list[Example]:
    """The teacher's answers for `words`, or those of the teacher file."""
    options = student.options
    if teacher is None:
        return read_examples(Path(options.teacher_file))
    examples = ask(teacher, student.prompts(words), options.top_k, sampling(options.seed))
    if options.make_teacher:
        write_examples(Path(options.make_teacher), examples)
    return examples


# ------------------------------------------------------------------------------------------------------------------
# The student


def from_soft_targets(student: Student, examples: Sequence[Example]) -> tinker.SamplingClient:
    """Cross-entropy on the teacher's probabilities, one step sent ahead; returns the policy that came of it.

    The loss ends at the entropy of the targets; what it is above that is KL(teacher || student), the `forward_kl`.
    """
    options, trainer, draw = student.options, student.trainer, random.Random(student.options.seed)
    with progress() as bars:
        bar = bars.add("soft targets", options.soft_steps)
        on_the_way: list[tuple[SentStep, float]] = []
        for step in range(options.soft_steps):
            chosen = draw.sample(examples, min(options.batch, len(examples)))
            data = soft_targets_batch(chosen)
            sent = time.monotonic()
            forward_backward = trainer.forward_backward(data, "cross_entropy")
            optim = trainer.optim_step(adam(options.soft_lr * decayed(step, options.soft_steps)))
            on_the_way.append((SentStep(step, forward_backward, optim, count_tokens(data), sent), entropy(chosen)))
            if step > 0:
                bar.advance(finish(*on_the_way.pop(0), student.folder))
        for sent_step in on_the_way:
            bar.advance(finish(*sent_step, student.folder))
    return trainer.save_weights_and_get_sampling_client().result()


def on_policy(
    student: Student, policy: tinker.SamplingClient, teacher: tinker.SamplingClient, words: Sequence[str], done: int
) -> tinker.SamplingClient:
    """Let the student write, have the teacher score every token, update, and so on; returns the last policy.

    `done` steps of distillation lie behind, which counts for the log alone.
    """
    options, trainer, draw = student.options, student.trainer, random.Random(student.options.seed)
    with progress() as bars:
        bar = bars.add("on-policy", options.policy_steps)
        for step in range(options.policy_steps):
            began = time.monotonic()
            prompts = student.prompts(draw.sample(words, options.batch))
            rollouts = sample_each(policy, prompts, sampling(1000 * (options.seed + 1) + step))
            scored = score(teacher, rollouts)
            data = reverse_kl_batch(rollouts, scored)
            # The server runs these three in this order; nothing is waited for in between.
            forward_backward = trainer.forward_backward(data, "importance_sampling")
            optim = trainer.optim_step(adam(options.policy_lr * decayed(step, options.policy_steps)))
            saved = trainer.save_weights_and_get_sampling_client()
            watched = watch([rollouts], forward_backward.result())
            optim.result()
            policy = saved.result()
            kl = reverse_kl(rollouts, scored)
            tokens = {"train_tokens": count_tokens(data), "sampled_tokens": sum(len(r.tokens) for r in rollouts)}
            student.folder.log("distill", done + step, reverse_kl=kl, **watched, **tokens, sent=began)
            bar.advance(f"reverse KL {kl:.3f}")
    return policy


def finish(step: SentStep, of_targets: float, folder: RunFolder) -> str:
    """Wait for a step's results and log them, given its targets' entropy; returns a note for the progress bar."""
    loss = step.loss()
    kl = loss - of_targets
    folder.log("distill", step.step, loss=loss, forward_kl=kl, train_tokens=step.tokens, sent=step.sent)
    return f"forward KL {kl:.3f}"


def sampling(seed: int) -> types.SamplingParams:
    return types.SamplingParams(max_tokens=MAX_TOKENS, temperature=1.0, seed=seed, stop=["\n"])


def reverse_kl_batch(rollouts: Sequence[Rollout], scored: Sequence[Sequence[float]]) -> list[types.Datum]:
    """One datum a rollout; each token's advantage is the teacher's logprob of it minus the student's own.

    Dividing by the number of sampled tokens turns the server's sum into a mean.
    """
    total = sum(len(rollout.tokens) for rollout in rollouts)
    data: list[types.Datum] = []
    for r, theirs in zip(rollouts, scored, strict=True):
        advantages = [(teacher - own) / total for teacher, own in zip(theirs, r.logprobs, strict=True)]
        data.append(shifted(r.prompt, r.tokens, logprobs=r.logprobs, advantages=advantages))
    return data


def reverse_kl(rollouts: Sequence[Rollout], scored: Sequence[Sequence[float]]) -> float:
    """KL(student || teacher) in nats a token, estimated on what the student sampled."""
    own = np.concatenate([rollout.logprobs for rollout in rollouts])
    return float(np.mean(own - np.concatenate(scored)))


def distances(
    student: Student, policy: tinker.SamplingClient, teacher: tinker.SamplingClient | None, words: Sequence[str]
) -> dict[str, float]:
    """On what the policy samples for `words`: sampler from trainer, and student from teacher where there is one."""
    rollouts = sample_each(policy, student.prompts(words), sampling(student.options.seed))
    data = policy_gradient_batch([rollouts])
    values = watch([rollouts], student.trainer.forward(data, "importance_sampling").result())
    return values if teacher is None else values | {"reverse_kl": reverse_kl(rollouts, score(teacher, rollouts))}


if __name__ == "__main__":
    run(main, Options)

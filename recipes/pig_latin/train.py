"""Teach a small model pig latin, in one page: the gentlest supervised fine-tuning (SFT).

    openrl recipe run pig_latin                  # starts a server if none answers; two minutes on two CPU cores
    python -m openrl_recipes.pig_latin.train     # the same against the server that TINKER_BASE_URL names

A rule makes the data: book -> ookbay, string -> ingstray, apple -> appleway. The model is shown words with their
answers and learns to write the answers; then it is tested on words that it was never shown. What to look at:

 1. a datum: prompt and answer as one row of tokens, with weights that put the loss on the answer alone;
 2. a training step: `forward_backward` computes gradients, `optim_step` applies them. Both are sent before the result
    of the step before is read, so that the server never waits for us;
 3. the table at the end: what the model wrote before and after, greedily, on the same held-out words.

pig_latin.ipynb beside this file tells the same story cell by cell.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tinker
from rich.console import Console
from tinker import types

from openrl_recipes.pig_latin.words import answer, pig_latin, prompt, read, similarity, split
from openrl_recipes.shared.agreement import agreement
from openrl_recipes.shared.client import SentStep, adam, count_tokens, decayed, service_with, supervised_batch
from openrl_recipes.shared.folder import RunFolder
from openrl_recipes.shared.options import run
from openrl_recipes.shared.progress import progress
from openrl_recipes.shared.report import show, write_report

MAX_TOKENS = 16  # the longest answer has 11, one a letter and the end of the line


@dataclass(frozen=True, slots=True)
class Options:
    """Every dial of the run."""

    model: Annotated[str, "base model, as the server names it"] = "HuggingFaceTB/SmolLM2-135M-Instruct"
    rank: Annotated[int, "LoRA rank: how much the model can change"] = 16
    seed: Annotated[int, "seed of the adapter and of the choice of words"] = 0
    out: Annotated[str, "run folder"] = "runs/pig_latin"
    tensorboard: Annotated[bool, "write TensorBoard event files, too"] = False
    steps: Annotated[int, "training steps"] = 40
    batch: Annotated[int, "words a step"] = 16
    lr: Annotated[float, "learning rate of the first steps; it falls to a tenth"] = 1e-3
    eval_words: Annotated[int, "held-out words"] = 128


@dataclass(frozen=True, slots=True)
class Summary:
    """Share of held-out words written without a mistake, before and after."""

    before: float
    after: float


def main(options: Options) -> Summary:
    """Evaluate, train, evaluate; returns what came of it."""
    train_words, held_out = split(options.seed, options.eval_words)
    folder = RunFolder(Path(options.out), options, tensorboard=options.tensorboard)
    with service_with(options.model) as service:
        trainer = service.create_lora_training_client(options.model, rank=options.rank, seed=options.seed).result()
        tokenizer = trainer.get_tokenizer()

        policy = trainer.save_weights_and_get_sampling_client().result()
        before = evaluate(folder, "before", 0, policy, tokenizer, held_out)
        train(folder, trainer, tokenizer, train_words, options)
        policy = trainer.save_weights_and_get_sampling_client().result()
        after = evaluate(folder, "after", options.steps, policy, tokenizer, held_out)

        prompts = [encode(tokenizer, prompt(word)) for word in held_out[:32]]
        params = types.SamplingParams(max_tokens=MAX_TOKENS, temperature=1.0, seed=options.seed, stop=["\n"])
        folder.log("after", options.steps, **agreement(trainer, policy, prompts, params))
    folder.finished()
    write_report(folder.path)
    show(folder.path, Console())
    return Summary(before, after)


def train(
    folder: RunFolder, trainer: tinker.TrainingClient, tokenizer: Any, words: Sequence[str], options: Options
) -> None:
    """`steps` steps of cross-entropy, each on `batch` of the words, always one step ahead of the results."""
    draw = random.Random(options.seed)
    with progress() as bars:
        bar = bars.add("train", options.steps)
        on_the_way: list[SentStep] = []
        for step in range(options.steps):
            chosen = draw.sample(words, options.batch)
            data = supervised_batch([(encode(tokenizer, prompt(w)), encode(tokenizer, answer(w))) for w in chosen])
            sent = time.monotonic()
            forward_backward = trainer.forward_backward(data, "cross_entropy")
            optim = trainer.optim_step(adam(options.lr * decayed(step, options.steps)))
            on_the_way.append(SentStep(step, forward_backward, optim, count_tokens(data), sent))
            if step > 0:
                bar.advance(finish(on_the_way.pop(0), folder))
        for sent_step in on_the_way:
            bar.advance(finish(sent_step, folder))


def finish(step: SentStep, folder: RunFolder) -> str:
    """Wait for a step's results and log them; returns a note for the progress bar."""
    loss = step.loss()
    folder.log("sft", step.step, loss=loss, train_tokens=step.tokens, sent=step.sent)
    return f"loss {loss:.3f}"


def evaluate(
    folder: RunFolder, stage: str, step: int, policy: tinker.SamplingClient, tokenizer: Any, words: Sequence[str]
) -> float:
    """Let the model write each word, all requests in flight together; returns the share without a mistake."""
    sent = time.monotonic()
    greedy = types.SamplingParams(max_tokens=MAX_TOKENS, temperature=0.0, stop=["\n"])
    prompts = [types.ModelInput.from_ints(encode(tokenizer, prompt(word))) for word in words]
    futures = [policy.sample(each, 1, greedy) for each in prompts]
    sequences = [future.result().sequences[0] for future in futures]
    written = [read(tokenizer.decode(sequence.tokens)) for sequence in sequences]
    wanted = [pig_latin(word) for word in words]
    right = [one == two for one, two in zip(written, wanted, strict=True)]
    for word, wrote, want, score in zip(words, written, wanted, right, strict=True):
        folder.sample(stage, prompt=word, completion=wrote, score=float(score), wanted=want)
    scores = {"held_out": sum(right) / len(right), "held_out_similarity": similarity(written, wanted)}
    folder.log(stage, step, **scores, sampled_tokens=sum(len(s.tokens) for s in sequences), sent=sent)
    return scores["held_out"]


def encode(tokenizer: Any, text: str) -> list[int]:
    """The tokens of a text, without the ones that open a document."""
    return list(tokenizer.encode(text, add_special_tokens=False))


if __name__ == "__main__":
    run(main, Options)

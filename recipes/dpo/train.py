"""Direct preference optimisation (DPO): show the model pairs of answers, and which of the two is better.

    openrl recipe run dpo                        # starts a server if none answers; two minutes on two CPU cores
    python -m openrl_recipes.dpo.train           # the same against the server that TINKER_BASE_URL names

Asked for the capital of Peru, the model says "The capital of Peru is Lima." We would rather have "Lima". Nobody samples
and nobody scores: there are pairs (`preferences.py`), and a loss on pairs (`loss.py`, a few lines of torch). Look at

 1. the reference: before the first step, one `forward` pass keeps the logprobs of all answers under the model as it
    is. DPO measures everything against them;
 2. `forward_backward_custom`: the server computes logprobs, your function turns them into a loss here, in this
    process, and the server takes the gradient on from there. Any loss that torch can differentiate will do;
 3. `held_out`: how often the implicit reward, beta * (log p - log ref), ranks a held-out pair right. It starts at one
    half, since nothing has moved, and `reward_margin` at 0;
 4. `brief` and `correct`: what the model really writes, greedily. To rank given answers well is not yet to write them:
    with `--alpha 0`, the loss on pairs alone, all pairs are ranked right after four steps, and what is written
    is as long as before. A model pushed too far from its reference (`kl_reference`) may be brief and wrong.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Annotated

import numpy as np
import tinker
import torch
from rich.console import Console
from tinker import types

from openrl_recipes.dpo.chat import Chat
from openrl_recipes.dpo.loss import answer_logprobs, chosen_nll, dpo_loss, measures
from openrl_recipes.dpo.preferences import Pair, is_brief, is_correct, pairs
from openrl_recipes.shared.agreement import agreement
from openrl_recipes.shared.client import adam, count_tokens, decayed, service_with
from openrl_recipes.shared.folder import RunFolder
from openrl_recipes.shared.options import run
from openrl_recipes.shared.progress import progress
from openrl_recipes.shared.report import show, write_report

MAX_TOKENS = 32  # the sentences that the model writes have 8 to 20


@dataclass(frozen=True, slots=True)
class Options:
    """Every dial of the run."""

    model: Annotated[str, "base model, as the server names it"] = "HuggingFaceTB/SmolLM2-135M-Instruct"
    rank: Annotated[int, "LoRA rank: how much the model can change"] = 16
    seed: Annotated[int, "seed of the adapter and of the order of the pairs"] = 0
    out: Annotated[str, "run folder"] = "runs/dpo"
    tensorboard: Annotated[bool, "write TensorBoard event files, too"] = False
    beta: Annotated[float, "how dear it is to leave the reference: small goes far, large stays near"] = 0.1
    alpha: Annotated[float, "weight of the chosen answers' own negative logprob beside the loss on pairs"] = 1.0
    steps: Annotated[int, "training steps"] = 16
    batch: Annotated[int, "pairs a step"] = 8
    lr: Annotated[float, "learning rate of the first steps; it falls to a tenth"] = 1e-4
    eval_pairs: Annotated[int, "held-out pairs"] = 128
    eval_every: Annotated[int, "steps between evaluations on the held-out pairs"] = 8


@dataclass(frozen=True, slots=True)
class Summary:
    """After training: share of held-out pairs ranked right. Before and after: brief answers, and correct ones."""

    accuracy: float
    brief: tuple[float, float]
    correct: tuple[float, float]


def main(options: Options) -> Summary:
    """Keep the reference, evaluate, train, evaluate; returns what came of it."""
    train_pairs, held_out = pairs(options.eval_pairs)
    folder = RunFolder(Path(options.out), options, tensorboard=options.tensorboard)
    with service_with(options.model) as service:
        trainer = service.create_lora_training_client(options.model, rank=options.rank, seed=options.seed).result()
        chat = Chat(trainer.get_tokenizer())
        reference = trainer.save_weights_and_get_sampling_client().result()
        learned = Pairs.of(train_pairs[: options.steps * options.batch], trainer, chat)
        tested = Pairs.of(held_out, trainer, chat)

        before = write(folder, "before", 0, reference, chat, held_out)
        rank(folder, "before", 0, tested, tested.reference, options.beta)
        train(folder, trainer, learned, tested, options)
        policy = trainer.save_weights_and_get_sampling_client().result()
        after = write(folder, "after", options.steps, policy, chat, held_out)
        accuracy = rank(folder, "after", options.steps, tested, forward(trainer, tested.data), options.beta)

        prompts = [chat.prompt(pair.question) for pair in held_out[:32]]
        params = types.SamplingParams(max_tokens=MAX_TOKENS, temperature=1.0, seed=options.seed, stop=[chat.end])
        folder.log("after", options.steps, **agreement(trainer, policy, prompts, params))
        folder.log("after", options.steps, kl_reference=distance(policy, reference, prompts, params))
    folder.finished()
    write_report(folder.path)
    show(folder.path, Console())
    return Summary(accuracy, (before["brief"], after["brief"]), (before["correct"], after["correct"]))


# ------------------------------------------------------------------------------------------------------------------
# Training


@dataclass(frozen=True, slots=True)
class Pairs:
    """Preferences as data: chosen, rejected, chosen, rejected, ...; and the reference's logprobs, (pairs, 2)."""

    data: Sequence[types.Datum]
    reference: torch.Tensor

    @staticmethod
    def of(preferences: Sequence[Pair], trainer: tinker.TrainingClient, chat: Chat) -> Pairs:
        """To be called before the first step: only then is the model the reference."""
        data = [chat.datum(p.question, answer) for p in preferences for answer in (p.chosen, p.rejected)]
        return Pairs(data, forward(trainer, data))

    def take(self, chosen: Sequence[int]) -> Pairs:
        """Some of the pairs, by their places."""
        return Pairs([self.data[2 * i + side] for i in chosen for side in (0, 1)], self.reference[list(chosen)])


def forward(trainer: tinker.TrainingClient, data: Sequence[types.Datum]) -> torch.Tensor:
    """Logprobs of the answers under the weights as they are, (pairs, 2)."""
    outputs = trainer.forward(list(data), "cross_entropy").result().loss_fn_outputs
    return answer_logprobs(data, [output["logprobs"].to_torch() for output in outputs])


def train(folder: RunFolder, trainer: tinker.TrainingClient, learned: Pairs, tested: Pairs, options: Options) -> None:
    """`steps` steps on `batch` pairs each."""
    order = shuffled(len(learned.reference), options.seed)
    with progress() as bars:
        bar = bars.add("DPO", options.steps)
        for step in range(options.steps):
            sent = time.monotonic()
            batch = learned.take(list(islice(order, options.batch)))

            def loss_fn(
                data: list[types.Datum], rows: list[torch.Tensor], batch: Pairs = batch
            ) -> tuple[torch.Tensor, dict[str, float]]:
                policy = answer_logprobs(data, rows)
                loss = dpo_loss(policy, batch.reference, options.beta) + options.alpha * chosen_nll(policy, data)
                return loss, measures(policy, batch.reference, options.beta)

            forward_backward = trainer.forward_backward_custom(list(batch.data), loss_fn)
            optim = trainer.optim_step(adam(options.lr * decayed(step, options.steps)))
            metrics = forward_backward.result().metrics
            optim.result()
            loss, margin = metrics["loss:sum"], metrics["reward_margin"]
            found = {"loss": loss, "train_score": metrics["accuracy"], "reward_margin": margin}
            both = {name: metrics[name] for name in ("reward_chosen", "reward_rejected")}
            folder.log("dpo", step, **found, **both, train_tokens=count_tokens(batch.data), sent=sent)
            bar.advance(f"loss {loss:.3f}, margin {margin:.2f}")
            if (step + 1) % options.eval_every == 0 and step + 1 < options.steps:
                rank(folder, "evaluate", step + 1, tested, forward(trainer, tested.data), options.beta)


def shuffled(count: int, seed: int) -> Iterator[int]:
    """0..count-1 without end: all in one random order, then all in another."""
    draw = random.Random(seed)
    while True:
        yield from draw.sample(range(count), count)


# ------------------------------------------------------------------------------------------------------------------
# Evaluation


def rank(folder: RunFolder, stage: str, step: int, tested: Pairs, policy: torch.Tensor, beta: float) -> float:
    """Share of the held-out pairs whose chosen answer has the higher implicit reward; `policy` is (pairs, 2)."""
    found = measures(policy, tested.reference, beta)
    folder.log(stage, step, held_out=found["accuracy"], held_out_margin=found["reward_margin"])
    return found["accuracy"]


def write(
    folder: RunFolder, stage: str, step: int, policy: tinker.SamplingClient, chat: Chat, held_out: Sequence[Pair]
) -> dict[str, float]:
    """Let the model answer each held-out question greedily; shares of answers that are brief, and that are correct."""
    sent = time.monotonic()
    facts = {pair.question: pair.chosen for pair in held_out}
    params = types.SamplingParams(max_tokens=MAX_TOKENS, temperature=0.0, stop=[chat.end])
    futures = [policy.sample(types.ModelInput.from_ints(chat.prompt(question)), 1, params) for question in facts]
    sequences = [future.result().sequences[0] for future in futures]
    answers = [chat.decode(list(sequence.tokens)) for sequence in sequences]
    brief = [is_brief(answer) for answer in answers]
    correct = [is_correct(answer, fact) for answer, fact in zip(answers, facts.values(), strict=True)]
    for (question, fact), answer, score in zip(facts.items(), answers, brief, strict=True):
        folder.sample(stage, prompt=question, completion=answer, score=float(score), wanted=fact)
    found = {"brief": float(np.mean(brief)), "correct": float(np.mean(correct))}
    folder.log(stage, step, **found, sampled_tokens=sum(len(s.tokens) for s in sequences), sent=sent)
    return found


def distance(
    policy: tinker.SamplingClient,
    reference: tinker.SamplingClient,
    prompts: Sequence[list[int]],
    params: types.SamplingParams,
) -> float:
    """KL divergence of the policy from the reference, nats a token: mean(log p - log ref) over what the policy says."""
    futures = [policy.sample(types.ModelInput.from_ints(prompt), 1, params) for prompt in prompts]
    said = [future.result().sequences[0] for future in futures]
    inputs = [types.ModelInput.from_ints([*prompt, *s.tokens]) for prompt, s in zip(prompts, said, strict=True)]
    asked = [reference.compute_logprobs(each) for each in inputs]
    theirs = [np.array(future.result()[len(p) :], float) for p, future in zip(prompts, asked, strict=True)]
    ours = [np.asarray(s.logprobs) for s in said]
    return float((np.concatenate(ours) - np.concatenate(theirs)).mean())


if __name__ == "__main__":
    run(main, Options)

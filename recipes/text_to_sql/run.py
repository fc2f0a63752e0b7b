"""What every stage of a run needs, and how a run that was stopped goes on.

A *point* is a place to go on from: the stage, how many of its steps are done, and the checkpoint with weights and
optimizer as they were then. It is written after the checkpoint, so whenever a run is killed, the newest point is whole.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import tinker
from tinker import types

from openrl_recipes.shared.folder import RunFolder
from openrl_recipes.shared.progress import Bars
from openrl_recipes.text_to_sql.item import Item
from openrl_recipes.text_to_sql.judge import Judge
from openrl_recipes.text_to_sql.options import Options
from openrl_recipes.text_to_sql.scoring import answer_query
from openrl_recipes.text_to_sql.sources import Source


@dataclass(slots=True)
class Best:
    """The best evaluation so far and the sampler's weights of it. It is chosen by the held-out score, so that score
    is a little flattering: the score after the last step is the honest one."""

    score: float = -1.0
    stage: str = ""
    step: int = 0
    path: str | None = None


@dataclass(slots=True)
class Run:
    """The run on the server, its data, its judge, and where to log and show. `stage` and `step`: how far it is."""

    options: Options
    folder: RunFolder
    service: tinker.ServiceClient
    trainer: tinker.TrainingClient
    source: Source
    judge: Judge
    bars: Bars
    stage: str = "before"
    step: int = 0
    state: str | None = None  # the newest point's checkpoint
    best: Best = field(default_factory=Best)
    outdated: list[str] = field(default_factory=list[str])  # checkpoints that the next point has no use for
    tokenizer: Any = None
    held_out: Sequence[Item] = ()

    def __post_init__(self) -> None:
        self.tokenizer = self.trainer.get_tokenizer()
        self.held_out = self.source.held_out(self.options.eval_items)

    def reached(self, stage: str, step: int) -> None:
        """Save weights and optimizer; from now on a stopped run goes on with step `step` of `stage`."""
        self.outdated += [self.state] if self.state is not None else []
        self.state = self.trainer.save_state(f"{stage}-{step}").result().path
        self.stage, self.step = stage, step
        self.folder.reached(stage, step, state=self.state, best=dataclasses.asdict(self.best))
        while self.outdated:
            tinker.RestClient().delete_checkpoint_from_tinker_path(self.outdated.pop()).result()

    def policy(self) -> tinker.SamplingClient:
        """A sampler of the newest weights."""
        return self.trainer.save_weights_and_get_sampling_client().result()

    def prompt(self, item: Item) -> list[int]:
        """The tokens of a question, opened as the tokenizer opens a text (Gemma needs its BOS token)."""
        return list(self.tokenizer.encode(item.prompt))

    def answer(self, item: Item) -> list[int]:
        """The tokens of the reference query."""
        return list(self.tokenizer.encode(item.answer, add_special_tokens=False))

    def query(self, tokens: Sequence[int]) -> str:
        """The query in sampled tokens."""
        return answer_query(self.tokenizer.decode(list(tokens)))

    def sampling(self, temperature: float, seed: int | None = None) -> types.SamplingParams:
        """A query ends with its line."""
        return types.SamplingParams(max_tokens=self.options.max_tokens, temperature=temperature, seed=seed, stop=["\n"])


def open_run(
    options: Options, folder: RunFolder, service: tinker.ServiceClient, source: Source, judge: Judge, bars: Bars
) -> Run:
    """A new run, or the one that `folder` tells of, at its newest point."""
    point = folder.point
    if point is None:
        trainer = service.create_lora_training_client(options.model, rank=options.rank, seed=options.seed).result()
        return Run(options, folder, service, trainer, source, judge, bars)
    notes = point.notes
    trainer = service.create_training_client_from_state_with_optimizer(notes["state"]).result()
    run = Run(options, folder, service, trainer, source, judge, bars, point.stage, point.step, notes["state"])
    run.best = Best(**notes["best"])
    return run

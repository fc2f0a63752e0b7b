"""Every dial of the text-to-SQL recipe. The defaults are the full run of SmolLM2 on two CPU cores."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from openrl_recipes.shared.options import OptionError
from openrl_recipes.text_to_sql.rewards import Weights

Stages = Literal["sft,grpo", "sft", "grpo"]
Loss = Literal["importance_sampling", "ppo", "cispo", "gspo"]


@dataclass(frozen=True, slots=True)
class Options:
    """The flags; `--sft-steps` for `sft_steps` and so on. `openrl recipe run` also takes the names in `short`."""

    short: ClassVar[Mapping[str, str]] = {"lr": "rl_lr"}

    model: Annotated[str, "base model, as the server names it"] = "HuggingFaceTB/SmolLM2-135M-Instruct"
    rank: Annotated[int, "LoRA rank"] = 16
    seed: Annotated[int, "seed of the adapter, the questions and the samples"] = 0
    out: Annotated[str, "run folder; the same command with the same folder goes on where it was stopped"] = (
        "runs/text_to_sql"
    )
    tensorboard: Annotated[bool, "write TensorBoard event files, too"] = False
    source: Annotated[str, "where questions come from: generated, or a data set (see sources.py)"] = "generated"
    stages: Annotated[Stages, "which stages to run"] = "sft,grpo"
    max_tokens: Annotated[int, "longest query in tokens"] = 40

    sft_steps: Annotated[int, "supervised steps"] = 12
    sft_batch: Annotated[int, "examples a supervised step"] = 16
    sft_lr: Annotated[float, "learning rate of the supervised stage; it falls to a tenth"] = 1e-3

    rl_steps: Annotated[int, "GRPO steps"] = 26
    rl_groups: Annotated[int, "questions a GRPO step"] = 16
    rl_samples: Annotated[int, "queries sampled for a question"] = 8
    rl_lr: Annotated[float, "learning rate of the GRPO stage"] = 4e-4
    rl_loss: Annotated[Loss, "loss of the GRPO stage, as the server names it"] = "importance_sampling"
    temperature: Annotated[float, "of the samples; only at 1 do sampler and trainer compute the same logprobs"] = 1.0
    max_staleness: Annotated[int, "sample a batch with the weights of so many steps ago, while newer ones train"] = 0

    eval_items: Annotated[int, "held-out questions"] = 200
    eval_every: Annotated[int, "GRPO steps between evaluations; 0: only before and after each stage"] = 10
    keep_best: Annotated[bool, "save the sampler's weights whenever an evaluation is the best so far"] = True
    save_every: Annotated[int, "steps between points that a stopped run can go on from; 0: only between stages"] = 10

    match: Annotated[float, "reward for the reference's result, on every database"] = 1.0
    parses: Annotated[float, "reward for a query that SQLite can parse"] = 0.0
    runs: Annotated[float, "reward for a query that runs"] = 0.0
    columns: Annotated[float, "reward for the reference's columns (a share of them earns a share)"] = 0.0
    values: Annotated[float, "reward for the reference's values (likewise)"] = 0.0

    def __post_init__(self) -> None:
        least = {"sft_batch": 1, "rl_groups": 1, "rl_samples": 2, "eval_items": 1, "max_tokens": 1}
        least |= dict.fromkeys(("sft_steps", "rl_steps", "max_staleness", "eval_every", "save_every"), 0)
        for name, bound in least.items():
            if getattr(self, name) < bound:
                raise OptionError(f"--{name.replace('_', '-')} {getattr(self, name)}: at least {bound}.")

    @property
    def weights(self) -> Weights:
        """What a query earns."""
        return Weights(self.match, self.parses, self.runs, self.columns, self.values)

    @property
    def online(self) -> bool:
        """Whether something of the Hugging Face hub is asked for."""
        return self.source.startswith("hub:")

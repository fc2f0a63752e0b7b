"""A request that vLLM draws, and what vLLM is told of each of its sequences."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from openrl.backends.common.sequences import Job, Sequence
from openrl.backends.vllm.plan import Opening
from openrl.backends.vllm.process import Frame
from openrl.types import SampleOutput

_SEEDS = (1 << 63) - 1  # vLLM's seeds are int64, and -1 means none


@dataclass(slots=True, eq=False)
class Draw:
    """`rows` are a request's sequences by the key that vLLM knows them by, until they are whole; `weights` those that
    vLLM must hold for it, as `turns` names them."""

    job: Job
    seed: int
    weights: str
    scored: bool  # whether the engine computes the prompt's part
    rows: dict[str, Sequence] = field(default_factory=dict[str, Sequence])
    sent: bool = False
    deaths: int = 0
    prompt: SampleOutput | None = None  # that part

    @property
    def done(self) -> bool:
        return self.job.done and (self.prompt is not None or not self.scored)

    def output(self) -> SampleOutput:
        drawn = self.job.output()
        return drawn if self.prompt is None else replace(self.prompt, sequences=drawn.sequences)


def draw_frame(opening: Opening, key: str, sequence: Sequence, adapter: int | None) -> Frame:
    """Asks for one sequence; `adapter` is the number of its adapter."""
    params, knobs, vocab = sequence.job.source.payload.params, sequence.knobs, opening.vocab
    stop = opening.eos if params.stop is None else [id_ for id_ in params.stop if isinstance(id_, int)]
    drawing = knobs.temperature > 0
    return {
        "op": "draw",
        "key": key,
        "prompt": sequence.job.prompt,
        "adapter": adapter,
        "seed": knobs.seed & _SEEDS,
        "temperature": knobs.temperature,
        "top_p": knobs.top_p if drawing else 1.0,
        "top_k": knobs.top_k if drawing and knobs.top_k < vocab else -1,
        "max_tokens": sequence.job.limit,
        "stop": [id_ for id_ in stop if 0 <= id_ < vocab],
        "top": knobs.top,
        "stream": any(isinstance(one, str) for one in params.stop or ()),
    }

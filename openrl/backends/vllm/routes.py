"""What goes to vLLM and what to openrl's own engine, which is there anyway with the training half's weights.

Never silently wrong: whatever vLLM would answer in another way than the engine is the engine's to answer.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from dataclasses import replace

from openrl.backends.base import SampleJob
from openrl.backends.vllm.adapters import Traits, traits
from openrl.backends.vllm.life import Skills
from openrl.backends.vllm.turns import BASE
from openrl.backends.vllm.wholes import Wholes
from openrl.checkpoints.full import is_full
from openrl.types import AdapterRef, SamplePayload

log = logging.getLogger(__name__)

# Below it vLLM takes another temperature than it is given.
LEAST_TEMPERATURE = 0.01
_REMEMBERED = 256  # checkpoints whose files were looked at


def asks_of_prompt(payload: SamplePayload) -> bool:
    """Whether anything is asked of the prompt's own tokens. vLLM computes that without the head's adapter, and after
    its prefix cache has dropped the states that it would need."""
    return bool(
        payload.prompt_logprobs
        or payload.topk_prompt_logprobs
        or payload.prompt_alt_tokens_k
        or payload.target_prompt_logprobs is not None
    )


def prompt_part(job: SampleJob) -> SampleJob:
    """What the engine does for a job that vLLM draws: the prompt's part, and a token that nobody looks at."""
    params = replace(job.payload.params, max_tokens=1, stop=())
    return replace(job, payload=replace(job.payload, num_samples=1, params=params, topk_sample_logprobs=0))


class Routes:
    """Decides by what a vLLM can do; remembers checkpoints that it could not load."""

    def __init__(self, wholes: Wholes) -> None:
        self._wholes = wholes
        self._traits: OrderedDict[str, Traits | None] = OrderedDict()
        self._refused: set[str] = set()

    def to_vllm(self, job: SampleJob, skills: Skills) -> bool:
        """Whether vLLM draws a job's tokens, and their logprobs as S1 and S2 have them."""
        payload, params = job.payload, job.payload.params
        if params.max_tokens == 1 and asks_of_prompt(payload):
            return False  # `compute_logprobs`: all of it is the prompt's part
        if 0 < params.temperature < LEAST_TEMPERATURE:
            return False
        cut = params.temperature > 0 and (params.top_p < 1 or params.top_k != -1)
        if (cut and not skills.truncated) or (params.temperature not in (0, 1) and not skills.temperature):
            return False
        return job.adapter is None or self._takes(job.adapter, skills)

    def rank(self, ref: AdapterRef) -> int:
        """Of an adapter that goes to vLLM."""
        found = self._look(ref)
        return found.rank if found else 0

    def weights(self, ref: AdapterRef | None) -> str:
        """Whose weights vLLM must hold to draw from this, as `turns` names them."""
        return ref.key if ref is not None and (found := self._look(ref)) and found.whole else BASE

    def refuse(self, key: str) -> None:
        """vLLM could not load this checkpoint."""
        self._refused.add(key)

    def _takes(self, ref: AdapterRef, skills: Skills) -> bool:
        found = self._look(ref)
        if found is None or ref.key in self._refused:
            return False
        return skills.weights if found.whole else skills.head or not found.head

    def _look(self, ref: AdapterRef) -> Traits | None:
        if ref.key not in self._traits:
            self._traits[ref.key] = self._whole(ref) if is_full(ref.folder) else traits(ref.folder)
            if len(self._traits) > _REMEMBERED:
                self._traits.popitem(last=False)
        return self._traits[ref.key]

    def _whole(self, ref: AdapterRef) -> Traits | None:
        why = self._wholes.misfit(ref.folder)
        if why:
            log.warning("vLLM cannot take the weights of %s: %s; our engine samples from them", ref.key, why)
        return None if why else Traits(rank=0, head=False, whole=True)

"""What a sampler refuses: values with which nothing can be drawn."""

from __future__ import annotations

from openrl.errors import BadRequest
from openrl.types import Cells, SamplePayload, SamplingParams


def check_payload(payload: SamplePayload, vocab: int) -> None:
    """Raises BadRequest for values that no sampler can work with (S3, S10)."""
    params: SamplingParams = payload.params
    ids, last = payload.prompt, payload.prompt_logprobs_last_n
    rules = {
        "prompt": (ids.ndim == 1 and len(ids) > 0 and ids.min() >= 0 and ids.max() < vocab, f"ids below {vocab}"),
        "num_samples": (payload.num_samples >= 1, "1 or more"),
        "max_tokens": (params.max_tokens is None or params.max_tokens >= 1, "1 or more, or none"),
        "temperature": (0 <= params.temperature < float("inf"), "0 or more"),
        "top_p": (0 < params.top_p <= 1, "above 0, up to 1"),
        "top_k": (params.top_k == -1 or params.top_k >= 1, "-1 for all, or 1 or more"),
        "topk_prompt_logprobs": (0 <= payload.topk_prompt_logprobs <= vocab, f"0 to {vocab}"),
        "prompt_alt_tokens_k": (payload.prompt_alt_tokens_k >= 0, "0 or more"),
        "prompt_logprobs_last_n": (last is None or 1 <= last < len(ids), "1 to the prompt's length less 1, or none"),
        "target_prompt_logprobs": (_legal_targets(payload, vocab), f"[prompt - 1, K] of ids below {vocab}, or -1"),
        "topk_sample_logprobs": (0 <= payload.topk_sample_logprobs <= vocab, f"0 to {vocab}"),
    }
    for name, (good, legal) in rules.items():
        if not good:
            given = getattr(payload, name, getattr(params, name, None))
            shown = f"{len(ids)} ids" if name == "prompt" else "another table" if isinstance(given, Cells) else given
            raise BadRequest(f"{name} is {shown}.", f"Legal: {legal}.")


def _legal_targets(payload: SamplePayload, vocab: int) -> bool:
    cells = payload.target_prompt_logprobs
    if cells is None:
        return True
    return cells.shape[0] == len(payload.prompt) - 1 and bool(((cells.values >= -1) & (cells.values < vocab)).all())

"""Logprobs as openrl has them: of the scaled logits, before top-k and top-p cut (S1, S2)."""

from __future__ import annotations

import importlib
import inspect
from typing import Any


def read_logprobs(tokens: Any, logprobs: Any, top: int) -> tuple[list[float], list[list[list[Any]]]]:
    """The logprobs of drawn tokens, and for each the `top` most likely ids and logprobs, descending."""
    own: list[float] = []
    tops: list[list[list[Any]]] = []
    for token, cells in zip(tokens, logprobs, strict=True):
        own.append(cells[token].logprob)
        if top:
            best = sorted(((cell.logprob, -id_) for id_, cell in cells.items()), reverse=True)[:top]
            tops.append([[-id_ for _, id_ in best], [value for value, _ in best]])
    return own, tops


def report_before_truncation() -> None:
    """Make vLLM's "processed" logprobs those after temperature and before top-k and top-p, in whichever of its two
    samplers it runs. `Probe` finds out whether that worked."""
    samplers: Any = importlib.import_module("vllm.v1.sample.ops.topk_topp_sampler")
    first = samplers.TopKTopPSampler.__init__

    def begin(self: Any, *args: Any, **named: Any) -> None:
        first(self, *args, **named)
        cut = self.forward

        def forward(logits: Any, generators: Any, k: Any, p: Any) -> Any:
            whole = None
            if self.logprobs_mode == "processed_logprobs" and (k is not None or p is not None):
                whole = logits.log_softmax(dim=-1).float()  # before `cut`, which changes the logits in place
            drawn, logprobs = cut(logits, generators, k, p)
            return drawn, logprobs if whole is None else whole

        self.forward = forward

    samplers.TopKTopPSampler.__init__ = begin
    try:
        second: Any = importlib.import_module("vllm.v1.worker.gpu.sample.sampler").Sampler
        draw = second._sample_random
    except (ImportError, AttributeError):
        return  # a version with one sampler
    signature = inspect.signature(draw)
    if not {"processed_logits", "top_k", "top_p"} <= signature.parameters.keys():
        return  # a version whose second sampler is another one

    def draw_whole(*args: Any, **named: Any) -> Any:
        given = signature.bind(*args, **named).arguments
        whole = given["processed_logits"]
        if given["top_k"] is not None or given["top_p"] is not None:
            whole = whole.clone()  # `draw` changes the logits in place
        return draw(*args, **named)[0], whole

    second._sample_random = draw_whole

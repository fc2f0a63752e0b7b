"""vLLM's engine in this process: adapters, weights, sequences."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from .link import Frame
from .logprobs import read_logprobs, report_before_truncation
from .opening import arguments, set_environment

_STEPS_AHEAD = 4  # after which a device that works ahead has let go of sequences that were given up


class Engine:
    """vLLM's engine, in this process, with the sampler taught to report logprobs before top-k and top-p."""

    def __init__(self, opening: Frame) -> None:
        set_environment(opening)
        self.vllm: Any = importlib.import_module("vllm")
        kinds: Any = importlib.import_module("vllm.sampling_params")
        self._output_kind = kinds.RequestOutputKind
        self._request: Any = importlib.import_module("vllm.lora.request").LoRARequest
        report_before_truncation()
        given: Any = importlib.import_module("vllm.engine.arg_utils").EngineArgs(**arguments(opening))
        engine: Any = importlib.import_module("vllm.v1.engine.llm_engine").LLMEngine
        self._engine = engine.from_engine_args(given)
        self._adapters: dict[int, Any] = {}
        self._top: dict[str, int] = {}  # of the sequences under way: how many most likely tokens are asked for

    @property
    def busy(self) -> bool:
        return self._engine.has_unfinished_requests()

    @property
    def kv_tokens(self) -> int:
        """What the KV cache holds; 0 where vLLM does not say."""
        cache = self._engine.vllm_config.cache_config
        return int((cache.num_gpu_blocks or 0) * cache.block_size)

    def load(self, number: int, name: str, folder: str) -> None:
        """Load an adapter. Raises whatever vLLM does if it cannot."""
        request = self._request(name, number, folder)
        self._engine.add_lora(request)
        self._adapters[number] = request

    def forget(self, number: int) -> None:
        if self._adapters.pop(number, None) is not None:
            self._engine.remove_lora(number)

    def replace_weights(self, reload: Callable[[Any], None]) -> None:
        """Have a worker of vLLM put other weights in the model's place. Adapters are forgotten, and so is the prefix
        cache, whose keys and values are those of the old weights. Nothing may be under way."""
        for number in list(self._adapters):
            self.forget(number)
        self._engine.collective_rpc(reload)
        for _ in range(_STEPS_AHEAD):
            if self._engine.reset_prefix_cache():
                return
            self._engine.step()
        raise RuntimeError("vLLM does not empty its prefix cache")

    def draw(self, job: Frame) -> None:
        """Begin a sequence. Raises ValueError, or whatever vLLM does, if it cannot be drawn."""
        number = job["adapter"]
        if number is not None and number not in self._adapters:
            raise ValueError("its adapter could not be loaded")
        kinds = self._output_kind
        params = self.vllm.SamplingParams(
            temperature=job["temperature"],
            top_p=job["top_p"],
            top_k=job["top_k"],
            seed=job["seed"],
            max_tokens=job["max_tokens"],
            ignore_eos=True,  # openrl's stop rules decide; `stop` are those that are plain token ids
            stop_token_ids=job["stop"],
            detokenize=False,
            logprobs=job["top"],
            flat_logprobs=True,
            output_kind=kinds.DELTA if job["stream"] else kinds.FINAL_ONLY,
        )
        adapter = None if number is None else self._adapters[number]
        prompt = {"type": "token", "prompt_token_ids": job["prompt"]}
        self._engine.add_request(job["key"], prompt, params, lora_request=adapter)
        self._top[job["key"]] = job["top"]

    def cancel(self, keys: list[str]) -> None:
        known = [key for key in keys if self._top.pop(key, None) is not None]
        if known:
            self._engine.abort_request(known)

    def step(self) -> list[list[Any]]:
        """One step of all sequences; what they drew, as in the frame "drawn"."""
        parts: list[list[Any]] = []
        for output in self._engine.step():
            key = output.request_id
            if key not in self._top:
                continue
            drawn = output.outputs[0]
            logprobs, tops = read_logprobs(drawn.token_ids, drawn.logprobs, self._top[key])
            parts.append([key, list(drawn.token_ids), logprobs, tops, output.finished])
            if output.finished:
                del self._top[key]
        return parts

    def run(self, jobs: list[Frame]) -> dict[str, list[Any]]:
        """Draw sequences to their end; their parts by key."""
        for job in jobs:
            self.draw(job)
        found: dict[str, list[Any]] = {}
        while self.busy:
            found.update({part[0]: part for part in self.step()})
        return found

"""A naive sampler to compare with: transformers' own model, adapters merged into its weights, no cache.

A `World` is a tiny model with an engine's sampler over it and this twin beside it, which is the same for all engines.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from openrl.backends.base import SampleBackend, SampleJob
from openrl.backends.common.uniforms import uniforms
from openrl.backends.torch.kv import KVCache
from openrl.backends.torch.kv_blocks import Blocks
from openrl.backends.torch.lora import Adapter, fresh_adapter
from openrl.backends.torch.model import CausalLM, open_model
from openrl.backends.torch.sample import Sampler
from openrl.backends.torch.sample_fused import FusedBackbone
from openrl.checkpoints.peft import write_adapter
from openrl.errors import OpenRLError
from openrl.types import AdapterRef, LoraSpec, RequestId, SampledSequence, SampleOutput, SamplePayload, SamplingParams
from support import tiny

_KNOWN: dict[Any, SampledSequence] = {}


def adapter_ref(name: str) -> AdapterRef:
    return AdapterRef(name, Path("unused"))


class World:
    """A tiny float32 model with adapters "a" and "b" whose B is not zero, a sampler over it and its naive twin."""

    def __init__(self, folder: Path, family: str | None) -> None:
        """`family`: of a random model that is written into `folder`; None for the model that is there."""
        self.folder = tiny.build(folder, family) if family else folder
        self.model: CausalLM = open_model(self.folder, torch.device("cpu"), torch.float32)
        self.adapters = {name: self.make_adapter(seed) for name, seed in (("a", 1), ("b", 2))}
        self._family = family
        self._twins: dict[str | None, Any] = {}

    def make_adapter(self, seed: int) -> Adapter:
        adapter = fresh_adapter(LoraSpec(rank=4, seed=seed), self.model.shapes, torch.device("cpu"))
        generator = torch.Generator().manual_seed(seed)
        for name, b in adapter.b.items():
            adapter.b[name] = 0.05 * torch.randn(b.shape, generator=generator)
        return adapter

    kv: Any = KVCache
    blocks: Any = Blocks

    def out_of_memory(self, *, by_words: bool = False) -> RuntimeError:
        """As the engine raises it; `by_words`: where only the message tells."""
        if by_words:
            return RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 bytes.")
        return torch.OutOfMemoryError("CUDA out of memory.")

    def watch_passes(self, monkeypatch: pytest.MonkeyPatch, before: Callable[[tuple[int, ...]], None]) -> None:
        """Call `before` with the shape of the token ids of each forward pass to come; what it raises, the pass does."""

        def watched(real: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
            def run(backbone: FusedBackbone, ids: torch.Tensor, *rest: Any) -> torch.Tensor:
                before(tuple(ids.shape))
                return real(backbone, ids, *rest)

            return run

        for name in ("prompt", "step"):
            monkeypatch.setattr(FusedBackbone, name, watched(getattr(FusedBackbone, name)))

    def sampler(self, max_rows: int = 8, max_kv_tokens: int = 4096, **options: Any) -> Any:
        return Sampler(self.model, self.folder, max_rows, max_kv_tokens, **{"load": self.load, **options})

    def load(self, ref: AdapterRef) -> Adapter:
        source = self.adapters[ref.key]
        return Adapter(source.spec, dict(source.a), dict(source.b))

    def twin(self, name: str | None) -> Any:
        """transformers' model with an adapter merged into its weights."""
        if name not in self._twins:
            model: Any = AutoModelForCausalLM.from_pretrained(self.folder, dtype=torch.float32)
            model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
            if name is not None:
                adapter = self.adapters[name]
                with torch.no_grad():
                    for layer, a in adapter.a.items():
                        model.get_submodule(layer).weight += adapter.scale * adapter.b[layer] @ a
            self._twins[name] = model.eval()
        return self._twins[name]

    def logits(self, tokens: Sequence[int], adapter: str | None) -> np.ndarray:
        """Logits [N, V] of a whole sequence, in float64 from a float32 forward."""
        with torch.no_grad():
            out = self.twin(adapter)(input_ids=torch.tensor([list(tokens)]), use_cache=False)
        return out.logits[0].double().numpy()

    def naive(self, payload: SamplePayload, adapter: str | None, index: int = 0) -> SampledSequence:
        """Sample `index` of a request, the whole prefix anew for each token; once for all engines."""
        if self._family is None or adapter not in (None, "a", "b"):
            return self._naive(payload, adapter, index)
        key = self._family, payload.prompt.tobytes(), payload.params, adapter, index
        if key not in _KNOWN:
            _KNOWN[key] = self._naive(payload, adapter, index)
        return _KNOWN[key]

    def _naive(self, payload: SamplePayload, adapter: str | None, index: int) -> SampledSequence:
        params = payload.params
        tokens, logprobs = payload.prompt.tolist(), []
        limit = params.max_tokens or 256 - len(tokens)
        stops = self.model.eos_ids if params.stop is None else frozenset(params.stop)
        for _ in range(limit):
            z = self.logits(tokens, adapter)[-1]
            token, logprob = naive_draw(z, params, (params.seed or 0) + index, len(tokens))
            tokens.append(token)
            logprobs.append(logprob)
            if token in stops:
                break
        drawn = tokens[len(payload.prompt) :]
        reason = "stop" if drawn[-1] in stops else "length"
        return SampledSequence(np.array(drawn, np.int32), np.array(logprobs, np.float32), reason)


class MlxWorld(World):
    """As `World`, on MLX: its sampler gets the adapters through PEFT folders."""

    def __init__(self, folder: Path, family: str | None) -> None:
        mx: Any = pytest.importorskip("mlx.core", reason="needs mlx")
        super().__init__(folder, family)
        names = ("memory", "model", "sample", "sample_adapters", "sample_kv", "sample_runner")
        self._code: dict[str, Any] = {name: importlib.import_module(f"openrl.backends.mps.{name}") for name in names}
        self.kv, self.blocks = self._code["sample_kv"].KVCache, self._code["sample_kv"].Blocks
        self._code["memory"].set_limits()
        self._opened = self._code["model"].open_model(self.folder, mx.float32)

    def out_of_memory(self, *, by_words: bool = True) -> RuntimeError:
        return RuntimeError("[malloc] Unable to allocate 1099511627776 bytes.")

    def watch_passes(self, monkeypatch: pytest.MonkeyPatch, before: Callable[[tuple[int, ...]], None]) -> None:
        runner = self._code["sample_runner"].Runner
        real = runner._forward

        def watched(engine: Any, ids: Any, *rest: Any) -> Any:
            before(tuple(ids.shape))
            return real(engine, ids, *rest)

        monkeypatch.setattr(runner, "_forward", watched)

    def sampler(self, max_rows: int = 8, max_kv_tokens: int = 4096, **options: Any) -> Any:
        make = self._code["sample"].Sampler
        return make(self._opened, self.folder, max_rows, max_kv_tokens, **{"load": self.load, **options})

    def load(self, ref: AdapterRef) -> Any:
        adapter = self.adapters[ref.key]
        folder = self.folder / f"adapter-{ref.key}"
        folder.mkdir(parents=True, exist_ok=True)
        write_adapter(folder, adapter.spec, {name: t.numpy() for name, t in adapter.parameters()}, "m")
        return self._code["sample_adapters"].load_adapter(folder, self._opened.shapes)


MLX_FAMILIES = ("llama", "qwen3", "gemma3")


def worlds(*families: str, mlx: Sequence[str] = MLX_FAMILIES) -> list[str]:
    """Names for `open_world`: of each family, and of those that are also tried on MLX."""
    return [*families, *(f"mlx-{family}" for family in families if family in mlx)]


def open_world(name: str, folder: Path) -> World:
    """A world that `worlds` names, with a model written into `folder`. Skips the test where the engine is missing."""
    family = name.removeprefix("mlx-")
    return World(folder, family) if family == name else MlxWorld(folder, family)


def log_softmax(z: np.ndarray) -> np.ndarray:
    z = z - z.max(-1, keepdims=True)
    return z - np.log(np.exp(z).sum(-1, keepdims=True))


def naive_draw(z: np.ndarray, params: SamplingParams, seed: int, position: int) -> tuple[int, float]:
    """One token by the book: sort, cut, cumulate."""
    if params.temperature == 0:
        token = int(np.argmax(z))
        return token, float(log_softmax(z)[token])
    logprobs = log_softmax(z / params.temperature)
    order = np.argsort(-logprobs, kind="stable")
    mass = np.exp(logprobs[order]).cumsum()
    count = len(z) if params.top_p >= 1 else int((mass < params.top_p).sum()) + 1
    count = min(count, params.top_k) if params.top_k > 0 else count
    p = np.zeros(len(z))
    p[order[:count]] = np.exp(logprobs[order[:count]])
    u = uniforms(np.array([seed], np.uint64), np.array([position]))[0]
    token = int(np.searchsorted(p.cumsum(), u * p.sum(), side="right"))
    return token, float(logprobs[token])


@dataclass
class Ask:
    """A request of a test."""

    payload: SamplePayload
    adapter: str | None = None
    at: int = 0  # the turn before which it arrives

    def job(self, name: str) -> SampleJob:
        return SampleJob(RequestId(name), self.payload, adapter_ref(self.adapter) if self.adapter else None)


def payload(prompt: Sequence[int], num_samples: int = 1, /, **params: Any) -> SamplePayload:
    reports = (
        "prompt_logprobs",
        "topk_prompt_logprobs",
        "topk_sample_logprobs",
        "target_prompt_logprobs",
        "prompt_alt_tokens_k",
        "prompt_logprobs_last_n",
    )
    extra = {name: params.pop(name) for name in reports if name in params}
    num_samples = params.pop("num_samples", num_samples)
    return SamplePayload(np.array(prompt, np.int32), num_samples, SamplingParams(**params), **extra)


def run(sampler: SampleBackend, asks: Sequence[Ask]) -> list[SampleOutput]:
    """Serve requests, each added at its turn; all must succeed."""
    results = run_all(sampler, asks)
    for result in results:
        assert isinstance(result, SampleOutput), result
    return [r for r in results if isinstance(r, SampleOutput)]


def run_all(sampler: SampleBackend, asks: Sequence[Ask], turns: int = 5000) -> list[SampleOutput | OpenRLError]:
    """Serve requests, each added at its turn; results in the order of `asks`."""
    results: dict[str, SampleOutput | OpenRLError] = {}
    for turn in range(turns):
        for i, ask in enumerate(asks):
            if ask.at == turn:
                sampler.add(ask.job(str(i)))
        for request, result in sampler.step():
            assert request not in results
            results[request] = result
        if len(results) == len(asks):
            assert not sampler.busy
            return [results[str(i)] for i in range(len(asks))]
    raise AssertionError(f"{len(results)} of {len(asks)} requests finished in {turns} turns")

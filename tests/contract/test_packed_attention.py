"""Training over sequences end to end: all but the kernel on a CPU, with a kernel of the same signature in float64."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from openrl.backends.torch import attention_reader
from openrl.backends.torch.memory_plan import Sizes
from openrl.backends.torch.model import open_model
from openrl.backends.torch.train import Trainer
from openrl.backends.torch.train_kernels import Varlen, Way, way, way_of
from openrl.types import Array, LoraSpec, RunId, TrainPayload
from support.reference import distance
from support.training import RUN, ce, create, forward, item, run_pass, same, trainer

Folders = Callable[..., Path]
OTHER = RunId("other")
A, B = ce(50, 21, 3, 70), ce(16, 17, 1, seed=9)


class Kernel:
    """A `Varlen`: a loop over sequences in float64. Remembers windows and tokens of its calls."""

    def __init__(self) -> None:
        self.calls: list[tuple[tuple[int, int], int]] = []

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cu_seq_q: Tensor,
        cu_seq_k: Tensor,
        max_q: int,
        max_k: int,
        *,
        scale: float,
        window_size: tuple[int, int],
        enable_gqa: bool,
    ) -> Tensor:
        self.calls.append((window_size, len(query)))
        ends = cu_seq_q.tolist()
        assert cu_seq_q.dtype is torch.int32
        assert cu_seq_k.tolist() == ends
        assert max_q == max_k == max(b - a for a, b in itertools.pairwise(ends))
        assert ends[-1] == len(query) == len(key) == len(value)
        assert enable_gqa == (query.shape[1] > key.shape[1])
        parts = [slice(a, b) for a, b in itertools.pairwise(ends)]
        attended = [_attend(query[part], key[part], value[part], scale, window_size) for part in parts]
        return torch.cat(attended).to(query.dtype)


def _attend(q: Tensor, k: Tensor, v: Tensor, scale: float, window: tuple[int, int]) -> Tensor:
    """One sequence [N, heads, d], as flash attention's documentation says it."""
    group = q.shape[1] // k.shape[1]
    k, v = (t.double().repeat_interleave(group, dim=1) for t in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.double(), k) * scale
    at = torch.arange(len(q))
    distance = at[:, None] - at
    left, right = window
    hidden = distance < -right
    if left >= 0:
        hidden |= distance > left
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, float("-inf")).softmax(-1), v)


def use(monkeypatch: pytest.MonkeyPatch, chosen: Way, kernel: Varlen | None = None) -> None:
    """Let trainers that are opened from now on go this way."""
    monkeypatch.setattr(attention_reader, "way_of", lambda *_: (chosen, kernel))


def gradients(held: Trainer) -> tuple[dict[str, Array], dict[str, Array]]:
    """Of two runs' requests in one pass."""
    outcomes = run_pass(held, item(A), item(B, OTHER))
    assert all(not isinstance(outcome, Exception) for outcome in outcomes.values())
    return held.gradients(RUN), held.gradients(OTHER)


def two_runs(held: Trainer, folder: Path) -> Trainer:
    create(held, folder)
    create(held, folder, OTHER, LoraSpec(rank=2, seed=3), seed=1)
    return held


@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral", "gemma3"])
def test_packed_attention_is_that_in_blocks(
    family: str, model_folder: Folders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Mixed lengths, two adapters, windows: gradients to 1e-5, and not a token of padding."""
    blocks = two_runs(trainer(model_folder(family)), tmp_path)
    kernel = Kernel()
    use(monkeypatch, "packed", kernel)
    packed = two_runs(trainer(model_folder(family)), tmp_path)
    for found, expected in zip(gradients(packed), gradients(blocks), strict=True):
        assert distance(found, expected) < 1e-5
    assert {tokens for _, tokens in kernel.calls} == {sum(len(d.tokens) for p in (A, B) for d in p.data)}
    layers = {"mistral": {(15, 0)}, "gemma3": {(15, 0), (-1, 0)}}
    assert {window for window, _ in kernel.calls} == layers.get(family, {(-1, 0)})
    for run, payload in ((RUN, A), (OTHER, B)):
        for one, two in zip(
            forward(packed, payload, run).logprobs, forward(blocks, payload, run).logprobs, strict=True
        ):
            assert abs(one - two).max() < 1e-5


def test_a_window_that_no_sequence_fills_is_none(
    model_folder: Folders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernels for plain causal attention are the faster ones."""
    kernel = Kernel()
    use(monkeypatch, "packed", kernel)
    held = trainer(model_folder("mistral"))
    create(held, tmp_path)
    forward(held, ce(16, 5))
    assert {window for window, _ in kernel.calls} == {(-1, 0)}
    forward(held, ce(17, 5))
    assert kernel.calls[-1][0] == (15, 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_packed_layers_can_be_computed_again(
    dtype: torch.dtype, model_folder: Folders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rule of memory holds as it does in blocks: the same to the last bit in float32."""
    use(monkeypatch, "packed", Kernel())
    held = two_runs(trainer(model_folder("gemma3"), dtype), tmp_path)
    plain = gradients(held)
    monkeypatch.setattr(type(held.passes.memory([])), "recomputed", lambda *_: 3)
    for run in (RUN, OTHER):
        held._runs[run].gradient = None
    again = gradients(held)
    if dtype is torch.float32:
        assert all(same(one, two) for one, two in zip(again, plain, strict=True))
    else:
        assert all(distance(one, two) < 0.02 for one, two in zip(again, plain, strict=True))


@pytest.mark.parametrize(
    ("device", "dtype", "head_dim", "softcap", "capability", "expected"),
    [
        ("cuda", torch.bfloat16, 128, None, (9, 0), "packed"),
        ("cuda", torch.bfloat16, 64, None, (8, 6), "packed"),
        ("cuda", torch.bfloat16, 256, None, (12, 0), "packed"),
        ("cuda", torch.bfloat16, 208, None, (8, 0), "packed"),
        ("cuda", torch.bfloat16, 208, None, (8, 9), "fused"),  # its way back needs more shared memory
        ("cuda", torch.bfloat16, 128, None, (7, 5), "fused"),  # before flash attention
        ("cuda", torch.float32, 128, None, (9, 0), "fused"),
        ("cuda", torch.bfloat16, 264, None, (9, 0), "fused"),
        ("cuda", torch.bfloat16, 100, None, (9, 0), "fused"),
        ("cuda", torch.bfloat16, 128, 50.0, (9, 0), "blocks"),  # Gemma 2
        ("cpu", torch.bfloat16, 64, None, (0, 0), "blocks"),
        ("cpu", torch.float32, 64, None, (0, 0), "blocks"),
        ("xpu", torch.bfloat16, 64, None, (0, 0), "fused"),
    ],
)
def test_the_way_is_chosen_by_what_the_kernel_can(
    device: str,
    dtype: torch.dtype,
    head_dim: int,
    softcap: float | None,
    capability: tuple[int, int],
    expected: Way,
) -> None:
    assert way(device, dtype, head_dim, softcap, capability=capability) == expected
    older = way(device, dtype, head_dim, softcap, capability=capability, varlen=False)
    assert older == ("fused" if expected == "packed" else expected)


def test_a_cpu_takes_blocks() -> None:
    assert way_of(torch.device("cpu"), torch.bfloat16, 64, None) == ("blocks", None)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU (scripts/gpu_check.sh)")
@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral", "gemma3"])
def test_the_gpus_own_kernel(
    family: str, model_folder: Folders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PyTorch's kernel in bf16: gradients as near to float32's as those of the other two ways, and the memory of a
    pass within what it was planned with."""
    exact = gradients(two_runs(trainer(model_folder(family)), tmp_path))
    device = torch.device("cuda", 0)
    head_dim = 8
    assert way_of(device, torch.bfloat16, head_dim, None)[0] == "packed"

    def off(chosen: Way | None) -> float:
        with monkeypatch.context() as patch:
            if chosen is not None:
                use(patch, chosen)
            held = Trainer(open_model(model_folder(family), device, torch.bfloat16), 4096, "tiny/model")
        found = gradients(two_runs(held, tmp_path))
        return max(distance(one, two) for one, two in zip(found, exact, strict=True))

    others = max(off("fused"), off("blocks"))
    assert off(None) < 1.25 * others


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU (scripts/gpu_check.sh)")
def test_the_gpus_memory_is_within_the_plan(model_folder: Folders, tmp_path: Path) -> None:
    held = Trainer(open_model(model_folder("llama"), torch.device("cuda", 0), torch.bfloat16), 1 << 20, "tiny/model")
    create(held, tmp_path)
    payload: TrainPayload = ce(*[250] * 256)
    memory, tokens = held.passes.memory([]), sum(len(d.tokens) for d in payload.data)
    assert isinstance(memory.sizes, Sizes)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run_pass(held, item(payload))
    assert torch.cuda.max_memory_allocated() - before < memory.needed(tokens)

"""Training in little memory: layers computed again, smaller micro-batches, long sequences, no padding."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from openrl.backends.torch import attention_reader, passes
from openrl.backends.torch.grids import arrange
from openrl.backends.torch.train import Trainer
from openrl.backends.torch.train_backbone import TrainBackbone
from openrl.types import Array, LoraSpec, RunId, TrainOutput, TrainPayload
from support import tiny
from support.reference import distance
from support.training import RUN, ce, create, datum, forward, forward_backward, item, on_policy, run_pass, same, trainer

Folders = Callable[..., Path]
CPU = torch.device("cpu")
_BUFFERS = 64 << 20  # more than what a tiny model's step takes whatever its tokens


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Tokens and recomputed layers of each micro-batch from now on."""
    batches: list[tuple[int, int]] = []
    plain = TrainBackbone.run

    def run(
        self: TrainBackbone,
        sequences: list[torch.Tensor],
        adapters: list[object],
        casts: object,
        *,
        recomputed: int = 0,
    ) -> object:
        batches.append((sum(map(len, sequences)), recomputed))
        return plain(self, sequences, adapters, casts, recomputed=recomputed)  # type: ignore[arg-type]

    monkeypatch.setattr(TrainBackbone, "run", run)
    return batches


def shrink(monkeypatch: pytest.MonkeyPatch, held: Trainer, free: int, run: RunId = RUN) -> None:
    """Let passes find so many bytes free besides what does not depend on tokens, twice: a pass may take half."""
    sizes = held.passes._sizes
    fixed = sizes.buffers + sizes.of_adapters(held._runs[run].theta.numel())
    monkeypatch.setattr(passes, "free_memory", lambda _: 2 * (fixed + free))


def gradients(held: Trainer, payload: TrainPayload) -> tuple[TrainOutput, dict[str, Array]]:
    """Of one request, from G = 0."""
    held._runs[RUN].gradient = None
    output = forward_backward(held, payload)
    return output, held.gradients(RUN)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral", "gemma2", "gemma3", tiny.MIXTURE])
def test_recomputed_layers_give_the_same_gradients(
    family: str,
    dtype: torch.dtype,
    model_folder: Folders,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    seen: list[tuple[int, int]],
) -> None:
    """Of none, some or all layers: the same to the last bit in float32; in bf16 nearer than float32's gradients are."""
    held = trainer(model_folder(family), dtype)
    create(held, tmp_path)
    payload = ce(50, 21, 70)
    plain = gradients(held, payload)
    exact = trainer(model_folder(family), torch.float32)
    create(exact, tmp_path)
    rounding = distance(plain[1], gradients(exact, payload)[1])
    seen.pop()
    layer = held.passes._sizes.kept * 141
    for free in (2 * layer, layer, 0):
        shrink(monkeypatch, held, free)
        output, found = gradients(held, payload)
        assert same(found, plain[1]) if dtype is torch.float32 else distance(found, plain[1]) < rounding
        assert output.metrics == plain[0].metrics
    assert [tokens for tokens, _ in seen] == [141] * 4
    assert seen[0][1] == 0
    assert seen[-1][1] == 3


def test_a_pass_is_cut_to_what_is_free(
    model_folder: Folders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seen: list[tuple[int, int]]
) -> None:
    """`max_batch_tokens` is an upper bound; below it memory decides. Parts are of about the same size."""
    held = trainer(model_folder("llama"), max_batch_tokens=4096)
    create(held, tmp_path)
    payload = ce(*[100] * 14)
    whole = gradients(held, payload)[1]
    shrink(monkeypatch, held, 600 * held.passes.memory([]).token)
    parts = gradients(held, payload)[1]
    assert [tokens for tokens, _ in seen] == [700, 700, 500, 500, 400]
    assert distance(parts, whole) < 1e-5


def test_a_long_sequence_trains_in_little_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seen: list[tuple[int, int]]
) -> None:
    """8,192 tokens where only half of one layer's values would fit: all layers are computed again."""
    small = tiny.config("llama", max_position_embeddings=8192)
    small.num_hidden_layers, small.num_attention_heads, small.num_key_value_heads = 2, 2, 1
    AutoModelForCausalLM.from_config(small).save_pretrained(tmp_path / "model")
    held = trainer(tmp_path / "model", max_batch_tokens=4096)
    create(held, tmp_path)
    shrink(monkeypatch, held, 4096 * held.passes._sizes.kept)
    output, found = gradients(held, ce(8192))
    assert seen == [(8192, 2)]
    assert np.isfinite(output.logprobs[0]).all()
    assert all(g.any() for g in found.values())


def test_long_sequences_equal_short_ones_where_they_begin_alike(tmp_path: Path) -> None:
    """B2 across block sizes: blocks of attention are cut otherwise for other lengths."""
    held = trainer(tiny.build(tmp_path / "model", "gemma3", max_position_embeddings=1500))
    create(held, tmp_path)
    long = ce(1500).data[0]
    whole = forward(held, TrainPayload((long,), "cross_entropy")).logprobs[0]
    for length in (1, 15, 64, 65, 130, 700):
        part = type(long)(long.tokens[:length], {name: value[:length] for name, value in long.inputs.items()})
        short = forward(held, TrainPayload((part,), "cross_entropy")).logprobs[0]
        np.testing.assert_allclose(short, whole[:length], atol=1e-4)


@pytest.mark.parametrize("family", ["qwen3", tiny.MIXTURE])
def test_mixed_runs_and_losses_in_little_memory(
    family: str, model_folder: Folders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seen: list[tuple[int, int]]
) -> None:
    """B6, G6: adapters of different rank and modules and different losses in one micro-batch, layers computed again."""
    held = trainer(model_folder(family))
    specs = {
        RUN: LoraSpec(rank=4, seed=1),
        RunId("b"): LoraSpec(rank=2, seed=2, train_mlp=False),
        RunId("c"): LoraSpec(rank=8, seed=3, train_attn=False, train_unembed=False),
    }
    payloads: dict[RunId, TrainPayload] = {}
    for number, (run, spec) in enumerate(specs.items()):
        create(held, tmp_path, run, spec, seed=number)
        loss = ("cross_entropy", "ppo", "gspo")[number]
        payload = TrainPayload(tuple(datum(loss, n, n + number) for n in (8, 21, 13)), loss)
        payloads[run] = payload if number == 0 else on_policy(held, payload, run)
    alone: dict[RunId, dict[str, Array]] = {}
    for run, payload in payloads.items():
        forward_backward(held, payload, run)
        alone[run] = held.gradients(run)
        held._runs[run].gradient = None
    seen.clear()
    shrink(monkeypatch, held, 0)
    run_pass(held, *(item(payload, run) for run, payload in payloads.items()))
    assert seen == [(126, 3)]
    for run in payloads:
        assert distance(held.gradients(run), alone[run]) < 1e-5


def test_mixed_lengths_are_not_padded(tmp_path: Path, seen: list[tuple[int, int]]) -> None:
    """64 datums of 32 to 512 tokens: products see real tokens only, and attention pads by less than a tenth."""
    lengths = np.random.default_rng(0).integers(32, 513, 64).tolist()
    cells = sum(grid.sequences * grid.length for grid in arrange(sorted(lengths, reverse=True), CPU))
    assert cells < 1.1 * sum(lengths)
    held = trainer(tiny.build(tmp_path / "model", "llama", max_position_embeddings=512), max_batch_tokens=4096)
    create(held, tmp_path)
    forward(held, ce(*lengths))
    assert sum(tokens for tokens, _ in seen) == sum(lengths)


@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral", "gemma3"])
def test_fused_attention_gives_the_same(
    family: str, model_folder: Folders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a GPU runs, on a CPU: PyTorch's own kernels in place of blocks, windows included."""
    blocks = trainer(model_folder(family))
    monkeypatch.setattr(attention_reader, "way_of", lambda *_: ("fused", None))
    fused = trainer(model_folder(family))
    payload = ce(50, 21, 70)
    create(blocks, tmp_path)
    create(fused, tmp_path)
    one, two = gradients(blocks, payload), gradients(fused, payload)
    assert one[0].metrics == pytest.approx(two[0].metrics, rel=1e-5)
    assert distance(two[1], one[1]) < 1e-5


def test_forward_alone_keeps_nothing(model_folder: Folders, tmp_path: Path) -> None:
    """G5 costs no memory a layer: all layers share theirs."""
    held = trainer(model_folder("llama"))
    create(held, tmp_path)
    scratch = held.passes._backbone._scratch
    sizes: list[int] = []
    clear = type(scratch).clear

    def watched(self: object) -> None:
        sizes.append(sum(t.nbytes for t in scratch._held.values()))
        clear(scratch)

    held.passes._backbone.clear = lambda: watched(scratch)  # type: ignore[method-assign]
    forward(held, ce(100))
    forward_backward(held, ce(100))
    kept = held.passes._sizes.kept * 100
    assert sizes[1] > sizes[0] + 2 * kept

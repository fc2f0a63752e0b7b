"""The sampler's own backbone: taken for every supported family, equal to transformers' modules, or plainly declined."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from openrl.backends.torch.kv import ChunkView, KVCache, KVShape
from openrl.backends.torch.lora import Adapter, Segment, fresh_adapter
from openrl.backends.torch.masks import Masks
from openrl.backends.torch.model import FAMILIES, CausalLM, open_model
from openrl.backends.torch.sample_backbone import Backbone, PlainBackbone, backbone_of
from openrl.backends.torch.sample_factors import OUT, AdapterFactors
from openrl.backends.torch.sample_fused import FusedBackbone
from openrl.backends.torch.sample_layers import read_layers
from openrl.types import LoraSpec
from support import tiny
from support.sampling import Ask, World, payload, run

CPU = torch.device("cpu")
LENGTHS = (3, 12, 25, 75)  # of the prompts: before, across and beyond windows of 16
STEPS = 10


def opened(folder: Path, dtype: torch.dtype = torch.float32) -> CausalLM:
    return open_model(folder, CPU, dtype)


def adapter(model: CausalLM, seed: int, **spec: Any) -> Adapter:
    made = fresh_adapter(LoraSpec(**{"rank": 4, "seed": seed, **spec}), model.shapes, CPU)
    generator = torch.Generator().manual_seed(seed)
    for name, b in made.b.items():
        made.b[name] = 0.1 * torch.randn(b.shape, generator=generator)
    return made.freeze(model.dtype)


def crowd(model: CausalLM) -> list[Adapter | None]:
    """Adapters of different ranks that train different parts, one for two rows, and the base model."""
    both = adapter(model, 1, train_mlp=False)
    return [None, both, both, adapter(model, 2, rank=8)]


@dataclass
class Decoding:
    """Prompts in parts into a cache, then steps of all rows together; keeps all hidden states."""

    model: CausalLM
    backbone: Backbone
    adapters: Sequence[Adapter | None]
    part: int = 70  # tokens: enough for adapters to be computed the way of many rows

    def run(self) -> Tensor:
        kv = KVCache(KVShape.of(self.model.config, self.model.dtype, CPU), 8, 4096)
        kv.reserve(len(LENGTHS), 200, 0, 0)
        masks = Masks(self.model.config, self.model.dtype, CPU)
        generator = torch.Generator().manual_seed(0)
        with torch.inference_mode():
            states = [self._prompt(kv, masks, slot, generator) for slot in range(len(LENGTHS))]
            return torch.cat([*states, *self._steps(kv, masks, generator)]).float()

    def _prompt(self, kv: KVCache, masks: Masks, slot: int, generator: torch.Generator) -> Tensor:
        ids = torch.randint(3, tiny.VOCAB, (1, LENGTHS[slot]), generator=generator)
        states: list[Tensor] = []
        for start in range(0, LENGTHS[slot], self.part):
            part = ids[:, start : start + self.part]
            positions = start + torch.arange(part.shape[1])[None]
            with self.model.routing.use([self.adapters[slot]]):
                mask = masks.prompt(start, part.shape[1])
                states.append(self.backbone.prompt(part, positions, mask, ChunkView(kv, slot, start))[0])
        return torch.cat(states)

    def _steps(self, kv: KVCache, masks: Masks, generator: torch.Generator) -> list[Tensor]:
        positions = torch.tensor(LENGTHS)
        states: list[Tensor] = []
        for _ in range(STEPS):
            ids = torch.randint(3, tiny.VOCAB, (len(LENGTHS),), generator=generator)
            columns = kv.whole_blocks(int(positions.max()) + 1)
            with self.model.routing.use(self.adapters):
                states.append(self.backbone.step(ids, positions, kv, columns, masks.decode(positions, columns)))
            positions = positions + 1
        return states


def states(model: CausalLM, backbone: Callable[[CausalLM], Backbone]) -> Tensor:
    return Decoding(model, backbone(model), crowd(model)).run()


def check_equal(got: Tensor, want: Tensor) -> None:
    """Within 1e-5 of the largest entry."""
    assert (got - want).abs().max() <= 1e-5 * want.abs().max()


def test_the_tiny_models_cover_all_families() -> None:
    assert {tiny.config(family).model_type for family in (*tiny.FAMILIES, tiny.MIXTURE)} == FAMILIES


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_every_family_is_fused_and_equals_transformers(family: str, tmp_path: Path) -> None:
    model = opened(tiny.build_uneven(tmp_path, family))
    fused = backbone_of(model)
    assert isinstance(fused, FusedBackbone)
    check_equal(states(model, lambda _: fused), states(model, PlainBackbone))


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_bf16_is_no_further_from_float32_than_transformers(family: str, tmp_path: Path) -> None:
    """From the same bf16 weights; float32 is transformers' own."""
    folder = tiny.build_uneven(tmp_path, family)
    rough = opened(folder, torch.bfloat16)
    exact = opened(folder)
    with torch.no_grad():
        for fine, coarse in zip(exact.backbone.parameters(), rough.backbone.parameters(), strict=True):
            fine.copy_(coarse)
    want = states(exact, PlainBackbone)

    def error(backbone: Callable[[CausalLM], Backbone]) -> float:
        return (states(rough, backbone) - want).square().mean().sqrt().item()

    assert error(FusedBackbone) <= 1.02 * error(PlainBackbone)


ROPES: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    },
}


@pytest.mark.parametrize("name", ROPES)
def test_scaled_positions_equal_transformers(name: str, tmp_path: Path) -> None:
    rope = {"rope_theta": 10000.0, **ROPES[name]}
    model = opened(tiny.build_uneven(tmp_path, "llama", rope_parameters=rope, max_position_embeddings=64))
    check_equal(states(model, FusedBackbone), states(model, PlainBackbone))


def test_projections_share_memory_with_their_joint_weight(tmp_path: Path) -> None:
    """Where nothing is packed, there is one copy of the weights, and training reads it."""
    model = opened(tiny.build(tmp_path, "llama"))
    before = {name: p.clone() for name, p in model.backbone.named_parameters()}
    FusedBackbone(model)
    FusedBackbone(model)
    after = dict(model.backbone.named_parameters())
    assert all(torch.equal(after[name], p) for name, p in before.items())
    for joint in (("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), ("mlp.gate_proj", "mlp.up_proj")):
        weights = [after[f"layers.0.{name}.base.weight"] for name in joint]
        assert len({w.untyped_storage().data_ptr() for w in weights}) == 1
        assert not any(w.requires_grad for w in weights)


def unknown_part(backbone: Any) -> None:
    backbone.layers[1].mlp.extra = torch.nn.Identity()


def unknown_norm(backbone: Any) -> None:
    backbone.layers[0].input_layernorm = torch.nn.LayerNorm(32)


def unknown_projection(backbone: Any) -> None:
    backbone.layers[0].self_attn.o_proj = torch.nn.Linear(32, 32)


def unknown_angles(backbone: Any) -> None:
    backbone.rotary_emb.inv_freq = backbone.rotary_emb.inv_freq[:2]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (unknown_part, "LlamaMLP with other parts than expected: extra"),
        (unknown_norm, "a norm of type LayerNorm"),
        (unknown_projection, "a projection of type Linear"),
        (unknown_angles, "rotary embeddings of 4 of 8 dimensions"),
    ],
)
def test_an_unknown_layout_is_declined_with_a_warning(
    change: Callable[[Any], None], words: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = opened(tiny.build(tmp_path, "llama"))
    change(model.backbone)
    with caplog.at_level(logging.WARNING):
        assert isinstance(backbone_of(model), PlainBackbone)
    (record,) = caplog.records
    assert words in record.getMessage()


def test_sampling_without_the_fused_backbone_is_the_same(tmp_path: Path) -> None:
    world = World(tmp_path, "llama")
    asks = [Ask(payload([5, 6, 7 + i], max_tokens=20, seed=i, stop=()), ("a", "b", None)[i]) for i in range(3)]
    fast = run(world.sampler(), asks)
    unknown_part(world.model.backbone)
    slow = run(world.sampler(), asks)
    for a, b in zip(fast, slow, strict=True):
        assert a.sequences[0].tokens.tolist() == b.sequences[0].tokens.tolist()
        torch.testing.assert_close(a.sequences[0].logprobs, b.sequences[0].logprobs, atol=2e-5, rtol=0)


@pytest.mark.parametrize("rows", [3, 70])  # few and many: computed in two ways
def test_what_a_young_adapter_says_is_not_rounded_away(rows: int, model_folder: Callable[..., Path]) -> None:
    """S6: beside base outputs a thousand times as large, whose bf16 steps are larger than what the adapter adds."""
    model = opened(model_folder("llama"), torch.bfloat16)
    layers = read_layers(model)
    young = adapter(model, 1)
    factors = AdapterFactors(layers.layers, model.dtype, torch.float32).of((Segment(0, rows, young),))
    assert factors is not None
    x = torch.randn(rows, 32, generator=torch.Generator().manual_seed(0)).bfloat16()
    assert young.frozen is not None
    down, up = young.frozen[layers.layers[0].out.parts[0].name]
    expected = x.float() @ down.float() @ up.float()
    base = 1000 * expected.abs().max()
    y = torch.full((rows, up.shape[1]), float(base))
    factors.add(y, x.to(factors.dtype), 0, OUT)
    assert torch.linalg.vector_norm(y - base - expected) < 0.02 * torch.linalg.vector_norm(expected)

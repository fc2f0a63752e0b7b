"""LoRA adapters: initialisation, seeds, modules, sizes and the worked example of training-semantics 4.1."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, Qwen3Config, Qwen3MoeConfig

from openrl.backends.common.lora import LoraShape
from openrl.backends.torch.lora import Adapter, LoraLinear, Routing, fresh_adapter
from openrl.backends.torch.model import lora_shapes
from openrl.checkpoints.peft import expert_shapes
from openrl.types import LoraSpec

CPU = torch.device("cpu")
SHAPES = {
    "model.layers.0.self_attn.q_proj": LoraShape(64, 96),
    "model.layers.0.mlp.down_proj": LoraShape(400, 64),
    "lm_head": LoraShape(64, 200),
}


def adapter(a: Any, b: Any) -> Adapter:
    """An adapter of one layer named `layer`."""
    spec = LoraSpec(rank=len(a), seed=0)
    return Adapter(spec, {"layer": torch.tensor(a, requires_grad=True)}, {"layer": torch.tensor(b, requires_grad=True)})


def wrapped(weight: Any) -> tuple[LoraLinear, Routing]:
    base = nn.Linear(len(weight[0]), len(weight), bias=False).requires_grad_(False)
    base.weight.data = torch.tensor(weight)
    routing = Routing()
    return LoraLinear(base, "layer", routing), routing


@pytest.mark.parametrize(
    ("b", "y", "loss", "grad_a", "grad_b"),
    [
        ([0.0, 0.0], [-1.5, 1.75], 0.038041, [0, 0], [-0.358338, 0.358338]),
        ([0.01, -0.02], [-1.596, 1.942], 0.028657, [0.027120, 0.054240], [-0.271201, 0.271201]),
    ],
)
def test_worked_example(b: list[float], y: list[float], loss: float, grad_a: Any, grad_b: Any) -> None:
    """4.1: alpha 32, r 1 (A1), through the layer that training uses."""
    layer, routing = wrapped([[0.5, -1.0], [0.25, 0.75]])
    lora = adapter([[0.1, -0.2]], [[value] for value in b])
    x = torch.tensor([[[1.0, 2.0]]], requires_grad=True)
    with routing.use([lora]):
        out = layer(x)
    np.testing.assert_allclose(out[0, 0].detach(), y, atol=1e-6)
    total = -torch.log_softmax(out[0, 0], dim=0)[1]
    assert float(total.detach()) == pytest.approx(loss, abs=1e-6)
    total.backward()
    np.testing.assert_allclose(lora.a["layer"].grad, [grad_a], atol=1e-6)
    np.testing.assert_allclose(lora.b["layer"].grad, [[value] for value in grad_b], atol=1e-6)
    merged = layer.base.weight + lora.scale * lora.b["layer"] @ lora.a["layer"]
    dy = torch.softmax(out[0, 0].detach(), dim=0) - torch.tensor([0.0, 1.0])
    np.testing.assert_allclose(x.grad[0, 0], (dy @ merged).detach(), atol=1e-6)
    if any(b):
        np.testing.assert_allclose(merged[1].detach(), [0.186, 0.878], atol=1e-6)


@pytest.mark.parametrize(("rank", "scale"), [(1, 32), (8, 4), (16, 2), (32, 1), (64, 0.5), (128, 0.25)])
def test_a1_scale(rank: int, scale: float) -> None:
    """A1."""
    assert fresh_adapter(LoraSpec(rank, 0), SHAPES, CPU).scale == scale


def test_a2_initialisation() -> None:
    """A2: B = 0; A uniform on +-1/sqrt(in)."""
    lora = fresh_adapter(LoraSpec(64, seed=3), SHAPES, CPU)
    for name, shape in SHAPES.items():
        assert lora.a[name].shape == (64, shape.inputs)
        assert not lora.b[name].any()
        assert lora.b[name].shape == (shape.outputs, 64)
        scaled = lora.a[name] * math.sqrt(shape.inputs)
        assert 0.99 < float(scaled.abs().max()) <= 1
        assert float(scaled.std()) == pytest.approx(0.577, abs=0.015)
        assert lora.a[name].dtype == torch.float32


def test_a4_seeds() -> None:
    """A4: the same seed gives the same A whatever other modules train; another seed another one; no global RNG."""
    before = torch.random.get_rng_state()
    every = fresh_adapter(LoraSpec(8, seed=3), SHAPES, CPU)
    again = fresh_adapter(LoraSpec(8, seed=3), SHAPES, CPU)
    other = fresh_adapter(LoraSpec(8, seed=4), SHAPES, CPU)
    mlp = fresh_adapter(LoraSpec(8, seed=3, train_attn=False, train_unembed=False), SHAPES, CPU)
    name = "model.layers.0.mlp.down_proj"
    assert torch.equal(every.a[name], again.a[name])
    assert torch.equal(every.a[name], mlp.a[name])
    assert not torch.equal(every.a[name], other.a[name])
    assert list(mlp.a) == [name]
    assert torch.equal(torch.random.get_rng_state(), before)


def test_modules_by_flag() -> None:
    """4.2: which layers each flag trains."""
    for flag, name in zip(("train_attn", "train_mlp", "train_unembed"), SHAPES, strict=True):
        flags = {"train_attn": False, "train_mlp": False, "train_unembed": False, flag: True}
        assert list(fresh_adapter(LoraSpec(2, 0, **flags), SHAPES, CPU).a) == [name]


@pytest.mark.parametrize(
    ("config", "mlp", "attn", "unembed"),
    [
        # Qwen3-8B: 36 layers of hidden 4096.
        ((36, 4096, 12288, 32, 8, 151936), 1_769_472, 958_464, 156_032),
        # Qwen3-4B, tied: the head's adapter counts all the same (A9).
        ((36, 2560, 9728, 32, 8, 151936), 1_327_104, 737_280, 154_496),
    ],
)
def test_a8_parameters_per_rank(config: tuple[int, ...], mlp: int, attn: int, unembed: int) -> None:
    """A8: the published table, from models without storage."""
    layers, hidden, inner, heads, kv_heads, vocab = config
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            Qwen3Config(
                vocab_size=vocab,
                hidden_size=hidden,
                intermediate_size=inner,
                num_hidden_layers=layers,
                num_attention_heads=heads,
                num_key_value_heads=kv_heads,
                head_dim=128,
            )
        )
    shapes = lora_shapes(model)
    for flag, expected in (("train_mlp", mlp), ("train_attn", attn), ("train_unembed", unembed)):
        flags = {"train_attn": False, "train_mlp": False, "train_unembed": False, flag: True}
        lora = fresh_adapter(LoraSpec(1, 0, **flags), shapes, torch.device("meta"))
        assert sum(tensor.numel() for _, tensor in lora.parameters()) == expected


def test_a8_parameters_per_rank_of_mixtures() -> None:
    """A8: Qwen3-30B-A3B from a model without storage, and gpt-oss-20b from its sizes; both show the layout of A10."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            Qwen3MoeConfig(
                vocab_size=151936,
                hidden_size=2048,
                intermediate_size=6144,
                moe_intermediate_size=768,
                num_hidden_layers=48,
                num_attention_heads=32,
                num_key_value_heads=4,
                head_dim=128,
                num_experts=128,
                num_experts_per_tok=8,
            )
        )
    lora = fresh_adapter(
        LoraSpec(1, 0, train_attn=False, train_unembed=False), lora_shapes(model), torch.device("meta")
    )
    assert sum(tensor.numel() for _, tensor in lora.parameters()) == 14_450_688
    sizes = [factor for shape in expert_shapes(32, 2880, 2880).values() for factor in shape.factors(1)]
    assert 24 * sum(math.prod(size) for size in sizes) == 6_842_880


def test_a2_a4_stacks_of_experts() -> None:
    """A2, A10: each A is uniform on +-1/sqrt(in), an expert's like another's but not the same; B = 0. A4: by name."""
    shapes = {f"model.layers.0.mlp.experts.{n}": shape for n, shape in expert_shapes(5, 64, 400).items()}
    lora = fresh_adapter(LoraSpec(8, seed=3), shapes, CPU)
    stack = lora.a["model.layers.0.mlp.experts.w2"]
    assert stack.shape == (5, 8, 400)
    for one in stack * math.sqrt(400):
        assert 0.98 < float(one.abs().max()) <= 1
        assert float(one.std()) == pytest.approx(0.577, abs=0.02)
    assert not torch.equal(stack[0], stack[1])
    assert lora.a["model.layers.0.mlp.experts.w1"].shape == (1, 8, 64)
    assert not any(b.any() for b in lora.b.values())
    assert list(fresh_adapter(LoraSpec(8, seed=3, train_mlp=False), shapes, CPU).a) == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_of_several_adapters(dtype: torch.dtype) -> None:
    """B6 in one layer: each row gets its own adapter, the same with a graph and without one (G5)."""
    generator = torch.Generator().manual_seed(0)
    base = nn.Linear(6, 5).to(dtype).requires_grad_(False)
    routing = Routing()
    layer = LoraLinear(base, "layer", routing)

    def random(rank: int) -> Adapter:
        a, b = torch.randn(rank, 6, generator=generator), torch.randn(5, rank, generator=generator)
        return adapter(a.tolist(), b.tolist())

    one, two = random(3), random(1)
    x = torch.randn(4, 7, 6, generator=generator).to(dtype).requires_grad_()
    rows = [one, one, None, two]
    with routing.use(rows):
        y = layer(x)
        with torch.no_grad():
            plain = layer(x)
    assert torch.equal(y, plain)
    up = torch.randn(4, 7, 5, generator=generator).to(dtype)
    dx, da = torch.autograd.grad(y, [x, one.a["layer"]], up)
    for row, lora in enumerate(rows):
        weight = base.weight.double()
        if lora is not None:
            weight = weight + (32 / lora.spec.rank) * (lora.b["layer"] @ lora.a["layer"]).detach().double()
        tolerance = {"rtol": 1e-5, "atol": 1e-4} if dtype is torch.float32 else {"rtol": 0.05, "atol": 1.5}
        np.testing.assert_allclose(
            y[row].detach().double(), x[row].detach().double() @ weight.t() + base.bias.double(), **tolerance
        )
        np.testing.assert_allclose(dx[row].double(), up[row].double() @ weight, **tolerance)
    assert da.dtype == torch.float32


def test_shapes_of_a_real_config(tmp_path: Path) -> None:
    """Names are the base model's own, in its order, the head last."""
    config = Qwen3Config(
        vocab_size=50, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2, head_dim=8
    )
    config.save_pretrained(tmp_path)
    names = list(lora_shapes(AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path))))
    leaves = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head"]
    assert [name.rpartition(".")[2] for name in names] == leaves
    assert names[0] == "model.layers.0.self_attn.q_proj"

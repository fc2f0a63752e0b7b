"""`--quantize nf4`: where it is refused, and what memory is counted for it."""

from __future__ import annotations

import importlib.util
import json
import math
import struct
from pathlib import Path

import pytest

from openrl.app import worker_spec
from openrl.backends import registry
from openrl.errors import ModelError, SettingsError
from openrl.models import info
from openrl.settings import resolve
from openrl.types import ModelInfo
from openrl_cli.selftest import self_test

GIB = 1 << 30


def test_it_reaches_the_worker(tmp_path: Path) -> None:
    settings = resolve({"data_dir": str(tmp_path), "engine.backend": "cuda"}, {"OPENRL_QUANTIZE": "nf4"}, None).settings
    assert worker_spec(settings, settings.models[0]).quantize == "nf4"
    assert resolve({"data_dir": str(tmp_path)}, {}, None).settings.engine.quantize == "none"


def test_legal_values_are_named() -> None:
    with pytest.raises(SettingsError, match=r"engine\.quantize.*'int8'.*none.*nf4"):
        resolve({"engine.quantize": "int8"}, {}, None)


@pytest.mark.parametrize(
    ("beside", "reason"),
    [
        ({"engine.backend": "mps"}, r"PyTorch engine .*'mps'"),
        ({"engine.backend": "remote"}, "does nothing"),
        ({"engine.sampler": "vllm", "engine.backend": "cuda"}, "vLLM"),
        ({"engine.vllm_python": "/opt/python"}, "vLLM"),
    ],
)
def test_what_it_does_not_go_with_stops_the_start(beside: dict[str, object], reason: str) -> None:
    with pytest.raises(SettingsError, match=f"engine.quantize 'nf4'.*{reason}"):
        resolve({"engine.quantize": "nf4", **beside}, {}, None)


def test_a_machine_whose_backend_is_mlx_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "choices", lambda _: ("mps",))
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: object())
    registry.check_backend("auto")
    with pytest.raises(ModelError, match=r"for the PyTorch engine; here backend 'auto' is 'mps'") as caught:
        registry.check_backend("auto", "nf4")
    assert "mlx-community" in caught.value.hint


def test_the_self_test_expects_whole_weights() -> None:
    settings = resolve({"engine.quantize": "nf4", "engine.backend": "cpu"}, {}, None).settings
    with pytest.raises(SettingsError, match="--self-test expects what whole weights give"):
        self_test(settings, [], None)


@pytest.mark.parametrize("absent", ["bitsandbytes", "accelerate"])
def test_a_missing_package_is_noticed_before_anything_is_loaded(absent: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == absent else object())
    registry.check_backend("cpu")
    with pytest.raises(ModelError, match=f"not installed: {absent}") as caught:
        registry.check_backend("cpu", "nf4")
    assert "pip install 'openrl[quantize]'" in caught.value.hint


def test_memory_counts_four_bits_of_the_projections_only(tmp_path: Path) -> None:
    """Half a byte, an eighth of a bit for scales and a little; embeddings and norms as they are computed with."""
    shapes = {
        "model.embed_tokens.weight": [1000, 64],
        "model.layers.0.self_attn.q_proj.weight": [64, 64],
        "model.layers.0.self_attn.q_norm.weight": [64],
        "model.layers.11.mlp.down_proj.weight": [64, 256],
        "lm_head.weight": [1000, 64],
    }
    tensors = {name: {"dtype": "BF16", "shape": shape, "data_offsets": [0, 0]} for name, shape in shapes.items()}
    header = json.dumps(tensors).encode()
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
    config = {"model_type": "llama", "vocab_size": 1000, "max_position_embeddings": 512}
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = info.describe(tmp_path)
    assert found.projections == 64 * 64 + 64 * 256
    whole = 2 * (2 * 64_000 + 64)
    needed = info.memory_needed(found, "bfloat16", "nf4") - info.RUNTIME
    assert needed == whole + math.ceil(found.projections * (0.5 + 1 / 64 + 4 / (64 * 256)))


def test_what_fits_in_four_bits_is_let_in() -> None:
    """As `openrl serve` asks before loading, and the daemon before another model is loaded beside."""
    big = ModelInfo(vocab_size=1, max_context=1, max_lora_rank=1, parameters=8 * GIB, family="x", projections=7 * GIB)
    info.check_fits("big", big, "bfloat16", 7 * GIB, "nf4")
    with pytest.raises(ModelError, match=r"17\.0 GiB in bfloat16"):
        info.check_fits("big", big, "bfloat16", 7 * GIB)
    with pytest.raises(ModelError, match=r"8\.6 GiB in nf4 and float32, but only 7\.0 GiB") as caught:
        info.check_fits("big", big, "auto", 7 * GIB, "nf4")
    assert "--dtype bfloat16" in caught.value.hint

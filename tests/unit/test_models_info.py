"""What a folder says of itself without being loaded, and whether it fits into memory."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest

from openrl.errors import ModelError
from openrl.models import info
from openrl.types import ModelInfo

CONFIG = {"model_type": "llama", "vocab_size": 100, "max_position_embeddings": 512}


def model(folder: Path, config: dict[str, Any], *shapes: list[int]) -> Path:
    """A folder with a config and a safetensors file that has only a header."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    tensors = {f"t{i}": {"dtype": "BF16", "shape": shape, "data_offsets": [0, 0]} for i, shape in enumerate(shapes)}
    header = json.dumps({"__metadata__": {"format": "pt"}, **tensors}).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
    return folder


def test_describe(tmp_path: Path) -> None:
    found = info.describe(model(tmp_path, CONFIG, [100, 8], [8], []))
    assert found == ModelInfo(vocab_size=100, max_context=512, max_lora_rank=256, parameters=809, family="llama")


def test_the_text_part_of_a_multimodal_config_counts(tmp_path: Path) -> None:
    found = info.describe(model(tmp_path, {"model_type": "gemma3", "text_config": CONFIG}, [2]))
    assert (found.family, found.vocab_size) == ("llama", 100)


@pytest.mark.parametrize("missing", CONFIG)
def test_a_config_that_is_no_language_model_is_refused(tmp_path: Path, missing: str) -> None:
    config = {key: value for key, value in CONFIG.items() if key != missing}
    with pytest.raises(ModelError, match=missing):
        info.describe(model(tmp_path, config, [2]))


def test_pickles_are_never_weights(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(ModelError, match="safetensors"):
        info.describe(tmp_path)


@pytest.mark.parametrize("content", [b"", b"\x01", struct.pack("<Q", 5) + b"{", struct.pack("<Q", 5) + b"hello"])
def test_a_torn_file_is_named(tmp_path: Path, content: bytes) -> None:
    model(tmp_path, CONFIG)
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(ModelError, match=r"model\.safetensors is not a safetensors file"):
        info.describe(tmp_path)


def test_memory_counts_the_dtype() -> None:
    tiny = ModelInfo(vocab_size=1, max_context=1, max_lora_rank=1, parameters=1 << 30, family="x")
    gib = 1 << 30
    assert info.memory_needed(tiny, "bfloat16") == 2 * gib + info.RUNTIME
    assert info.memory_needed(tiny, "float32") == info.memory_needed(tiny, "auto") == 4 * gib + info.RUNTIME


def test_what_does_not_fit_is_refused_with_the_numbers() -> None:
    big = ModelInfo(vocab_size=1, max_context=1, max_lora_rank=1, parameters=7 << 30, family="x")
    gib = 1 << 30
    info.check_fits("big", big, "float32", 30 * gib)
    with pytest.raises(
        ModelError, match=r"7,516 million weights .* 29\.0 GiB in float32, but only 20\.0 GiB"
    ) as caught:
        info.check_fits("big", big, "auto", 20 * gib)
    assert "--dtype bfloat16" in caught.value.hint
    with pytest.raises(ModelError, match=r"15\.0 GiB in bfloat16") as caught:
        info.check_fits("big", big, "bfloat16", 14 * gib)
    assert "smaller model" in caught.value.hint


def test_free_memory_is_known() -> None:
    assert 0 < info.available_memory() < 1 << 50

"""GGUF to a Hugging Face folder, with tiny random models written as llama.cpp writes them."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

from openrl.errors import ModelError
from openrl.models import catalog, convert, info, manifest, prepare, store
from openrl.models.progress import Progress
from openrl.types import ModelSpec
from support import gguf_files, tiny

# Where torch can neither be imported nor found: a GGUF file becomes a folder, from which MLX, if it is there, samples.
WITHOUT_TORCH = """
import sys
sys.modules["torch"] = None
from pathlib import Path
from openrl.models import convert
gguf, target = map(Path, sys.argv[1:3])
convert.convert(gguf, target, "local/tiny", str(gguf), lambda _step: None)
if sys.argv[3] == "mlx":
    import numpy as np
    from openrl.backends.base import BackendSpec, SampleJob
    from openrl.backends.mps import open_backend
    from openrl.types import SamplePayload, SamplingParams
    sampler = open_backend(BackendSpec(target, "auto", "float32", 1, 256, 4, 256)).sample
    params = SamplingParams(max_tokens=4, temperature=0.0, stop=("no such text",))
    sampler.add(SampleJob("s:1", SamplePayload(np.arange(3, 9, dtype=np.int32), params=params), None))
    while not (ended := sampler.step()):
        pass
    print(*ended[0][1].sequences[0].tokens)
"""

FAMILIES = {
    "llama": {"head_dim": 16},
    "llama 3.1": {
        "tied": False,
        "head_dim": 16,
        "max_position_embeddings": 32768,
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 500000.0,
            "factor": 32.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    },
    "qwen2": {},
    "qwen3": {"head_dim": 16, "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0}},
    "gemma2": {},
    "gemma3": {
        "num_hidden_layers": 7,
        "layer_types": ["sliding_attention"] * 5 + ["full_attention", "sliding_attention"],
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "rope_theta": 1000000.0, "factor": 8.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        },
    },
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A random llama whose weights bfloat16 holds exactly."""
    folder = tiny.build(tmp_path_factory.mktemp("llama"))
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).float()


@pytest.fixture(scope="module")
def gguf(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return gguf_files.write(tmp_path_factory.mktemp("gguf") / "tiny.gguf", model)


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("data")


@pytest.fixture(scope="module")
def converted(gguf: Path, data_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    steps: list[Progress] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path_factory.mktemp("hub")))
        folder = prepare.prepare(catalog.resolve(str(gguf)), data_dir, steps.append)
    converting = [(step.done, step.total) for step in steps if step.stage == "converting"]
    assert converting == sorted(converting)
    assert converting[0][0] == 0
    assert converting[-1][0] == converting[-1][1] == sum(map(_size, folder.glob("*.safetensors")))
    return folder


def test_the_converted_model_computes_the_same(model: Any, converted: Path) -> None:
    ours = AutoModelForCausalLM.from_pretrained(converted, dtype=torch.float32)
    tokens = torch.arange(1, 40).reshape(1, -1)
    with torch.no_grad():
        torch.testing.assert_close(ours(tokens).logits, model(tokens).logits, rtol=1e-4, atol=1e-4)
    assert ours.lm_head.weight.data_ptr() == ours.model.embed_tokens.weight.data_ptr()


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_come_back_to_the_bit_and_configs_in_sense(family: str, tmp_path: Path) -> None:
    architecture, changes = family.split()[0], FAMILIES[family]
    folder = tiny.build_uneven(tmp_path / "original", architecture, pad_token_id=0, unk_token_id=0, **changes)
    original: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    source = gguf_files.write(tmp_path / "x.gguf", original.float(), architecture)
    convert.convert(source, tmp_path / "out", "local/x", "x", lambda _step: None)
    read: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    wanted, found = original.state_dict(), read.state_dict()
    assert wanted.keys() == found.keys()
    for name, weight in wanted.items():
        torch.testing.assert_close(found[name], weight.bfloat16(), rtol=0, atol=0, msg=name)
    assert _sense(read.config) == _sense(original.config)


def _sense(config: Any) -> dict[str, Any]:
    """A config without what does not change what is computed."""
    passing = (
        "_name_or_path",
        "transformers_version",
        "dtype",
        "initializer_range",
        "architectures",
        "max_window_layers",
    )
    return {key: value for key, value in config.to_dict().items() if key not in passing}


def test_packed_numbers_are_unpacked(model: Any, tmp_path: Path) -> None:
    source = gguf_files.write(tmp_path / "x.gguf", model, packed=GGMLQuantizationType.Q8_0)
    convert.convert(source, tmp_path / "out", "local/x", "x", lambda _step: None)
    with safe_open(tmp_path / "out" / "model.safetensors", "pt") as opened:
        for name in ("model.embed_tokens.weight", "model.layers.1.self_attn.k_proj.weight"):
            weight = model.state_dict()[name]
            close = weight.abs().amax(1, keepdim=True) / 127  # of the 255 steps of each row, and bf16's own rounding
            assert ((opened.get_tensor(name).float() - weight).abs() <= close).all(), name


@pytest.mark.parametrize("broken", ["end", "header", "architecture", "unknown"])
def test_files_that_cannot_be_read_are_refused_in_words(broken: str, model: Any, gguf: Path, tmp_path: Path) -> None:
    content = gguf.read_bytes()
    damage = {
        "end": content[:-64],
        "header": content[:100],
        "architecture": content.replace(b"\x05\0\0\0\0\0\0\0llama", b"\x05\0\0\0\0\0\0\0falco", 1),
        "unknown": content,
    }
    source = tmp_path / "x.gguf"
    source.write_bytes(damage[broken])
    if broken == "unknown":
        gguf_files.write(source, model, "llama", extra={"blk.0.attn_sinks.weight": model.model.norm.weight})
    wanted = {
        "end": "not complete",
        "header": "ends|buffer",
        "architecture": "'falco'.*\n?.*llama, qwen2, qwen3, gemma2, gemma3",
        "unknown": "no place for .*attn_sinks",
    }
    with pytest.raises(ModelError) as raised:
        convert.convert(source, tmp_path / "out", "local/x", "x", lambda _step: None)
    assert re.search(wanted[broken], f"{raised.value} {raised.value.hint}"), raised.value
    assert not (tmp_path / "out").exists()


def test_torch_is_not_needed_to_convert_nor_by_mlx(gguf: Path, converted: Path, tmp_path: Path) -> None:
    engine = "mlx" if importlib.util.find_spec("mlx_lm") else "none"
    command = [sys.executable, "-c", WITHOUT_TORCH, str(gguf), str(tmp_path / "out"), engine]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    for name in ("model.safetensors", "config.json", "tokenizer.json"):
        assert (tmp_path / "out" / name).read_bytes() == (converted / name).read_bytes()
    if engine == "mlx":
        twin: Any = AutoModelForCausalLM.from_pretrained(converted, dtype=torch.float32)
        greedy = twin.generate(torch.arange(3, 9)[None], max_new_tokens=4, do_sample=False, eos_token_id=None)
        assert done.stdout.split() == [str(token) for token in greedy[0, 6:].tolist()]


def test_the_folder_describes_itself(converted: Path) -> None:
    found = info.describe(converted)
    assert (found.family, found.vocab_size, found.max_context) == ("llama", tiny.VOCAB, 256)
    config = json.loads((converted / "config.json").read_text())
    assert config["rms_norm_eps"] == 1e-6  # a float32 in the GGUF file
    assert config["dtype"] == "bfloat16"
    assert "quantization_config" not in config
    assert "_model_name_or_path" not in config
    assert json.loads((converted / "generation_config.json").read_text())["eos_token_id"] == 2


def test_the_tokenizer_is_one_that_transformers_4_and_5_know(converted: Path) -> None:
    config = json.loads((converted / "tokenizer_config.json").read_text())
    assert config["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert config["model_max_length"] == 256
    tokenizer = AutoTokenizer.from_pretrained(converted)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (1, 2)
    assert tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False) == "hi"


def test_the_manifest_names_source_and_files(gguf: Path, converted: Path) -> None:
    known = manifest.read(converted)
    assert known is not None
    assert known.served_name == "local/tiny"
    assert (known.origin.path, known.origin.size) == (str(gguf), gguf.stat().st_size)
    assert set(known.files) == {path.name for path in converted.iterdir()} - {manifest.FILE}


def test_a_second_start_finds_the_folder(gguf: Path, converted: Path, data_dir: Path) -> None:
    spec = catalog.resolve(str(gguf))
    assert store.locate(spec, data_dir) == converted
    assert (spec.name, spec.source) in [(model.spec.name, model.spec.source) for model in store.stored(data_dir)]


def test_a_torn_folder_or_a_changed_file_is_made_anew(model: Any, tmp_path: Path) -> None:
    source = gguf_files.write(tmp_path / "tiny.gguf", model)
    spec = catalog.resolve(str(source))
    target = store.converted_folder(spec, tmp_path)
    target.parent.mkdir()
    convert.convert(source, target, spec.name, spec.source, lambda _step: None)
    assert store.locate(spec, tmp_path) == target
    (target / "tokenizer.json").write_text("")
    assert store.locate(spec, tmp_path) is None
    convert.convert(source, target, spec.name, spec.source, lambda _step: None)
    source.write_bytes(source.read_bytes() + b"\0")
    assert store.locate(spec, tmp_path) is None


def test_missing_weights_are_named(model: Any, tmp_path: Path) -> None:
    source = gguf_files.write(tmp_path / "torn.gguf", model, without="blk.1.ffn_up.weight")
    with pytest.raises(ModelError, match=r"layers\.1\.mlp\.up_proj"):
        convert.convert(source, tmp_path / "out", "local/torn", str(source), lambda _step: None)
    assert not (tmp_path / "out").exists()


def test_a_file_that_is_no_gguf_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.gguf").write_bytes(b"no")
    with pytest.raises(ModelError, match="cannot be converted"):
        convert.convert(tmp_path / "x.gguf", tmp_path / "out", "local/x", "x", lambda _step: None)
    assert [path.name for path in tmp_path.iterdir()] == ["x.gguf"]


def test_removing_leaves_the_users_file(model: Any, tmp_path: Path) -> None:
    source = gguf_files.write(tmp_path / "tiny.gguf", model)
    spec = catalog.resolve(str(source))
    target = store.converted_folder(spec, tmp_path)
    target.parent.mkdir()
    convert.convert(source, target, spec.name, spec.source, lambda _step: None)
    freed = store.remove(store.find(str(source), tmp_path), tmp_path)
    assert freed > 0
    assert source.exists()
    assert not target.exists()


def test_a_folder_is_used_as_it_is(converted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    spec = ModelSpec("local/name", str(converted), ("Org/Alias",))
    assert prepare.prepare(spec, tmp_path, lambda _step: None) == converted
    assert {path.name for path in (tmp_path / "hub").glob("models--*")} == {"models--local--name", "models--Org--Alias"}
    prepare.check_memory(converted, "float32")
    with pytest.raises(ModelError, match="your own folder"):
        store.remove(store.find(str(converted), tmp_path), tmp_path)


def _size(path: Path) -> int:
    """Bytes of the numbers in a safetensors file."""
    with path.open("rb") as file:
        return path.stat().st_size - 8 - int.from_bytes(file.read(8), "little")

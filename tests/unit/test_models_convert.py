"""GGUF to a Hugging Face folder, with a tiny random llama written as llama.cpp writes it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGUFWriter, TokenType
from transformers import AutoModelForCausalLM, AutoTokenizer

from openrl.errors import ModelError
from openrl.models import catalog, convert, info, manifest, prepare, store
from openrl.models.progress import Progress
from openrl.types import ModelSpec
from support import tiny

WORDS = ["<unk>", "<s>", "</s>", *(chr(33 + i) for i in range(tiny.VOCAB - 4)), "ab"]
LAYER_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def permuted(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows of q and k in llama.cpp's order: its rotary embedding pairs neighbours, Hugging Face's pairs halves."""
    rows, columns = weight.shape
    return weight.reshape(heads, 2, rows // heads // 2, columns).swapaxes(1, 2).reshape(rows, columns)


def write_gguf(path: Path, model: Any, *, without: str = "") -> Path:
    config = model.config
    writer = GGUFWriter(str(path), "llama")
    writer.add_name("a title")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(WORDS)
    writer.add_token_types(
        [TokenType.CONTROL if word.startswith("<") and len(word) > 1 else TokenType.NORMAL for word in WORDS]
    )
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_chat_template("{{ messages[0]['content'] }}")
    for name, weight in tensors(model).items():
        if name != without:
            writer.add_tensor(name, weight.contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def tensors(model: Any) -> dict[str, torch.Tensor]:
    config, weights = model.config, model.state_dict()
    named = {
        "token_embd.weight": weights["model.embed_tokens.weight"],
        "output_norm.weight": weights["model.norm.weight"],
    }
    for layer in range(config.num_hidden_layers):
        for theirs, ours in LAYER_NAMES.items():
            weight = weights[f"model.layers.{layer}.{theirs}.weight"]
            heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}.get(ours)
            named[f"blk.{layer}.{ours}.weight"] = permuted(weight, heads) if heads else weight
    return named


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A random llama whose weights bfloat16 holds exactly."""
    folder = tiny.build(tmp_path_factory.mktemp("llama"))
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).float()


@pytest.fixture(scope="module")
def gguf(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf", model)


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("data")


@pytest.fixture(scope="module")
def converted(gguf: Path, data_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    steps: list[Progress] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path_factory.mktemp("hub")))
        folder = prepare.prepare(catalog.resolve(str(gguf)), data_dir, steps.append)
    assert [step.done for step in steps if step.stage == "converting"] == [0, 2, 3, 4, 5]
    return folder


def test_the_converted_model_computes_the_same(model: Any, converted: Path) -> None:
    ours = AutoModelForCausalLM.from_pretrained(converted, dtype=torch.float32)
    tokens = torch.arange(1, 40).reshape(1, -1)
    with torch.no_grad():
        torch.testing.assert_close(ours(tokens).logits, model(tokens).logits, rtol=1e-4, atol=1e-4)
    assert ours.lm_head.weight.data_ptr() == ours.model.embed_tokens.weight.data_ptr()


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
    source = write_gguf(tmp_path / "tiny.gguf", model)
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
    source = write_gguf(tmp_path / "torn.gguf", model, without="blk.1.ffn_up.weight")
    with pytest.raises(ModelError, match=r"layers\.1\.mlp\.up_proj"):
        convert.convert(source, tmp_path / "out", "local/torn", str(source), lambda _step: None)
    assert not (tmp_path / "out").exists()


def test_a_file_that_is_no_gguf_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.gguf").write_bytes(b"no")
    with pytest.raises(ModelError, match="cannot be converted"):
        convert.convert(tmp_path / "x.gguf", tmp_path / "out", "local/x", "x", lambda _step: None)
    assert [path.name for path in tmp_path.iterdir()] == ["x.gguf"]


def test_removing_leaves_the_users_file(model: Any, tmp_path: Path) -> None:
    source = write_gguf(tmp_path / "tiny.gguf", model)
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

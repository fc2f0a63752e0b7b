"""Adapters that leave and come: merged folders, archives and PEFT's own folders are the same function (A9, A14-A17)."""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.numpy import load_file
from transformers import AutoModelForCausalLM

from openrl.checkpoints.archive import archive
from openrl.checkpoints.foreign import read_foreign, write_training
from openrl.checkpoints.peft import read_adapter
from openrl.checkpoints.tensor_file import read_header
from openrl.errors import BadRequest
from openrl.models import linear
from openrl.models.merge import merge
from openrl.types import AdamParams, Array, LoraSpec
from support import tiny
from support.training import RUN, ce, create, forward, forward_backward, trainer

pytestmark = [  # PEFT's own, while it makes adapters
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers`:UserWarning"),
    pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`:UserWarning"),
]
TOKENS = ce(24, seed=5).data[0]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    into = tmp_path / "checkpoint"
    into.mkdir()
    return into


def logprobs_of(model: torch.nn.Module) -> Array:
    """What a transformers model gives for the targets of TOKENS, float32 [N]."""
    tokens = torch.from_numpy(TOKENS.tokens.astype(np.int64))[None]
    with torch.no_grad():
        logits = model(input_ids=tokens).logits[0].float()
    targets = torch.from_numpy(TOKENS.inputs["target_tokens"])
    return torch.log_softmax(logits, -1).gather(1, targets[:, None])[:, 0].numpy()


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3"])
def test_a9_a16_merged_folder_is_the_trained_model(
    model_folder: Callable[..., Path], family: str, tied: bool, folder: Path, tmp_path: Path
) -> None:
    """A9, A16: logprobs of the merged model are the server's; a tied model with a trained head is untied exactly."""
    base = model_folder(family, tied=tied)
    held = trainer(base)
    create(held, tmp_path)
    held.save(RUN, folder, optimizer=False, gradients=False)
    merged = tmp_path / "merged"
    merged.mkdir()
    merge(base, read_adapter(folder), merged)
    model = AutoModelForCausalLM.from_pretrained(merged, dtype=torch.float32)
    ours = forward(held, ce(24, seed=5)).logprobs[0]
    assert np.abs(logprobs_of(model) - ours).max() < 2e-5
    plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    assert np.abs(logprobs_of(plain) - ours).max() > 1e-2
    assert not model.config.tie_word_embeddings
    embeddings = model.get_input_embeddings().weight
    assert torch.equal(embeddings, plain.get_input_embeddings().weight), "A9: the input side is not trained"


def test_merged_without_the_head_stays_tied(model_folder: Callable[..., Path], folder: Path, tmp_path: Path) -> None:
    base = model_folder("llama", tied=True)
    held = trainer(base)
    create(held, tmp_path, spec=LoraSpec(rank=4, seed=7, train_unembed=False))
    held.save(RUN, folder, optimizer=False, gradients=False)
    merged = tmp_path / "merged"
    merged.mkdir()
    merge(base, read_adapter(folder), merged)
    assert json.loads((merged / "config.json").read_text())["tie_word_embeddings"] is True
    assert "lm_head.weight" not in load_file(merged / "model.safetensors")
    model = AutoModelForCausalLM.from_pretrained(merged, dtype=torch.float32)
    assert np.abs(logprobs_of(model) - forward(held, ce(24, seed=5)).logprobs[0]).max() < 2e-5


def test_merged_shards_keep_their_index(model_folder: Callable[..., Path], folder: Path, tmp_path: Path) -> None:
    base = tmp_path / "sharded"
    AutoModelForCausalLM.from_pretrained(model_folder("llama")).save_pretrained(base, max_shard_size="40KB")
    assert len(list(base.glob("*.safetensors"))) > 2
    held = trainer(base)
    create(held, tmp_path)
    held.save(RUN, folder, optimizer=False, gradients=False)
    merged = tmp_path / "merged"
    merged.mkdir()
    merge(base, read_adapter(folder), merged)
    model = AutoModelForCausalLM.from_pretrained(merged, dtype=torch.float32)
    assert np.abs(logprobs_of(model) - forward(held, ce(24, seed=5)).logprobs[0]).max() < 2e-5


def test_a15_a17_archive_round_trip(model_folder: Callable[..., Path], folder: Path, tmp_path: Path) -> None:
    """A14, A15, A17: Tinker's names, the same bytes at each download, values bit-equal, and importable again."""
    base = model_folder("qwen3")
    held = trainer(base)
    create(held, tmp_path)
    held.save(RUN, folder, optimizer=True, gradients=False)
    rope = archive(folder)
    data = b"".join(rope.read(0, rope.size))
    assert len(data) == rope.size
    assert b"".join(archive(folder).read(0, rope.size)) == data
    assert b"".join(rope.read(700, 1900)) == data[700:1900], "any part can be read alone"
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        assert tar.getnames() == ["adapter_config.json", "adapter_model.safetensors", "checkpoint_complete"]
        assert all(member.isreg() and member.mtime == 0 for member in tar.getmembers())
        assert tar.getmember("checkpoint_complete").size == 0
        unpacked = tmp_path / "unpacked"
        tar.extractall(unpacked, filter="data")
    config = json.loads((unpacked / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"]) == (4, 32)
    assert "unembed_tokens" in config["target_modules"]
    tensors = load_file(unpacked / "adapter_model.safetensors")
    for name, value in held.parameters(RUN).items():
        key = f"base_model.model.{name.replace('lm_head', 'model.unembed_tokens')}.weight"
        assert tensors.pop(key).tobytes() == value.tobytes()
    assert not tensors
    again = read_foreign(unpacked, linear.Layers(base), 256)
    assert {name: value.tobytes() for name, value in again.tensors.items()} == {
        name: value.tobytes() for name, value in held.parameters(RUN).items()
    }


@pytest.mark.parametrize("alpha", [32, 16, 7])
def test_a_peft_adapter_imports_as_the_same_function(
    model_folder: Callable[..., Path], folder: Path, tmp_path: Path, alpha: int
) -> None:
    """An adapter that PEFT made and saved, of another alpha and on some layers only, gives PEFT's own logprobs here;
    and it can be trained on, in those layers alone."""
    base = model_folder("llama", tied=True)
    torch.manual_seed(3)
    config = LoraConfig(r=4, lora_alpha=alpha, target_modules=["q_proj", "v_proj", "down_proj"], task_type="CAUSAL_LM")
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), config)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(tmp_path / "peft")
    adapter = read_foreign(tmp_path / "peft", linear.Layers(base), 256)
    assert adapter.spec == LoraSpec(rank=4, seed=0, train_attn=True, train_mlp=True, train_unembed=False)
    write_training(folder, adapter, "tiny/model")
    held = trainer(base)
    held.load(RUN, folder, optimizer=True)
    theirs = logprobs_of(model.eval())
    assert np.abs(theirs - forward(held, ce(24, seed=5)).logprobs[0]).max() < 2e-5
    forward_backward(held, ce(24, seed=5))
    held.optim_step(RUN, AdamParams(learning_rate=1e-2))
    after = held.parameters(RUN)
    assert not after["model.layers.0.self_attn.k_proj.lora_A"].any()
    assert not np.array_equal(
        after["model.layers.0.self_attn.q_proj.lora_B"], adapter.tensors["model.layers.0.self_attn.q_proj.lora_B"]
    )


def test_bfloat16_adapters_are_read(model_folder: Callable[..., Path], tmp_path: Path) -> None:
    base = model_folder("llama")
    config = LoraConfig(r=2, lora_alpha=32, target_modules=["q_proj", "lm_head"])
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), config)
    model.to(torch.bfloat16).save_pretrained(tmp_path / "peft")
    adapter = read_foreign(tmp_path / "peft", linear.Layers(base), 256)
    expected = dict(model.named_parameters())
    key = "base_model.model.model.layers.1.self_attn.q_proj.lora_A.default.weight"
    found = adapter.tensors["model.layers.1.self_attn.q_proj.lora_A"]
    assert found.dtype == np.float32
    assert np.array_equal(found, expected[key].detach().float().numpy())
    assert adapter.spec.train_unembed
    assert "base_model.model.lm_head.base_layer.weight" in load_keys(tmp_path / "peft"), "PEFT's copy of the base"
    other = tiny.build(tmp_path / "other", "llama", seed=1)
    with pytest.raises(BadRequest, match="not the base model's"):
        read_foreign(tmp_path / "peft", linear.Layers(other), 256)


def load_keys(folder: Path) -> set[str]:
    return set(read_header(folder / "adapter_model.safetensors").entries)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"use_rslora": True}, "rank-stabilised"),
        ({"use_dora": True}, "DoRA"),
        ({"bias": "all"}, "biases"),
        ({"peft_type": "LOHA"}, "only LORA"),
        ({"rank_pattern": {"q_proj": 8}}, "different ranks"),
        ({"r": 512}, "1 to 256"),
        ({"lora_alpha": 0}, "positive"),
    ],
)
def test_what_cannot_be_imported_exactly_is_refused(
    model_folder: Callable[..., Path], folder: Path, tmp_path: Path, change: dict[str, object], words: str
) -> None:
    base = model_folder("llama")
    held = trainer(base)
    create(held, tmp_path)
    held.save(RUN, folder, optimizer=False, gradients=False)
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps({**config, **change}))
    with pytest.raises(BadRequest, match=words):
        read_foreign(folder, linear.Layers(base), 256)


def test_an_adapter_of_another_model_is_refused(
    model_folder: Callable[..., Path], folder: Path, tmp_path: Path
) -> None:
    held = trainer(model_folder("llama"))
    create(held, tmp_path)
    held.save(RUN, folder, optimizer=False, gradients=False)
    shallow, wide = tiny.config("llama"), tiny.config("llama")
    shallow.num_hidden_layers = 2
    wide.intermediate_size = 64
    for config, words in ((shallow, "does not have"), (wide, "needs")):
        AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / words)
        with pytest.raises(BadRequest, match=words):
            read_foreign(folder, linear.Layers(tmp_path / words), 256)

"""A random model of 1.6 million parameters that passes for the ones that recipes name.

Its tokenizer is SmolLM2's with two unused special tokens renamed to `<think>` and `</think>`: the renderers of Qwen 3.5
want each of them to be one token. Ids stay what they were. It checks plumbing, not learning.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

RENAMED = {"<jupyter_start>": "<think>", "<jupyter_text>": "</think>"}
_VOCAB, _CONTEXT, _BOS, _EOS = 49152, 32768, 1, 2
_TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


def build(folder: Path, tokenizer_from: Path) -> Path:
    """Write the model into `folder`, which is returned; `tokenizer_from` is a folder with SmolLM2's tokenizer."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=_VOCAB,
        hidden_size=32,  # LoRA of rank 32, the cookbook's default, needs no matrix to be narrower
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=_CONTEXT,
        bos_token_id=_BOS,
        eos_token_id=_EOS,
        pad_token_id=_EOS,
        initializer_range=0.5,  # large, so that a random model has opinions and mistakes show
        tie_word_embeddings=True,
    )
    model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(folder)
    for name in _TOKENIZER:
        shutil.copyfile(tokenizer_from / name, folder / name)
    _rename(folder / "tokenizer.json")
    return folder


def _rename(file: Path) -> None:
    tokenizer = json.loads(file.read_text())
    for token in tokenizer["added_tokens"]:
        token["content"] = RENAMED.get(token["content"], token["content"])
    vocab = tokenizer["model"]["vocab"]
    tokenizer["model"]["vocab"] = {RENAMED.get(token, token): index for token, index in vocab.items()}
    file.write_text(json.dumps(tokenizer, ensure_ascii=False))

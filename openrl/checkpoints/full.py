"""Checkpoints of runs that train all parameters: a Hugging Face folder (F5), beside it what training resumes from.

    config.json, model.safetensors, tokenizer files       the model; all of it for sampling and for export
    optimizer.safetensors                                  m.<parameter>, v.<parameter> and t (O11)
    gradients.safetensors                                  the accumulator, in recovery snapshots alone

Tensors have the names that transformers gives the model's parameters; tied embeddings are stored once (F4).
"""

from __future__ import annotations

from pathlib import Path

from openrl.checkpoints.peft import CONFIG_FILE, GRADIENTS_FILE, OPTIMIZER_FILE
from openrl.errors import BadRequest

MODEL_CONFIG = "config.json"
MODEL_FILE = "model.safetensors"
NEEDED = frozenset({MODEL_CONFIG, MODEL_FILE})
# What else belongs to the model: never to training's state, so that a folder can be handed on without it.
STATE_FILES = frozenset({OPTIMIZER_FILE, GRADIENTS_FILE})
EXTRA_FILES = frozenset(
    {
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "tokenizer.model",
        "special_tokens_map.json",
        "added_tokens.json",
        "vocab.json",
        "vocab.txt",
        "merges.txt",
        "chat_template.jinja",
        "chat_template.json",
    }
)


def is_full(folder: Path) -> bool:
    """Whether a checkpoint's folder holds a whole model, rather than an adapter."""
    return (folder / MODEL_CONFIG).is_file() and not (folder / CONFIG_FILE).exists()


def check_full(folder: Path) -> None:
    """Raise `BadRequest` unless a folder holds a whole model."""
    if (folder / CONFIG_FILE).exists():
        raise BadRequest(
            "the checkpoint is a LoRA adapter; the run trains all parameters.",
            "Load it into a LoRA run of the same base model and rank.",
        )
    for name in sorted(NEEDED):
        if not (folder / name).is_file():
            raise BadRequest(f"the checkpoint has no {name}.")


def model_files(folder: Path) -> list[Path]:
    """The model's own files, config first: what is left out is training's state and our manifest."""
    names = [MODEL_CONFIG, *sorted(EXTRA_FILES), MODEL_FILE]
    return [folder / name for name in names if (folder / name).is_file()]

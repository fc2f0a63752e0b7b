"""GGUF to a Hugging Face folder: weights dequantised to bfloat16 safetensors, tokenizer and config files beside them.

Runs once for each model, in a worker or in `openrl models pull`: torch and transformers are imported here.
"""

from __future__ import annotations

import contextlib
import io
import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as transformers_logging

from openrl.errors import ModelError
from openrl.models import folders, manifest
from openrl.models.manifest import Manifest, Origin
from openrl.models.progress import Progress, Report

_STAGE = "converting"
_STEPS = 5


def convert(gguf: Path, target: Path, served_name: str, source: str, report: Report) -> None:
    """Write the folder `target`, whole or not at all. The caller holds its lock.

    Raises ModelError if transformers cannot read the file, or if weights of the model are missing in it.
    """
    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    # The reader of GGUF files draws a progress bar whatever it is told; ours is the one to be seen.
    with contextlib.redirect_stderr(io.StringIO()), folders.workspace(target) as work:
        out = work / target.name
        out.mkdir()
        # A link in a folder of its own: files that lie beside the user's GGUF file must not be taken for its parts.
        link = work / "source" / "model.gguf"
        link.parent.mkdir()
        link.symlink_to(gguf)
        report(Progress(_STAGE, 0, _STEPS))
        context = _write_model(gguf, link, out, report)
        _write_tokenizer(link, out, context)
        report(Progress(_STAGE, 4, _STEPS))
        origin = Origin(str(gguf), gguf.stat().st_size, gguf.stat().st_mtime_ns, folders.sha256(gguf))
        manifest.write(out, Manifest(served_name, source, origin, manifest.digest(out), time.time()))
        folders.publish(out, target)
    report(Progress(_STAGE, _STEPS, _STEPS))


def _write_model(gguf: Path, link: Path, out: Path, report: Report) -> int:
    """Write weights and configs; returns the context length in tokens."""
    model = _load(gguf, link)
    report(Progress(_STAGE, 2, _STEPS))
    # What was loaded is no longer quantised; with these marks left, save_pretrained refuses.
    vars(model.config).pop("quantization_config", None)
    vars(model).pop("hf_quantizer", None)
    model.is_quantized = False
    model.config.dtype = "bfloat16"
    model.save_pretrained(out)
    _rewrite(out / "config.json", _clean_config)
    report(Progress(_STAGE, 3, _STEPS))
    return int(model.config.max_position_embeddings)


def _load(gguf: Path, link: Path) -> Any:
    """The model, dequantised by transformers."""
    load: Callable[..., Any] = AutoModelForCausalLM.from_pretrained
    options: dict[str, Any] = {"gguf_file": link.name, "dtype": torch.bfloat16, "output_loading_info": True}
    if hasattr(transformers, "GgufConfig"):  # since 5.2x weights stay packed where a kernel can multiply them
        options["quantization_config"] = transformers.GgufConfig(dequantize=True)
    try:
        model, loading = load(str(link.parent), **options)
    except (ValueError, NotImplementedError, KeyError, RuntimeError, OSError) as error:
        raise ModelError(
            f"{gguf} cannot be converted: {error}.",
            "transformers converts GGUF files of llama, qwen2, qwen3, gemma3 and a few more families; "
            "for others give --model the Hugging Face folder.",
        ) from error
    tied = set(model.all_tied_weights_keys) if model.config.tie_word_embeddings else set[str]()
    missing = sorted(set(loading["missing_keys"]) - tied)
    if missing:
        raise ModelError(f"{gguf} lacks weights of the model: {', '.join(missing[:5])}.", "The file is not complete.")
    if not all(weight.is_floating_point() for weight in model.state_dict().values()):
        raise ModelError(f"{gguf} was not dequantised by transformers {transformers.__version__}.")
    return model


def _write_tokenizer(link: Path, out: Path, context: int) -> None:
    """Write the tokenizer that the GGUF file describes, in a form that transformers 4 and 5 load."""
    AutoTokenizer.from_pretrained(str(link.parent), gguf_file=link.name).save_pretrained(out)

    def clean(config: Mapping[str, Any]) -> dict[str, Any]:
        ours = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": context}
        kept = {key: value for key, value in config.items() if key not in ("backend", "is_local", "local_files_only")}
        return {**kept, **ours}

    _rewrite(out / "tokenizer_config.json", clean)


def _clean_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config without the GGUF's own title, and with numbers as their author wrote them."""
    return {key: _shortest(value) for key, value in config.items() if key != "_model_name_or_path"}


def _shortest(value: Any) -> Any:
    """GGUF holds float32, so that 1e-6 comes back as 9.99999997e-07: take the shortest number with that float32."""
    if isinstance(value, float) and float(np.float32(value)) == value:
        return float(str(np.float32(value)))
    if isinstance(value, Mapping):
        return {key: _shortest(inner) for key, inner in value.items()}
    return value


def _rewrite(path: Path, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    path.write_text(json.dumps(change(json.loads(path.read_text())), indent=2, ensure_ascii=False) + "\n")

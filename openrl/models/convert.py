"""GGUF to a Hugging Face folder: weights unpacked to bfloat16 safetensors, tokenizer and config files beside them.

Runs once for each model, in a worker or in `openrl models pull`. torch is not needed, which an Apple Silicon machine
may not have, and no more of the model is in memory than a few rows.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from openrl.models import folders, gguf_config, gguf_tokenizer, gguf_weights, manifest
from openrl.models.gguf_file import GgufFile
from openrl.models.manifest import Manifest, Origin
from openrl.models.progress import Progress, Report

_STAGE = "converting"


def convert(gguf: Path, target: Path, served_name: str, source: str, report: Report) -> None:
    """Write the folder `target`, whole or not at all. The caller holds its lock.

    Raises ModelError if the file is of an architecture or a form that we do not know, or is not complete.
    """
    file = GgufFile(gguf)
    config = gguf_config.model_config(file)
    weights = gguf_weights.plan(file, config)
    total, done = sum(weight.size for weight in weights), 0

    def wrote(size: int) -> None:
        nonlocal done
        done += size
        report(Progress(_STAGE, done, total))

    with folders.workspace(target) as work:
        out = work / target.name
        out.mkdir()
        report(Progress(_STAGE, 0, total))
        gguf_tokenizer.write(file, out, config["max_position_embeddings"])
        _write_json(out / "config.json", config)
        _write_json(out / "generation_config.json", gguf_config.generation_config(config))
        gguf_weights.write(file, weights, out / "model.safetensors", wrote)
        origin = Origin(str(gguf), gguf.stat().st_size, gguf.stat().st_mtime_ns, folders.sha256(gguf))
        manifest.write(out, Manifest(served_name, source, origin, manifest.digest(out), time.time()))
        folders.publish(out, target)


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n")

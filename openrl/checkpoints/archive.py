"""The archive of a checkpoint: a tar with the adapter in Tinker's form at its root (training-semantics 4.4), or with
the Hugging Face folder of a run that trained all parameters (F5).

Nothing is written: the tar's blocks are made in memory around the checkpoint's own files, so that any part of it can
be read at any time, and its bytes are the same at every download.
"""

from __future__ import annotations

import json
import tarfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from openrl.checkpoints.full import is_full, model_files
from openrl.checkpoints.peft import ADAPTER_FILE, ARCHIVE_HEAD, CONFIG_FILE, HEAD_NAME, PREFIX
from openrl.checkpoints.rope import FilePart, Part, Rope, size_of, whole
from openrl.checkpoints.tensor_file import encode_header, read_header
from openrl.errors import BadRequest

COMPLETE_FILE = "checkpoint_complete"  # empty; old `tinker checkpoint push-hf` looks for it
_BLOCK, _RECORD = 512, 10240


def archive(folder: Path) -> Rope:
    """The tar of a checkpoint's folder. Raises BadRequest if it holds neither an adapter nor a model."""
    files = _model(folder) if is_full(folder) else _adapter(folder)
    files[COMPLETE_FILE] = ()
    parts: list[Part] = []
    for name, content in files.items():
        size = sum(map(size_of, content))
        parts += [_entry(name, size), *content, bytes(-size % _BLOCK)]
    end = bytes(2 * _BLOCK)
    parts += [end, bytes(-(_total(parts) + len(end)) % _RECORD)]
    return Rope(tuple(part for part in parts if size_of(part)))


def _model(folder: Path) -> dict[str, tuple[Part, ...]]:
    """The model's own files as they are: no optimizer and no manifest."""
    return {path.name: (whole(path),) for path in model_files(folder)}


def _adapter(folder: Path) -> dict[str, tuple[Part, ...]]:
    return {CONFIG_FILE: (_config(folder / CONFIG_FILE),), ADAPTER_FILE: _tensors(folder / ADAPTER_FILE)}


def _config(path: Path) -> bytes:
    """The config with the head under its name in the archive (A15)."""
    try:
        config: dict[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise BadRequest(f"the checkpoint has no readable {path.name}: {error}.") from error
    names: Iterable[str] = config["target_modules"]
    config["target_modules"] = sorted(ARCHIVE_HEAD.rpartition(".")[2] if name == HEAD_NAME else name for name in names)
    return (json.dumps(config, indent=2) + "\n").encode()


def _tensors(path: Path) -> tuple[Part, ...]:
    """The tensors' bytes as they are (A17), under a header with the head's name in the archive."""
    header = read_header(path)
    entries = {_archive_key(name): entry for name, entry in header.entries.items()}
    return encode_header(entries), FilePart(path, header.data_start, path.stat().st_size - header.data_start)


def _archive_key(name: str) -> str:
    own = f"{PREFIX}{HEAD_NAME}."
    return f"{PREFIX}{ARCHIVE_HEAD}.{name.removeprefix(own)}" if name.startswith(own) else name


def _entry(name: str, size: int) -> bytes:
    """A member's header, of no time and no owner. Sizes over 8 GiB do not fit into it: GNU's form does."""
    info = tarfile.TarInfo(name)
    info.size, info.mode = size, 0o644
    return info.tobuf(tarfile.GNU_FORMAT)


def _total(parts: Iterable[Part]) -> int:
    return sum(map(size_of, parts))


def write_archive(folder: Path, file: Path) -> None:
    """Write the whole archive to a file."""
    rope = archive(folder)
    with file.open("wb") as out:
        for block in rope.read(0, rope.size):
            out.write(block)

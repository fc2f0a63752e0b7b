"""`manifest.json`: what a checkpoint folder says of itself, enough to rebuild the store's row from it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from openrl.store.records import Checkpoint
from openrl.types import CheckpointKind, RunId, spec_from

FILE = "manifest.json"
FORMAT = 1


@dataclass(frozen=True, slots=True)
class FileDigest:
    """A file's size in bytes and sha256 in hex."""

    size: int
    sha256: str


def digest_files(folder: Path) -> dict[str, FileDigest]:
    """Digests of all files of a folder, except the manifest."""
    return {path.name: _digest(path) for path in sorted(folder.iterdir()) if path.name != FILE}


def to_json(checkpoint: Checkpoint, files: Mapping[str, FileDigest]) -> str:
    fields: dict[str, Any] = {"format": FORMAT, **asdict(checkpoint)}
    fields["files"] = {name: asdict(digest) for name, digest in files.items()}
    return json.dumps(fields, indent=2)


def read(folder: Path) -> Checkpoint:
    """The checkpoint that a folder's manifest describes. Raises ValueError if it is not one of ours."""
    try:
        fields: dict[str, Any] = json.loads((folder / FILE).read_text())
        if fields.pop("format") != FORMAT:
            raise ValueError(f"{folder}: unknown manifest format")
        fields.pop("files")
        fields["spec"] = spec_from(fields["spec"])
        fields["kind"] = CheckpointKind(fields["kind"])
        fields["run_id"] = RunId(fields["run_id"])
        return Checkpoint(**fields)
    except (OSError, KeyError, TypeError) as error:
        raise ValueError(f"{folder} has no readable {FILE}: {error}") from error


def read_files(folder: Path) -> dict[str, FileDigest]:
    """The digests that a folder's manifest holds, without reading the files."""
    try:
        files: dict[str, dict[str, Any]] = json.loads((folder / FILE).read_text())["files"]
        return {name: FileDigest(**digest) for name, digest in files.items()}
    except (OSError, KeyError, TypeError) as error:
        raise ValueError(f"{folder} has no readable {FILE}: {error}") from error


def _digest(path: Path) -> FileDigest:
    with path.open("rb") as file:
        return FileDigest(path.stat().st_size, hashlib.file_digest(file, "sha256").hexdigest())

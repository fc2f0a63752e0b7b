"""`manifest.json` of a converted model: where it came from and what must lie in its folder."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from openrl.models import folders

FILE = "manifest.json"
FORMAT = 1
CONVERTER = 1  # raised when the converter writes something else; older folders are then made anew


@dataclass(frozen=True, slots=True)
class Origin:
    """The GGUF file a folder was made from. `mtime_ns` lets a start see without hashing that a file has not changed."""

    path: str
    size: int
    mtime_ns: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """`files` holds size in bytes and sha256 of each file beside the manifest."""

    served_name: str
    source: str
    origin: Origin
    files: Mapping[str, tuple[int, str]]
    created_at: float  # seconds since the epoch


def digest(folder: Path) -> dict[str, tuple[int, str]]:
    """Size and sha256 of all files in a folder, except the manifest."""
    paths = sorted(path for path in folder.iterdir() if path.name != FILE)
    return {path.name: (path.stat().st_size, folders.sha256(path)) for path in paths}


def write(folder: Path, manifest: Manifest) -> None:
    fields = {"format": FORMAT, "converter": CONVERTER, **asdict(manifest)}
    (folder / FILE).write_text(json.dumps(fields, indent=2))


def read(folder: Path) -> Manifest | None:
    """The manifest of a folder that is ready to use, or None: not there, of another format or converter, or torn."""
    try:
        fields: dict[str, Any] = json.loads((folder / FILE).read_text())
    except (OSError, ValueError):
        return None
    if (fields.pop("format", None), fields.pop("converter", None)) != (FORMAT, CONVERTER):
        return None
    files = {name: (size, sha256) for name, (size, sha256) in fields.pop("files").items()}
    manifest = Manifest(origin=Origin(**fields.pop("origin")), files=files, **fields)
    return manifest if _complete(folder, manifest) else None


def _complete(folder: Path, manifest: Manifest) -> bool:
    """Whether all files are there in full. Sizes only: hashing at each start would take longer than loading."""
    try:
        return all((folder / name).stat().st_size == size for name, (size, _) in manifest.files.items())
    except OSError:
        return False

"""Aliases that outlive a command: `<data dir>/aliases.json`, written by `openrl models alias`, read at each start."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from openrl.errors import ModelError
from openrl.models import catalog

_FILE = "aliases.json"


def read(data_dir: Path) -> dict[str, str]:
    """Name -> model (as the user named it). Raises ModelError if somebody broke the file."""
    path = data_dir / _FILE
    try:
        content: Any = json.loads(path.read_text())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read: {error}.", "Repair or remove it.") from error
    if not isinstance(content, dict) or not all(isinstance(target, str) for target in content.values()):
        raise ModelError(f"{path} must hold a JSON object of names and models.", "Repair or remove it.")
    return {str(name): str(target) for name, target in content.items()}


def add(data_dir: Path, name: str, target: str) -> None:
    """Save an alias, replacing one of the same name. Raises ModelError for an illegal name or model."""
    catalog.check_alias(name)
    spec = catalog.resolve(target)
    if name == spec.name or catalog.embedded(name):
        raise ModelError(f"{name!r} is a model's own name already.", "Choose another.")
    _write(data_dir, {**read(data_dir), name: spec.source})


def drop(data_dir: Path, name: str) -> None:
    """Forget an alias. Raises ModelError if there is none of that name."""
    known = read(data_dir)
    if name not in known:
        raise ModelError(f"there is no alias {name!r}.", f"Known are: {', '.join(known) or 'none'}.")
    del known[name]
    _write(data_dir, known)


def _write(data_dir: Path, aliases: Mapping[str, str]) -> None:
    data_dir.mkdir(parents=True, exist_ok=True)
    draft = data_dir / f".tmp-{_FILE}"
    draft.write_text(json.dumps(aliases, indent=2) + "\n")
    draft.rename(data_dir / _FILE)

"""Base models that clients may name although the server was not started with them: `--allow-models` and its patterns.

A client elsewhere must not make the server open files of its choice. So a name is one of an embedded model, of a model
in the store (`<data dir>/models`), or of a repo on the hub; it is never taken for a path.
"""

from __future__ import annotations

from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path

from openrl.models import catalog, folders, hub, manifest
from openrl.types import ModelSpec


class Allowed:
    """What the patterns allow. Calls read the disk; nothing is downloaded."""

    def __init__(self, patterns: tuple[str, ...], data_dir: Path) -> None:
        self.patterns = patterns
        self._data_dir = data_dir

    def known(self) -> tuple[ModelSpec, ...]:
        """Allowed models that are built in, in the store, or whole in the hub's cache."""
        specs = (*_embedded(), *self._store(), *_cached())
        return tuple({spec.name: spec for spec in specs[::-1] if self._allows(spec)}.values())[::-1]

    def find(self, name: str) -> ModelSpec | None:
        """The allowed model that a client means by a name, None if there is none. Whether the hub has a repo of that
        name comes out when it is fetched."""
        candidates = [spec for spec in (*_embedded(), *self._store()) if name in (spec.name, *spec.aliases)]
        if not candidates and catalog.is_hub_id(name) and not name.startswith(_LOCAL):
            candidates = [_from_hub(name)]
        return next((spec for spec in candidates if self._allows(spec)), None)

    def _allows(self, spec: ModelSpec) -> bool:
        return any(fnmatchcase(name, pattern) for name in (spec.name, *spec.aliases) for pattern in self.patterns)

    def _store(self) -> Iterator[ModelSpec]:
        """Folders of the store as `local/...`: converted GGUF files, and model folders that its owner has put there."""
        for config in sorted(folders.models_dir(self._data_dir).glob("*/config.json")):
            folder = config.parent
            if folder.name.startswith(".") or catalog.embedded(folder.name):  # being made; or known by another name
                continue
            known = manifest.read(folder)
            if known is None:
                yield ModelSpec(f"{_LOCAL}{catalog.slug(folder.name)}", str(folder))
            else:
                yield ModelSpec(known.served_name, str(folder))


_LOCAL = "local/"


def _embedded() -> Iterator[ModelSpec]:
    return (catalog.resolve(model.name) for model in catalog.EMBEDDED)


def _cached() -> Iterator[ModelSpec]:
    for path in sorted(hub.cache_dir().glob("models--*--*")):
        repo = path.name.removeprefix("models--").replace("--", "/", 1)
        if catalog.is_hub_id(repo) and hub.cached_snapshot(repo) is not None:
            yield _from_hub(repo)


def _from_hub(repo: str) -> ModelSpec:
    return ModelSpec(repo, f"{catalog.HUB_PREFIX}{repo}")

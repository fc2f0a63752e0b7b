"""Which models lie on this machine, and where. Nothing heavy is imported, so that the daemon can ask at its start."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from openrl.errors import ModelError
from openrl.models import catalog, folders, hub, manifest
from openrl.models.catalog import Kind
from openrl.types import ModelSpec


@dataclass(frozen=True, slots=True)
class Stored:
    """A model on this machine. `folder` None: an embedded model that is not pulled (yet)."""

    spec: ModelSpec
    kind: Kind
    folder: Path | None
    size_bytes: int  # on disk, GGUF file included


def locate(spec: ModelSpec, data_dir: Path) -> Path | None:
    """The ready Hugging Face folder of a model, or None if `openrl.models.prepare` has work to do first."""
    match catalog.kind(spec.source):
        case Kind.FOLDER:
            return Path(spec.source)
        case Kind.HUB:
            return hub.cached_snapshot(catalog.hub_id(spec.source))
        case Kind.EMBEDDED:
            folder = converted_folder(spec, data_dir)
            return folder if manifest.read(folder) else None
        case Kind.GGUF:
            folder = converted_folder(spec, data_dir)
            known, now = manifest.read(folder), Path(spec.source).stat()
            same = known and (known.origin.size, known.origin.mtime_ns) == (now.st_size, now.st_mtime_ns)
            return folder if same else None


def converted_folder(spec: ModelSpec, data_dir: Path) -> Path:
    """Where the converted form of an embedded model or a GGUF file lies (or will)."""
    model = catalog.embedded(spec.source)
    if model:
        return folders.models_dir(data_dir) / model.name
    path = Path(spec.source)
    where = hashlib.sha256(str(path).encode()).hexdigest()[:8]  # files of one name in two folders are two models
    return folders.models_dir(data_dir) / f"{catalog.slug(path.stem)}-{where}"


def stored(data_dir: Path) -> tuple[Stored, ...]:
    """Embedded models (pulled or not), converted GGUF files, and whole models in the hub's cache."""
    return (*_embedded(data_dir), *_converted(data_dir), *_cached())


def find(name: str, data_dir: Path) -> Stored:
    """The model that a source, a served name or the name of a converted file means. Raises ModelError if none does."""
    for model in stored(data_dir):
        if name in (model.spec.name, model.spec.source, *model.spec.aliases):
            return model
    spec = catalog.resolve(name)
    folder = locate(spec, data_dir)
    return Stored(spec, catalog.kind(spec.source), folder, folders.size_of(folder) if folder else 0)


def remove(model: Stored, data_dir: Path) -> int:
    """Remove what was stored for a model; the bytes freed. Raises ModelError for files that are not ours to remove."""
    if model.kind is Kind.FOLDER:
        raise ModelError(f"{model.spec.source} is your own folder.", "Remove it yourself if you do not want it.")
    if model.kind is Kind.HUB:
        raise ModelError(
            f"{model.spec.name} lies in the Hugging Face cache, which other programs use too.",
            f"Remove it with `hf cache rm model/{catalog.hub_id(model.spec.source)}`.",
        )
    targets = [converted_folder(model.spec, data_dir), *_kept_gguf(model, data_dir)]
    for target in targets:
        if target.is_dir():
            folders.remove(target)
        else:
            target.unlink(missing_ok=True)
    return model.size_bytes


def _embedded(data_dir: Path) -> Iterator[Stored]:
    for model in catalog.EMBEDDED:
        spec = catalog.resolve(model.name)
        folder = locate(spec, data_dir)
        gguf = folders.gguf_dir(data_dir) / model.file_name
        size = (folders.size_of(folder) if folder else 0) + (gguf.stat().st_size if gguf.is_file() else 0)
        yield Stored(spec, Kind.EMBEDDED, folder, size)


def _converted(data_dir: Path) -> Iterator[Stored]:
    """Converted GGUF files of the user, also those whose file has gone."""
    for path in sorted(folders.models_dir(data_dir).glob(f"*/{manifest.FILE}")):
        known = manifest.read(path.parent)
        if known and not path.parent.name.startswith(folders.TEMPORARY) and not catalog.embedded(known.source):
            spec = ModelSpec(known.served_name, known.source)
            yield Stored(spec, Kind.GGUF, path.parent, folders.size_of(path.parent))


def _cached() -> Iterator[Stored]:
    for path in sorted(hub.cache_dir().glob("models--*--*")):
        repo = path.name.removeprefix("models--").replace("--", "/", 1)
        folder = hub.cached_snapshot(repo)
        if folder:
            yield Stored(ModelSpec(repo, repo), Kind.HUB, folder, folders.size_of(folder))


def _kept_gguf(model: Stored, data_dir: Path) -> list[Path]:
    embedded = catalog.embedded(model.spec.source)
    return [folders.gguf_dir(data_dir) / embedded.file_name] if embedded else []

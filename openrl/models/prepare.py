"""Make a model ready to load: fetched, converted, and its tokenizer where clients of this machine find it.

Runs in the worker process (or in `openrl models pull`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

from openrl.errors import ModelError
from openrl.models import catalog, fetch, folders, hub, hub_cache, info, manifest, store
from openrl.models.catalog import Kind
from openrl.models.hub_cache import Outcome
from openrl.models.progress import Progress
from openrl.types import ModelSpec

log = logging.getLogger(__name__)


def prepare(spec: ModelSpec, data_dir: Path, report: Callable[[Progress], None]) -> Path:
    """The ready Hugging Face folder of any model, made if need be. Raises ModelError with advice.

    Also lays the tokenizer into the local Hugging Face cache under the model's names.
    """
    folder = store.locate(spec, data_dir) or _make(spec, data_dir, report)
    info.weight_files(folder)  # a folder without safetensors is refused here, in words
    _lay_tokenizer(spec, folder)
    return folder


def check_memory(folder: Path, dtype: str, quantize: str = "none") -> None:
    """Raises ModelError, with the numbers, unless the model of a ready folder fits into free memory."""
    info.check_fits(folder.name, info.describe(folder), dtype, info.available_memory(), quantize)


def _make(spec: ModelSpec, data_dir: Path, report: Callable[[Progress], None]) -> Path:
    match catalog.kind(spec.source):
        case Kind.EMBEDDED:
            model = catalog.embedded(spec.source)
            assert model is not None
            return _convert(fetch.fetch(model, data_dir, report), spec, data_dir, report)
        case Kind.GGUF:
            return _convert(Path(spec.source), spec, data_dir, report)
        case Kind.HUB:
            return hub.download(catalog.hub_id(spec.source), report)
        case Kind.FOLDER:
            return Path(spec.source)


def _convert(gguf: Path, spec: ModelSpec, data_dir: Path, report: Callable[[Progress], None]) -> Path:
    target = store.converted_folder(spec, data_dir)
    with folders.locked(target.parent, target.name, report):
        if store.locate(spec, data_dir) == target:  # another process made it while we waited
            return target
        from openrl.models import convert  # brings gguf, which a worker with a ready model does without

        convert.convert(gguf, target, spec.name, spec.source, report)
    if manifest.read(target) is None:
        raise ModelError(f"{target} is not whole after the conversion.", "Is the disk full? Try again.")
    return target


def _lay_tokenizer(spec: ModelSpec, folder: Path) -> None:
    """A cache that cannot be written is no reason not to serve: clients may have the tokenizer from elsewhere."""
    own = () if catalog.kind(spec.source) is Kind.HUB else (spec.name,)
    try:
        laid = hub_cache.lay(folder, (*own, *spec.aliases))
    except OSError as error:
        log.warning("the tokenizer of %s was not laid into the Hugging Face cache: %s", spec.name, error)
        return
    for entry in laid:
        if entry.outcome is Outcome.FOREIGN and entry.repo in spec.aliases:
            log.warning(
                "the Hugging Face cache has a model %s of its own: clients on this machine get its tokenizer "
                "and not the one of %s, which is served under that name",
                entry.repo,
                spec.name,
            )

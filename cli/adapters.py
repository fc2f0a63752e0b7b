"""Checkpoints that leave as something that other programs read, and adapters from elsewhere that come in."""

from __future__ import annotations

import secrets
import shutil
import time
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path

from openrl.checkpoints.archive import write_archive
from openrl.checkpoints.commit import CheckpointFolders
from openrl.checkpoints.experts import has_stacks, one_by_one
from openrl.checkpoints.foreign import read_foreign, write_training
from openrl.checkpoints.full import model_files
from openrl.checkpoints.layout import NAME_PATTERN, Address, new_folder
from openrl.checkpoints.peft import ADAPTER_FILE, CONFIG_FILE, read_adapter, read_config, write_adapter
from openrl.errors import BadRequest, ModelError
from openrl.models import folders, linear, store
from openrl.models.info import MAX_LORA_RANK
from openrl.settings import Settings
from openrl.store.records import Checkpoint
from openrl.types import CheckpointKind, FullSpec, RunId

_FALLBACK_NAME = "imported"


class Form(StrEnum):
    """What `export` can make of a checkpoint."""

    PEFT = "peft"
    ARCHIVE = "archive"
    MERGED = "merged"
    GGUF = "gguf"


def export(checkpoint: Checkpoint, source: Path, form: Form, out: Path, base: str | None, settings: Settings) -> Path:
    """Write a checkpoint into the folder `out`, whole or not at all; returns what was made.

    `source` is its own folder; `base` names its base model where the checkpoint's own name for it is not known here.
    """
    if form is Form.GGUF:
        raise ModelError(
            "no library writes GGUF files of models: the package gguf knows the container, not how to fill it.",
            "Export with --as merged, then run llama.cpp's convert_hf_to_gguf.py on that folder.",
        )
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise BadRequest(f"{out} exists and is not an empty folder.", "Give --out a new folder.")
    if any(source.glob("*.age")):
        raise BadRequest(f"{checkpoint.path} is encrypted.", "Download it, and decrypt its files with age.")
    return _publish(out, _writer(checkpoint, source, form, base, settings), f"{checkpoint.name}.tar", form)


def _writer(
    checkpoint: Checkpoint, source: Path, form: Form, base: str | None, settings: Settings
) -> Callable[[Path], None]:
    """What fills the new folder."""
    if form is Form.ARCHIVE:
        return lambda into: write_archive(source, into / f"{checkpoint.name}.tar")
    if isinstance(checkpoint.spec, FullSpec):
        return _model_writer(checkpoint, source, form)
    if form is Form.PEFT:
        return lambda into: _copy_adapter(source, into)
    model = base_folder(base or checkpoint.base_model, settings)

    def write(into: Path) -> None:
        from openrl.models.merge import merge  # brings torch

        merge(model, read_adapter(source), into)

    return write


def _model_writer(checkpoint: Checkpoint, source: Path, form: Form) -> Callable[[Path], None]:
    """For a run that trained all parameters, whose checkpoint is the whole model: there is nothing to merge."""
    if form is Form.PEFT:
        raise BadRequest(
            f"{checkpoint.path} is of a run that trained all parameters: it holds the whole model and no adapter.",
            "Export it with --as merged, which copies the model's files, or with --as archive.",
        )

    def write(into: Path) -> None:
        for path in model_files(source):
            shutil.copyfile(path, into / path.name)

    return write


def _publish(out: Path, write: Callable[[Path], None], archive: str, form: Form) -> Path:
    out = out.absolute()
    with folders.workspace(out) as work:
        made = work / out.name
        made.mkdir()
        write(made)
        if out.exists():
            out.rmdir()  # it is empty
        folders.publish(made, out)
    return out / archive if form is Form.ARCHIVE else out


def _copy_adapter(source: Path, into: Path) -> None:
    """PEFT's two files, without optimizer and manifest; experts one by one, since PEFT knows no stacks of them."""
    adapter = read_adapter(source)  # says what is wrong, if so
    if has_stacks(adapter):
        base: str | None = read_config(source / CONFIG_FILE).get("base_model_name_or_path")
        write_adapter(into, adapter.spec, one_by_one(adapter), base or "")
        return
    for name in (CONFIG_FILE, ADAPTER_FILE):
        shutil.copyfile(source / name, into / name)


def base_folder(name: str, settings: Settings) -> Path:
    """The folder of a base model by a name that it is served under, or as `--model` would have it."""
    spec = next((spec for spec in settings.models if name in (spec.name, *spec.aliases)), None)
    folder = store.locate(spec, settings.data_dir) if spec else store.find(name, settings.data_dir).folder
    if folder is None:
        raise ModelError(f"the base model {name} is not on this machine.", f"Fetch it with: openrl models pull {name}")
    return folder


def lay(source: Path, base: str, name: str | None, settings: Settings, place: CheckpointFolders) -> Checkpoint:
    """Write the adapter in `source` as a training checkpoint under a new run id; returns it, whole but not yet known.

    Raises BadRequest for an adapter that cannot be had exactly or does not fit.
    """
    name = name or (source.name if NAME_PATTERN.fullmatch(source.name) else _FALLBACK_NAME)
    if not NAME_PATTERN.fullmatch(name):
        raise BadRequest(f"{name!r} cannot be a checkpoint's name; legal: letters, digits, '.', '_' and '-'.")
    adapter = read_foreign(source, linear.Layers(base_folder(base, settings)), MAX_LORA_RANK)
    served = served_name(base, settings)
    address = Address(RunId(f"{secrets.token_hex(8)}:train:0"), CheckpointKind.TRAINING, name)
    folder = new_folder(address)
    staged = place.stage(folder)
    try:
        write_training(staged, adapter, served)
        checkpoint = Checkpoint(
            path=str(address),
            run_id=address.run,
            kind=address.kind,
            name=name,
            folder=str(folder),
            base_model=served,
            spec=adapter.spec,
            size_bytes=0,
            created_at=time.time(),
            expires_at=None,
            user_metadata={},
        )
        return place.commit(staged, checkpoint)
    finally:
        shutil.rmtree(staged, ignore_errors=True)


def served_name(base: str, settings: Settings) -> str:
    """The name under which a server serves the model that `base` means."""
    spec = next((spec for spec in settings.models if base in (spec.name, *spec.aliases)), None)
    return spec.name if spec else store.find(base, settings.data_dir).spec.name

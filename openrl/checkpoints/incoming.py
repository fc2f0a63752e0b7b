"""Checkpoints that arrive from another server: what may be announced, and whether what came is what was announced.

Nothing that a client says becomes a path: files have the names known here and no others, and everything about the
checkpoint but its content is made anew by the server that takes it in.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from safetensors import SafetensorError, safe_open

from openrl.checkpoints import full
from openrl.checkpoints.layout import NAME_PATTERN
from openrl.checkpoints.manifest import FileDigest
from openrl.checkpoints.peft import (
    ADAPTER_FILE,
    CONFIG_FILE,
    GRADIENTS_FILE,
    OPTIMIZER_FILE,
    layer_name,
    read_config,
)
from openrl.errors import BadRequest, TooLarge
from openrl.types import CheckpointKind, FullSpec, TrainSpec

_STATE: Mapping[CheckpointKind, frozenset[str]] = {
    CheckpointKind.TRAINING: frozenset({OPTIMIZER_FILE, GRADIENTS_FILE}),
    CheckpointKind.SAMPLER: frozenset(),
}
_ADAPTER = frozenset({CONFIG_FILE, ADAPTER_FILE})
_MAX_CONFIG_BYTES = 1 << 20
_MAX_METADATA_CHARACTERS = 1 << 16
_SHA256 = re.compile(r"[0-9a-f]{64}")
_FLOATS = ("F32", "F16")
_MODEL_FLOATS = (*_FLOATS, "BF16")
_ACCUMULATORS = ("m", "v")


@dataclass(frozen=True, slots=True)
class Announcement:
    """A checkpoint as the server that has it describes it; on the wire as it is (docs/remote.md).

    `source` is its path there, for the record only. `base_model` is the name under which the base is served.
    """

    source: str
    kind: CheckpointKind
    name: str
    base_model: str
    spec: TrainSpec
    files: Mapping[str, FileDigest]
    user_metadata: Mapping[str, str] = field(default_factory=dict[str, str])

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(digest.size for digest in self.files.values())


def check_announcement(announced: Announcement, max_bytes: int) -> None:
    """Raise BadRequest for what can be no checkpoint, TooLarge for more than `max_bytes`."""
    if announced.kind not in _STATE:
        legal = ", ".join(_STATE)
        raise BadRequest(f"a checkpoint of kind {announced.kind} cannot be moved.", f"Kinds that can: {legal}.")
    if not NAME_PATTERN.fullmatch(announced.name):
        raise BadRequest(f"name {announced.name!r} is no checkpoint's name.", f"Legal: {NAME_PATTERN.pattern}")
    if sum(len(key) + len(value) for key, value in announced.user_metadata.items()) > _MAX_METADATA_CHARACTERS:
        raise BadRequest(f"user_metadata has over {_MAX_METADATA_CHARACTERS} characters.")
    _check_files(announced)
    if announced.size > max_bytes:
        raise TooLarge(
            f"the checkpoint has {announced.size} bytes; this server takes up to {max_bytes}.",
            "Its setting is daemon.max_upload_bytes.",
        )


def _check_files(announced: Announcement) -> None:
    whole = isinstance(announced.spec, FullSpec)
    needed, config = (full.NEEDED, full.MODEL_CONFIG) if whole else (_ADAPTER, CONFIG_FILE)
    known = needed | _STATE[announced.kind] | (full.EXTRA_FILES if whole else frozenset())
    for name, digest in announced.files.items():
        if name not in known:
            raise BadRequest(f"files has {name!r}; a {announced.kind} checkpoint has {', '.join(sorted(known))}.")
        if digest.size < 1 or not _SHA256.fullmatch(digest.sha256):
            raise BadRequest(f"files.{name} needs a size of at least 1 and a sha256 of 64 hex digits in lower case.")
    if missing := needed - announced.files.keys():
        raise BadRequest(f"files lacks {min(missing)!r}.")
    if announced.files[config].size > _MAX_CONFIG_BYTES:
        raise BadRequest(f"files.{config} is over {_MAX_CONFIG_BYTES} bytes.")


def check_content(folder: Path, announced: Announcement) -> None:
    """Raise BadRequest unless the files in `folder` are an adapter of the announced rank, or a model, and its
    optimizer's state.

    Reads headers only. Whether the layers are those of the base model is checked when the checkpoint is loaded (C3).
    """
    rank = announced.spec.rank
    shapes = _shapes(folder / full.MODEL_FILE, floats=_MODEL_FLOATS) if rank is None else _adapter_shapes(folder, rank)
    if OPTIMIZER_FILE in announced.files:
        moments = {f"{prefix}.{name}": shape for prefix in _ACCUMULATORS for name, shape in shapes.items()}
        _check_shapes(OPTIMIZER_FILE, _shapes(folder / OPTIMIZER_FILE, counts=("t",)), {"t": (), **moments})
    if GRADIENTS_FILE in announced.files:
        _check_shapes(GRADIENTS_FILE, _shapes(folder / GRADIENTS_FILE), shapes)


def _adapter_shapes(folder: Path, rank: int) -> dict[str, tuple[int, ...]]:
    """The shapes of an adapter's factors by name. Raises BadRequest for one of another rank."""
    config = read_config(folder / CONFIG_FILE)
    if config["r"] != rank or not isinstance(config.get("target_modules"), list):
        raise BadRequest(f"{CONFIG_FILE} does not describe an adapter of rank {rank}: r = {config['r']!r}.")
    shapes = {layer_name(key): shape for key, shape in _shapes(folder / ADAPTER_FILE).items()}
    for name, shape in shapes.items():
        ranks = shape[:1] if name.endswith("lora_A") else shape[1:]
        if len(shape) != 2 or ranks != (rank,):
            raise BadRequest(f"{ADAPTER_FILE} has {name!r} of shape {shape}, which is not of rank {rank}.")
    return shapes


def _check_shapes(file: str, found: Mapping[str, tuple[int, ...]], wanted: Mapping[str, tuple[int, ...]]) -> None:
    for name in sorted({*found, *wanted}):
        if found.get(name) != wanted.get(name):
            raise BadRequest(
                f"{file} has {name!r} of shape {found.get(name, 'none')}; beside these weights it must be "
                f"{wanted.get(name, 'none')}."
            )


def _shapes(file: Path, counts: tuple[str, ...] = (), floats: tuple[str, ...] = _FLOATS) -> dict[str, tuple[int, ...]]:
    """The shapes of a safetensors file's tensors: of types `floats`, save for those in `counts`, which are int64.

    Opening checks the header: its length, its types, and that the tensors fill the file without gap or overlap.
    """
    try:
        with safe_open(file, framework="np") as opened:
            slices = {key: opened.get_slice(key) for key in opened.keys()}  # noqa: SIM118
            types = {key: str(part.get_dtype()) for key, part in slices.items()}
            shapes = {key: tuple(int(n) for n in part.get_shape()) for key, part in slices.items()}
    except (SafetensorError, OSError) as error:
        raise BadRequest(f"{file.name} is no readable safetensors file: {error}.") from error
    for key, dtype in types.items():
        if dtype not in (("I64",) if key in counts else floats):
            raise BadRequest(f"{file.name} has {key!r} of type {dtype}, which no checkpoint has.")
    return shapes

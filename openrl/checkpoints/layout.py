"""Names, addresses and places of checkpoints.

<root>/<run>/<weights | sampler_weights>/<name>--<8 hex>/     a checkpoint; the suffix lets a name be overwritten
<root>/<run>/snapshots/<seq>--<8 hex>/                        what recovery starts from
"""

from __future__ import annotations

import re
import secrets
from dataclasses import dataclass
from pathlib import Path

from openrl.errors import BadRequest
from openrl.types import CheckpointKind, RunId

NAME_PATTERN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_RUN_PATTERN = re.compile(r"[A-Za-z0-9_-]+:train:[0-9]+")
_PATH_PATTERN = re.compile(r"tinker://(?P<run>[^/]+)/(?P<kind>[^/]+)/(?P<name>[^/]+)")
SNAPSHOTS = "snapshots"
TEMPORARY = ".tmp-"


@dataclass(frozen=True, slots=True)
class Address:
    """A parsed `tinker://<run>/<kind>/<name>`."""

    run: RunId
    kind: CheckpointKind
    name: str

    def __str__(self) -> str:
        return f"tinker://{self.run}/{self.kind}/{self.name}"


def parse(path: str) -> Address:
    """Parse a checkpoint address. Raises BadRequest that shows the form."""
    match = _PATH_PATTERN.fullmatch(path)
    kinds = [str(kind) for kind in CheckpointKind]
    if (
        match is None
        or match["kind"] not in kinds
        or not _RUN_PATTERN.fullmatch(match["run"])
        or not NAME_PATTERN.fullmatch(match["name"])
    ):
        raise BadRequest(
            f"{path!r} is not a checkpoint path.",
            f"The form is tinker://<run id>/<{' or '.join(kinds)}>/<name>, as a save returned it.",
        )
    return Address(RunId(match["run"]), CheckpointKind(match["kind"]), match["name"])


def new_folder(address: Address) -> Path:
    """A fresh folder for a checkpoint, relative to the root."""
    return Path(address.run) / str(address.kind) / f"{address.name}--{secrets.token_hex(4)}"


def new_snapshot_folder(run: RunId, seq: int) -> Path:
    """A fresh folder for a run's snapshot, relative to the root."""
    return Path(run) / SNAPSHOTS / f"{seq}--{secrets.token_hex(4)}"

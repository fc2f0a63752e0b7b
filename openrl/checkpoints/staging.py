"""Folders of checkpoints that are still arriving; they outlive a restart, and what has come of each file is its size.

<root>/<upload>/upload.json           what was announced, by whom, and what became of it
<root>/<upload>/<file>                the bytes so far
"""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from openrl import private_file
from openrl.checkpoints import manifest
from openrl.checkpoints.incoming import Announcement
from openrl.codec import decode_json, encode_json
from openrl.errors import BadRequest, NotFound

_STATE = "upload.json"
_ID = re.compile(r"[0-9a-f]{32}")


@dataclass(frozen=True, slots=True)
class Upload:
    """A checkpoint on its way in. `nonce` tells it from an earlier upload of the same; `path` is set once it is in."""

    id: str
    owner: str
    nonce: str
    announced: Announcement
    path: str | None = None


class Staging:
    """The folder of all uploads. Methods touch the disk and know nothing of who may do what."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def put(self, upload: Upload) -> None:
        """Write down an upload, or what became of it."""
        folder = self._root / upload.id
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        private_file.write(folder / _STATE, encode_json(upload).decode())

    def get(self, identity: str) -> Upload:
        """Raises NotFound."""
        if not _ID.fullmatch(identity):
            raise NotFound("there is no such upload.")
        try:
            return decode_json(Upload, (self._root / identity / _STATE).read_bytes())
        except (OSError, BadRequest):
            raise NotFound(f"there is no upload {identity!r}.", "It was dropped or is too old: begin anew.") from None

    def file(self, upload: Upload, name: str) -> Path:
        """Where a file's bytes go. Raises NotFound for a name that was not announced."""
        if name not in upload.announced.files:
            raise NotFound(f"the upload has no file {name!r}.", f"It has: {', '.join(upload.announced.files)}.")
        return self._root / upload.id / name

    def received(self, upload: Upload, name: str) -> int:
        """Bytes of a file that have come."""
        try:
            return self.file(upload, name).stat().st_size
        except FileNotFoundError:
            return 0

    def drop_file(self, upload: Upload, name: str) -> None:
        self.file(upload, name).unlink(missing_ok=True)

    def digests(self, upload: Upload) -> dict[str, manifest.FileDigest]:
        """Reads all that has come."""
        found = manifest.digest_files(self._root / upload.id)
        return {name: found[name] for name in upload.announced.files if name in found}

    def folder(self, upload: Upload) -> Path:
        return self._root / upload.id

    def link(self, upload: Upload, into: Path) -> None:
        """Give the files a second name in `into`: after a crash in between, they are still here to try again."""
        for name in upload.announced.files:
            os.link(self.file(upload, name), into / name)

    def finish(self, upload: Upload) -> None:
        """Note that an upload is in (its `path`), and let go of its files."""
        self.put(upload)
        for name in upload.announced.files:
            self.drop_file(upload, name)

    def remove(self, identity: str) -> None:
        shutil.rmtree(self._root / identity, ignore_errors=True)

    def all(self) -> Iterator[Upload]:
        for folder in self._root.glob("*"):
            try:
                yield self.get(folder.name)
            except NotFound:
                continue

    def missing_bytes(self) -> int:
        """What all uploads under way have still to bring."""
        return sum(
            digest.size - self.received(upload, name)
            for upload in self.all()
            if upload.path is None
            for name, digest in upload.announced.files.items()
        )

    def idle(self, seconds: float) -> list[str]:
        """Names of folders that nothing has touched for so long."""
        before = time.time() - seconds
        return [folder.name for folder in self._root.glob("*") if _touched(folder) < before]  # also half-made ones

    def free_bytes(self) -> int:
        """What the disk has left."""
        self._root.mkdir(parents=True, exist_ok=True, mode=0o700)
        return shutil.disk_usage(self._root).free


def _touched(folder: Path) -> float:
    """When something in it changed last; now, if it changes under our eyes."""
    try:
        return max(path.stat().st_mtime for path in (folder, *folder.glob("*")))
    except FileNotFoundError:
        return time.time()

"""Folders that appear whole or not at all (C7): written beside the target, flushed, renamed."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from openrl.checkpoints import manifest
from openrl.checkpoints.layout import SNAPSHOTS, TEMPORARY
from openrl.durable import flush
from openrl.store.records import Checkpoint


class CheckpointFolders:
    """The folder of all checkpoints. Paths given and returned are relative to `root`."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._held: Counter[str] = Counter()
        root.mkdir(parents=True, exist_ok=True)

    def stage(self, folder: Path) -> Path:
        """An empty temporary folder beside the future `folder`; the absolute path, for a worker to write into."""
        target = self.root / folder
        staged = target.with_name(TEMPORARY + target.name)
        shutil.rmtree(staged, ignore_errors=True)
        staged.mkdir(parents=True)
        return staged

    def commit(self, staged: Path, checkpoint: Checkpoint) -> Checkpoint:
        """Write the manifest, flush everything and rename to `checkpoint.folder`; returns it with its true size."""
        files = manifest.digest_files(staged)
        complete = replace(checkpoint, size_bytes=sum(digest.size for digest in files.values()))
        (staged / manifest.FILE).write_text(manifest.to_json(complete, files))
        self.commit_plain(staged, Path(checkpoint.folder))
        return complete

    def size(self, staged: Path) -> int:
        """Bytes of what is staged so far."""
        return sum(path.stat().st_size for path in staged.iterdir())

    def abandon(self, staged: Path) -> None:
        """Remove what was staged and will not be committed."""
        shutil.rmtree(staged)

    def commit_plain(self, staged: Path, folder: Path) -> None:
        """As `commit` for a folder without manifest (a snapshot)."""
        for path in staged.iterdir():
            flush(path)
        flush(staged)
        staged.rename(self.root / folder)
        flush((self.root / folder).parent)

    def absolute(self, folder: str) -> Path:
        return self.root / folder

    @contextmanager
    def hold(self, folder: str) -> Generator[None]:
        """Someone reads the folder for the time of the block; called on the event loop only."""
        self._held[folder] += 1
        try:
            yield
        finally:
            self._held[folder] -= 1
            if not self._held[folder]:
                del self._held[folder]

    def is_held(self, folder: str) -> bool:
        return folder in self._held

    def describe(self, checkpoint: Checkpoint) -> None:
        """Bring a folder's manifest up to what its row says by now: expiry, publication."""
        folder = self.root / checkpoint.folder
        draft = folder / (TEMPORARY + manifest.FILE)
        draft.write_text(manifest.to_json(checkpoint, manifest.read_files(folder)))
        draft.rename(folder / manifest.FILE)

    def withdraw(self, folder: str) -> None:
        """Files that stay for those who read them, but are no checkpoint any more, also for `scan`."""
        (self.root / folder / manifest.FILE).unlink(missing_ok=True)

    def remove(self, folder: str) -> None:
        """Remove a folder: renamed first, so that a crash half-way leaves a leftover rather than a torn checkpoint."""
        target = self.root / folder
        doomed = target.with_name(TEMPORARY + target.name)
        if target.exists():
            target.rename(doomed)
            shutil.rmtree(doomed)

    def remove_leftovers(self) -> None:
        """Remove what an interrupted save or removal left behind."""
        for leftover in self.root.glob(f"*/*/{TEMPORARY}*"):
            shutil.rmtree(leftover)

    def scan(self) -> Iterator[Checkpoint]:
        """All whole checkpoints on disk, as their manifests describe them."""
        for path in self.root.glob(f"*/*/*/{manifest.FILE}"):
            yield manifest.read(path.parent)

    def snapshots(self, run: str) -> Iterator[str]:
        """Snapshot folders of a run."""
        for path in (self.root / run / SNAPSHOTS).glob("*"):
            if not path.name.startswith(TEMPORARY):
                yield str(path.relative_to(self.root))

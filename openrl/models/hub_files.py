"""What the hub look-alike gives out: tokenizer and config files of the served names, and small data sets of a folder.

A file is looked up among those that were listed, never by joining a client's text to a folder: no path leads out.
Weights are in no list.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path, PurePosixPath

from openrl.errors import NotReady
from openrl.models import hub_cache, store
from openrl.types import ModelSpec

_DATASET_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)


@dataclass(frozen=True, slots=True)
class HubFile:
    """`name` is the path inside the repo, `oid` git's id of the content, by which the hub names small files."""

    name: str
    path: Path
    size: int
    oid: str
    modified_at: float


@dataclass(frozen=True, slots=True)
class HubFolder:
    name: str
    oid: str


@dataclass(frozen=True, slots=True)
class HubRepo:
    """A repo as a client sees it. It has one revision, `main`, whose commit is made from names and content."""

    id: str
    commit: str  # 40 hex digits
    files: tuple[HubFile, ...]

    @property
    def modified_at(self) -> float:
        return max((file.modified_at for file in self.files), default=0.0)

    def has_revision(self, revision: str) -> bool:
        return revision in ("main", "refs/heads/main", self.commit)

    def file(self, name: str) -> HubFile | None:
        return next((file for file in self.files if file.name == name), None)

    def folder(self, name: str) -> HubFolder | None:
        inside = [file for file in self.files if file.name.startswith(f"{name}/")]
        return HubFolder(name, _digest(inside)) if inside else None

    def entries(self, below: str, recursive: bool) -> list[HubFile | HubFolder]:
        """Files and folders in the folder `below` ("" is the whole repo), or in all folders under it."""
        prefix = f"{below}/" if below else ""
        inside = [file for file in self.files if file.name.startswith(prefix)]
        parents = {
            str(parent)
            for file in inside
            for parent in PurePosixPath(file.name).parents
            if len(str(parent)) > len(below) and str(parent) != "."
        }
        found = [*filter(None, map(self.folder, sorted(parents))), *inside]
        return [entry for entry in found if recursive or "/" not in entry.name.removeprefix(prefix)]


class HubFiles:
    """The repos that exist. Calls read the disk: make them in a thread."""

    def __init__(self, models: Iterable[ModelSpec], data_dir: Path, datasets_dir: Path | None) -> None:
        self._data_dir = data_dir
        self._datasets_dir = datasets_dir
        self._models: dict[str, ModelSpec] = {}
        for spec in models:
            self.add(spec)

    def add(self, spec: ModelSpec) -> None:
        """Give out the files of one more model."""
        for name in (spec.name, *spec.aliases):
            for repo in hub_cache.repos_of(name):
                self._models.setdefault(repo, spec)

    def model(self, repo: str) -> HubRepo | None:
        """The repo of a served name or alias. Raises NotReady while the model is being fetched or converted."""
        spec = self._models.get(repo)
        if spec is None:
            return None
        folder = store.locate(spec, self._data_dir)
        if folder is None:
            raise NotReady(f"the files of {repo} are not here yet; the model is being fetched or converted.")
        return _repo(repo, ((path.name, path) for path in hub_cache.tokenizer_files(folder)))

    def dataset(self, repo: str) -> HubRepo | None:
        """The repo `ORG/NAME` of the folder of data sets."""
        if self._datasets_dir is None or not _DATASET_ID.fullmatch(repo):
            return None
        folder = self._datasets_dir / repo
        return _repo(repo, _inside(folder)) if folder.is_dir() else None


def _inside(folder: Path) -> Iterator[tuple[str, Path]]:
    """Names and paths of a data set's files; hidden ones, and links that lead out of the folder, are left out."""
    root = folder.resolve()
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder)
        hidden = any(part.startswith(".") for part in name.parts)
        if not hidden and path.is_file() and path.resolve().is_relative_to(root):
            yield name.as_posix(), path


def _repo(repo: str, paths: Iterable[tuple[str, Path]]) -> HubRepo:
    files = tuple(_file(name, path) for name, path in paths)
    return HubRepo(repo, _digest(files), files)


def _file(name: str, path: Path) -> HubFile:
    stat = path.stat()
    return HubFile(name, path, stat.st_size, _git_id(path, stat.st_size, stat.st_mtime_ns), stat.st_mtime)


@lru_cache(maxsize=4096)
def _git_id(path: Path, size: int, mtime_ns: int) -> str:
    """The id that git gives a file's content; `mtime_ns` is there so that a changed file is read anew."""
    digest = hashlib.sha1(f"blob {size}\0".encode(), usedforsecurity=False)
    with path.open("rb") as file:
        while part := file.read(1 << 20):
            digest.update(part)
    return digest.hexdigest()


def _digest(files: Iterable[HubFile]) -> str:
    """40 hex digits that stand for names and content of the files."""
    lines = "".join(f"{file.oid} {file.name}\n" for file in files)
    return hashlib.sha1(lines.encode(), usedforsecurity=False).hexdigest()

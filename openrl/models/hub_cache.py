"""Tokenizers for clients without the hub: laid into the local Hugging Face cache under the names models are served by.

The SDK's `get_tokenizer()` and the cookbook call `AutoTokenizer.from_pretrained(<served name>)`. For a model that did
not come from the hub, and for every alias, that name is not in the cache, so tokenizer and config files (no weights)
are copied there, in the cache's own layout:

    models--ORG--NAME/refs/main                  a 40-digit id, made from the files' content
    models--ORG--NAME/snapshots/<id>/*           the files
    models--ORG--NAME/.openrl.json               our mark: the repo was laid by us, and which id

A repo that is there without our mark, or has moved on since we laid it, is somebody else's and never touched.
"""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from openrl.models import folders, hub

log = logging.getLogger(__name__)

_MARK = ".openrl.json"
_CONFIGS = ("config.json", "generation_config.json")
# Who asks for a Llama 3 tokenizer is sent to an open copy by the SDK and the cookbook.
_LLAMA_PREFIX, _LLAMA_COPY = "meta-llama/Llama-3", "thinkingmachineslabinc/meta-llama-3-instruct-tokenizer"


class Outcome(StrEnum):
    """What laying a name came to."""

    LAID = "laid"
    CURRENT = "current"  # the same files were there
    FOREIGN = "foreign"  # another repo of that name is in the cache; left alone


@dataclass(frozen=True, slots=True)
class Laid:
    repo: str
    outcome: Outcome


def lay(folder: Path, names: Iterable[str], cache: Path | None = None) -> tuple[Laid, ...]:
    """Make the tokenizer of a model folder loadable by `names` from the cache (by default the user's)."""
    files = tokenizer_files(folder)
    if not any(path.name.startswith("tokenizer") for path in files):
        return ()
    where = cache or hub.cache_dir()
    repos = dict.fromkeys(repo for name in names for repo in repos_of(name))
    return tuple(Laid(repo, _lay(files, repo, where)) for repo in repos)


def repos_of(name: str) -> tuple[str, ...]:
    """The repos in which a client looks for the tokenizer of a served name."""
    repo = name.split(":")[0]  # the SDK cuts variants off
    return (repo, _LLAMA_COPY) if repo.startswith(_LLAMA_PREFIX) else (repo,)


def tokenizer_files(folder: Path) -> list[Path]:
    """The files of a model folder that a tokenizer or a config is loaded from."""
    patterns = (*_CONFIGS, *hub.TOKENIZER_PATTERNS)
    return sorted({path for pattern in patterns for path in folder.glob(pattern) if path.is_file()})


def is_laid(name: str, cache: Path | None = None) -> bool:
    """Whether the repo of a served name is one that we laid."""
    return _our_id(hub.repo_folder(repos_of(name)[0], cache)) is not None


def take_up(name: str, cache: Path | None = None) -> bool:
    """Remove what was laid under a served name; False if there was nothing of ours."""
    ours = [folder for repo in repos_of(name) if _our_id(folder := hub.repo_folder(repo, cache))]
    for folder in ours:
        folders.remove(folder)
    return bool(ours)


def _lay(files: list[Path], repo: str, cache: Path) -> Outcome:
    target = hub.repo_folder(repo, cache)
    identity = _identity(files)
    if target.exists():
        ours = _our_id(target)
        if ours is None:
            return Outcome.FOREIGN
        if ours == identity:
            return Outcome.CURRENT
    # The hub's library keeps its own locks in that folder too.
    lock = folders.locked(cache / ".locks", f"openrl-{target.name}", lambda _progress: None)
    with lock, folders.workspace(target) as work:
        draft = work / target.name
        _write(draft, files, identity)
        folders.publish(draft, target)
    return Outcome.LAID


def _write(draft: Path, files: list[Path], identity: str) -> None:
    snapshot = draft / "snapshots" / identity
    snapshot.mkdir(parents=True)
    for path in files:
        shutil.copyfile(path, snapshot / path.name)
    (draft / "refs").mkdir()
    (draft / "blobs").mkdir()  # tools that list the cache expect it
    (draft / "refs" / "main").write_text(identity)
    (draft / _MARK).write_text(json.dumps({"laid_by": "openrl", "snapshot": identity}) + "\n")


def _our_id(repo: Path) -> str | None:
    """The snapshot id of a repo that we laid and that nobody has changed since; else None."""
    try:
        mark: dict[str, Any] = json.loads((repo / _MARK).read_text())
        current = (repo / "refs" / "main").read_text().strip()
        snapshots = [path.name for path in (repo / "snapshots").iterdir()]
    except (OSError, ValueError):
        return None
    return current if snapshots == [current] == [mark.get("snapshot")] else None


def _identity(files: list[Path]) -> str:
    """40 hex digits that stand for names and content of the files."""
    digest = hashlib.sha1(usedforsecurity=False)
    for path in files:
        digest.update(f"{path.name}\0{folders.sha256(path)}\n".encode())
    return digest.hexdigest()

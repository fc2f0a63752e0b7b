"""Models of the Hugging Face hub, through `huggingface_hub` with its own cache, token and offline settings.

`huggingface_hub` is imported inside the functions: the daemon looks for models on disk at its start, and has to be
listening before that import is done.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from openrl.errors import ModelError
from openrl.models.progress import Progress, Report

if TYPE_CHECKING:
    from tqdm.auto import tqdm

TOKENIZER_PATTERNS = ("tokenizer*", "*.jinja", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt")
_PATTERNS = ("*.safetensors", "*.json", *TOKENIZER_PATTERNS)


def cache_dir() -> Path:
    """The hub's cache folder, as HF_HOME and HF_HUB_CACHE have it."""
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE)


def repo_folder(repo: str, cache: Path | None = None) -> Path:
    """Where the cache keeps a repo: `models--ORG--NAME`."""
    return (cache or cache_dir()) / f"models--{repo.replace('/', '--')}"


def cached_snapshot(repo: str, cache: Path | None = None) -> Path | None:
    """The snapshot folder that a repo's main branch points at, if it holds a whole model; no network."""
    folder = repo_folder(repo, cache)
    try:
        commit = (folder / "refs" / "main").read_text().strip()
    except OSError:
        return None
    snapshot = folder / "snapshots" / commit
    return snapshot if is_whole(snapshot) else None


def is_whole(folder: Path) -> bool:
    """Whether a folder has a config and all of its safetensors files."""
    if not (folder / "config.json").is_file():
        return False
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        return any(folder.glob("*.safetensors"))
    weight_map: dict[str, str] = json.loads(index.read_text())["weight_map"]
    return all((folder / name).is_file() for name in set(weight_map.values()))


def download(repo: str, report: Report) -> Path:
    """The snapshot folder of a hub model; what the cache lacks is downloaded. Raises ModelError with advice."""
    import httpx
    from huggingface_hub import errors, snapshot_download

    try:
        folder = Path(snapshot_download(repo, allow_patterns=list(_PATTERNS), tqdm_class=_bar(report)))
    except errors.GatedRepoError as error:
        raise ModelError(
            f"{repo} is gated: its owner wants terms to be accepted first.",
            f"Accept them on the page of {repo} on the hub, then `hf auth login`.",
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise ModelError(
            f"the hub has no model {repo}, or not for you.", "Check the spelling; for private models, `hf auth login`."
        ) from error
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled) as error:
        raise ModelError(f"{repo} is not in the local cache, and the hub cannot be reached.", _OFFLINE_HINT) from error
    except (errors.HfHubHTTPError, errors.HFValidationError, httpx.HTTPError, OSError) as error:
        raise ModelError(f"{repo} could not be downloaded: {error}.", "Try again, or give --model a folder.") from error
    if not is_whole(folder):
        raise ModelError(
            f"{repo} lies in the local cache without a whole set of safetensors files ({folder}).",
            "Models without safetensors cannot be served; otherwise download it again with access to the hub.",
        )
    return folder


_OFFLINE_HINT = (
    "Allow access to the hub once (is HF_HUB_OFFLINE set?), give --model a folder, "
    "or serve an embedded model, which needs no hub: `openrl models list`."
)


def _bar(report: Report) -> type[tqdm[Any]]:
    """A progress bar class that shows nothing and reports how many bytes of all files are there."""
    from tqdm.auto import tqdm

    class Reporting(tqdm):  # pyright: ignore[reportMissingTypeArgument] -- not generic when it runs
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            kwargs.pop("name", None)
            super().__init__(*args, **{**kwargs, "file": _sink(), "disable": False})

        def update(self, n: float | None = 1) -> bool | None:
            shown = super().update(n)
            # Newer versions of the hub's library show two bars of bytes; the one of received bytes is left out.
            if self.unit == "B" and self.total and "Downloading bytes" not in str(self.desc):
                report(Progress("downloading", int(self.n), int(self.total)))
            return shown

    return Reporting


class _sink:
    """A text file that forgets what is written to it."""

    encoding = "utf-8"

    def write(self, text: str) -> int:
        return len(text)

    def flush(self) -> None:
        return

    def isatty(self) -> bool:
        return False


def is_offline() -> bool:
    """Whether the user has told the hub's library to stay offline."""
    from huggingface_hub import constants

    return bool(constants.HF_HUB_OFFLINE)


def endpoint() -> str:
    """Address of the hub (HF_ENDPOINT)."""
    from huggingface_hub import constants

    return str(constants.ENDPOINT)

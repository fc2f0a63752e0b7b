"""Where the cookbook runs: its environment and source, the server with the stand-in model, and what a recipe sees."""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from cookbook import datasets, model
from openrl.settings import load
from openrl_recipes.local_server import Endpoint, local_server

# Names that recipes insist on, all served by the one model.
NAMES = (
    "Qwen/Qwen3.5-4B",
    "Qwen/Qwen3.5-9B",
    "Qwen/Qwen3.5-9B-Base",
    "Qwen/Qwen3.6-35B-A3B",
    "Qwen/Qwen3-8B",
    "Qwen/Qwen3-4B-Instruct-2507",
)


@dataclass(frozen=True)
class Cookbook:
    """A virtual environment with the cookbook, and its source distribution unpacked (it has the tests)."""

    python: Path
    source: Path

    @staticmethod
    def at(folder: Path) -> Cookbook | None:
        """What `make cookbook-env` left in a folder, or None."""
        if not (folder / ".ready").is_file():
            return None
        return Cookbook(folder / "venv" / "bin" / "python", folder / "source")


@dataclass(frozen=True)
class Kitchen:
    """A running server, and the folder that recipes write to."""

    cookbook: Cookbook
    endpoint: Endpoint
    folder: Path

    def environment(self, runs: Path) -> dict[str, str]:
        """A recipe's variables: no hub but the server's look-alike, an empty cache at first, logs below `runs`."""
        kept = {name: os.environ[name] for name in ("HOME", "LANG", "TMPDIR") if name in os.environ}
        return kept | {
            "PATH": os.pathsep.join([str(self.folder / "bin"), str(self.cookbook.python.parent), os.defpath]),
            "TINKER_BASE_URL": self.endpoint.base_url,
            "TINKER_API_KEY": self.endpoint.api_key,
            "TINKER_TELEMETRY": "0",
            "PYTHONFAULTHANDLER": "1",
            "TINKER_COOKBOOK_RUNS_DIR": str(runs),
            "HF_ENDPOINT": f"{self.endpoint.base_url}/hf",
            "HF_HOME": str(self.folder / "hf-home"),
            "OMP_NUM_THREADS": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "NO_COLOR": "1",
            "COLUMNS": "160",
        }


@contextmanager
def kitchen(cookbook: Cookbook, folder: Path, names: Sequence[str] = NAMES) -> Generator[Kitchen]:
    """Build model and data sets in the (emptied) `folder` and serve them."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    stand_in = model.build(folder / "model" / "stand-in", smollm2())
    sets = datasets.write_all(folder / "datasets")
    datasets.write_conversations(folder / "conversations.jsonl", 64)
    _uv(folder / "bin" / "uv", cookbook.python)
    arguments = ["--model", str(stand_in), "--data-dir", str(folder / "data"), "--dtype", "float32", "--threads", "1"]
    for name in names:
        arguments += ["--alias", f"{name}=local/stand-in"]
    with local_server(folder / "server.log", arguments, _server_environment(folder, sets)) as endpoint:
        yield Kitchen(cookbook, endpoint, folder)


def smollm2() -> Path:
    """The embedded model's folder, which `openrl models pull` has made."""
    folder = load({}).settings.data_dir / "models" / "smollm2-135m-instruct"
    assert folder.is_dir(), "run: openrl models pull smollm2-135m-instruct"
    return folder


def _server_environment(folder: Path, sets: Path) -> Mapping[str, str]:
    """The server gets a Hugging Face cache of its own: the stand-in's tokenizer must not lie under the names of real
    models in the user's."""
    return {"OPENRL_DATASETS_DIR": str(sets), "HF_HOME": str(folder / "server-hf-home"), "HF_HUB_OFFLINE": "1"}


def _uv(path: Path, python: Path) -> None:
    """The cookbook's tests start recipes with `uv run python -m RECIPE`, which would make an environment of its own.

    This `uv` runs them in ours. Recipes whose default loss hosted Tinker alone has get another one.
    """
    path.parent.mkdir()
    path.write_text(
        f"""#!/bin/sh
shift 2
case "$*" in
  *math_rl.train*) exec "{python}" "$@" loss_fn=importance_sampling ;;
  *) exec "{python}" "$@" ;;
esac
"""
    )
    path.chmod(path.stat().st_mode | stat.S_IXUSR)

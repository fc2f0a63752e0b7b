"""The API key of this machine: made once, kept in the data folder, readable by its owner only."""

from __future__ import annotations

import os
import re
import secrets
from pathlib import Path

from openrl.errors import SettingsError

_FILE = "api_key"
_FORM = re.compile(r"tml-[A-Za-z0-9_-]{8,}")  # the SDK refuses keys without the prefix


def api_key(data_dir: Path) -> str:
    """The key in `<data_dir>/api_key`, made if it is missing. Raises SettingsError if the file holds something else."""
    path = data_dir / _FILE
    if not path.exists():
        _make(path)
    key = path.read_text().strip()
    if not _FORM.fullmatch(key):
        raise SettingsError(
            f"{path} does not hold an API key (`tml-` and at least 8 letters, digits, '_' or '-').",
            "Remove the file to get a new key.",
        )
    return key


def _make(path: Path) -> None:
    """Write a new key beside and link it, so that of two processes one wins and none reads half a key."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".tmp-{_FILE}-{os.getpid()}")
    with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        file.write(f"tml-{secrets.token_urlsafe(32)}\n")  # 32 bytes are 43 characters
    try:
        os.link(draft, path)
    except FileExistsError:
        return
    finally:
        draft.unlink()

"""The API key of this machine: made once, kept in the data folder, readable by its owner only."""

from __future__ import annotations

import re
import secrets
from pathlib import Path

from openrl.errors import SettingsError
from openrl.private_file import make_once

_FILE = "api_key"
_FORM = re.compile(r"tml-[A-Za-z0-9_-]{8,}")  # the SDK refuses keys without the prefix


def is_key(text: str) -> bool:
    """Whether a text has the form of an API key."""
    return _FORM.fullmatch(text) is not None


def api_key(data_dir: Path) -> str:
    """The key in `<data_dir>/api_key`, made if it is missing. Raises SettingsError if the file holds something else."""
    path = data_dir / _FILE
    make_once(path, f"tml-{secrets.token_urlsafe(32)}\n")  # 32 bytes are 43 characters
    key = path.read_text().strip()
    if not _FORM.fullmatch(key):
        raise SettingsError(
            f"{path} does not hold an API key (`tml-` and at least 8 letters, digits, '_' or '-').",
            "Remove the file to get a new key.",
        )
    return key

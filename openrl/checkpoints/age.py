"""Files that only chosen people can read: age encryption (age-encryption.org) of exported weights, through `pyrage`.

The library is an extra, `openrl[age]`: most servers never encrypt.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from openrl.errors import BadRequest

SUFFIX = ".age"
MAX_RECIPIENTS = 10


def check_recipients(recipients: Sequence[str]) -> None:
    """Raises BadRequest if files cannot be encrypted to these recipients here."""
    _parse(recipients)


def encrypt_files(folder: Path, recipients: Sequence[str]) -> None:
    """Replace each file of `folder` by its encrypted form, with `.age` behind its name."""
    age, parsed = _library(), _parse(recipients)
    for path in sorted(folder.iterdir()):
        age.encrypt_file(str(path), str(path.with_name(path.name + SUFFIX)), parsed)
        path.unlink()


def _parse(recipients: Sequence[str]) -> list[Any]:
    if not 1 <= len(recipients) <= MAX_RECIPIENTS:
        raise BadRequest(f"age_encryption_recipients has {len(recipients)} entries; legal: 1 to {MAX_RECIPIENTS}.")
    age = _library()
    parsed: list[Any] = []
    for index, text in enumerate(recipients):
        kind = age.ssh if text.startswith("ssh-") else age.x25519
        try:
            parsed.append(kind.Recipient.from_str(text))
        except age.RecipientError as error:
            raise BadRequest(
                f"age_encryption_recipients[{index}] is no public key: {error}.",
                "Give an `age1...` key or an SSH public key (ssh-ed25519 or ssh-rsa).",
            ) from error
    return parsed


def _library() -> Any:
    try:
        return importlib.import_module("pyrage")
    except ImportError:
        raise BadRequest(
            "this server cannot encrypt: age_encryption_recipients needs the package pyrage.",
            "Install openrl[age] on the server, or save without recipients.",
        ) from None

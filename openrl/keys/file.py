"""The keys file: keys that someone else keeps, such as a mounted secret, where no command can be run.

```toml
[[key]]
owner = "alice"
key = "tml-..."             # or: sha256 = "<the key's sha256 in hex>", so that the file opens nothing
scopes = ["use"]            # use, read, admin; `use` if left out
expires = 2027-01-01T00:00:00Z
runs = 2                    # quotas: runs, tokens_per_day, checkpoint_bytes
```
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any

from openrl.errors import BadRequest, SettingsError
from openrl.keys.key import STRONG, Key, Quotas, check_key, digest, scopes_of
from openrl.keys.principal import Scope

_HASH = re.compile(r"[0-9a-f]{64}")
_QUOTAS = ("runs", "tokens_per_day", "checkpoint_bytes")
_FIELDS = ("owner", "key", "sha256", "scopes", "expires", "note", *_QUOTAS)


def read_keys(path: Path) -> list[Key]:
    """The keys of a file. Raises SettingsError that names file and entry, and never repeats a key."""
    try:
        content = tomllib.loads(path.read_text())
    except OSError as error:
        raise SettingsError(f"the keys file {path} cannot be read: {error.strerror}.") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError):
        raise SettingsError(f"the keys file {path} is not valid TOML.") from None
    entries = content.pop("key", [])
    if content or not isinstance(entries, list):
        raise SettingsError(f"the keys file {path} holds {', '.join(content) or 'key'}.", "It is a list of [[key]].")
    keys: list[Key] = []
    for number, entry in enumerate(entries, 1):  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
        try:
            keys.append(_key(entry))
        except BadRequest as error:
            raise SettingsError(f"{path}, key {number}: {error.message}", error.hint) from None
    if len({key.digest for key in keys}) < len(keys):
        raise SettingsError(f"{path} holds the same key twice.")
    return keys


def _key(entry: object) -> Key:
    if not isinstance(entry, dict):
        raise BadRequest("it is no table.", "Write [[key]] above each.")
    fields: Mapping[str, Any] = entry  # pyright: ignore[reportUnknownVariableType]
    unknown = [name for name in fields if name not in _FIELDS]
    if unknown:
        raise BadRequest(f"unknown field {unknown[0]!r}.", f"Known are: {', '.join(_FIELDS)}.")
    key = Key(
        digest=_digest(fields.get("key"), fields.get("sha256")),
        owner=_text(fields, "owner"),
        scopes=scopes_of(_words(fields.get("scopes", [str(Scope.USE)]))),
        quotas=Quotas(*(_count(fields, name) for name in _QUOTAS)),
        note=_text(fields, "note") if "note" in fields else "",
        source="file",
    )
    key = replace(key, expires_at=_expiry(fields.get("expires")))
    check_key(key)
    return key


def _digest(key: object, hashed: object) -> str:
    if hashed is None and isinstance(key, str):
        if not STRONG.fullmatch(key):
            raise BadRequest("key is not one.", "A key is `tml-` and at least 32 letters, digits, '_' or '-'.")
        return digest(key)
    if key is None and isinstance(hashed, str) and _HASH.fullmatch(hashed):
        return hashed
    raise BadRequest("it needs key (a text) or sha256 (64 digits 0-9a-f), and not both.")


def _text(fields: Mapping[str, Any], name: str) -> str:
    value = fields.get(name, "")
    if not isinstance(value, str):
        raise BadRequest(f"{name} must be a text, got {value!r}.")
    return value


def _words(value: object) -> list[str]:
    words: list[object] = value if isinstance(value, list) else [None]  # pyright: ignore[reportUnknownVariableType]
    if not all(isinstance(word, str) for word in words):
        raise BadRequest(f"scopes must be a list of texts, got {value!r}.")
    return [str(word) for word in words]


def _count(fields: Mapping[str, Any], name: str) -> int | None:
    value = fields.get(name)
    if value is not None and (not isinstance(value, int) or isinstance(value, bool)):
        raise BadRequest(f"{name} must be a whole number, got {value!r}.")
    return value


def _expiry(value: object) -> float | None:
    """A TOML date-time, or a date, whose end of life is its beginning in UTC; without offset it counts as UTC."""
    if isinstance(value, datetime):
        return (value if value.tzinfo is not None else value.replace(tzinfo=UTC)).timestamp()
    if isinstance(value, date):
        return datetime(value.year, value.month, value.day, tzinfo=UTC).timestamp()
    if value is not None:
        raise BadRequest(f"expires must be a date-time such as 2027-01-01T00:00:00Z, got {value!r}.")
    return None

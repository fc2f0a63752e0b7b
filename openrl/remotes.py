"""Other OpenRL servers by name: where they are, how to reach them, and where their keys come from.

They are kept in one file (docs/remote.md), which holds no key: a `TokenSource` says where one is, and it is read when
it is needed. Nothing here prints, logs or raises a key.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from openrl import private_file
from openrl.errors import BadRequest, SettingsError
from openrl.kube import DEFAULT_PORT, KubeTarget
from openrl.settings import remotes_file
from openrl.tokens import TokenSource

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


@dataclass(frozen=True, slots=True)
class Remote:
    """A server and how to reach it.

    `url` has no trailing slash. With `kube`, it is only what to call the server: calls go to a port-forward's URL.
    `ca_file` holds the certificates (PEM) that vouch for the server, instead of the system's.
    """

    name: str
    url: str
    token: TokenSource
    ca_file: Path | None = None
    kube: KubeTarget | None = None


@dataclass(frozen=True, slots=True)
class _Book:
    remotes: dict[str, Remote]
    default: str | None


def load_remotes() -> dict[str, Remote]:
    """All named remotes. Raises SettingsError for a file that cannot be read."""
    return _load().remotes


def default_name() -> str | None:
    """The remote that is meant where none is named."""
    return _load().default


def save(remote: Remote, *, replace: bool = False) -> None:
    """Keep a remote under its name; the first one becomes the default. Raises SettingsError if the name is taken."""
    book = _load()
    if remote.name in book.remotes and not replace:
        raise SettingsError(
            f"remote {remote.name!r} exists.", f"Replace it with --force: {book.remotes[remote.name].url}"
        )
    _store(_Book({**book.remotes, remote.name: remote}, book.default or remote.name))


def remove(name: str) -> Remote:
    """Forget a remote; the default, if it was that, is then unset. Returns it. Raises SettingsError."""
    book = _load()
    gone = _known(book, name)
    _store(_Book({n: r for n, r in book.remotes.items() if n != name}, None if book.default == name else book.default))
    return gone


def set_default(name: str) -> None:
    """Raises SettingsError for an unknown name."""
    book = _load()
    _known(book, name)
    _store(_Book(book.remotes, name))


def find(name_or_url: str | None = None) -> Remote:
    """A remote by its name, or by a URL; None: the default.

    A URL that no remote has gives one without a key. Raises SettingsError for an unknown name and a malformed URL.
    """
    book = _load()
    if name_or_url is None:
        if book.default is None:
            raise SettingsError("no remote is named, and there is no default.", _known_names(book))
        return book.remotes[book.default]
    if "://" not in name_or_url:
        return _known(book, name_or_url)
    url = check_url(name_or_url)
    named = (remote for remote in book.remotes.values() if remote.url == url and remote.kube is None)
    return next(named, Remote(url, url, TokenSource("none")))


def check_name(name: str) -> str:
    """The name, if it can be one. Raises SettingsError."""
    if not _NAME.fullmatch(name):
        raise SettingsError(
            f"{name!r} is no name for a remote.",
            "Legal: up to 64 letters, digits, '.', '_' and '-', the first no mark.",
        )
    return name


def check_url(url: str) -> str:
    """The URL without a trailing slash. Raises SettingsError if a server of ours cannot have it."""
    malformed = SettingsError(
        f"{_without_password(url)!r} is no server's URL.", "The form is http[s]://HOST[:PORT][/PATH]."
    )
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        raise malformed from None
    if parts.scheme not in ("http", "https") or not parts.hostname or port == 0 or parts.query or parts.fragment:
        raise malformed
    if re.search(r"[\s\x00-\x1f\x7f]", url):
        raise malformed
    if parts.username is not None or parts.password is not None:
        raise SettingsError("a URL must not hold a user or a password.", "Give the key by --token-from.")
    return url.rstrip("/").removesuffix("/api/v1")


def _without_password(url: str) -> str:
    return re.sub(r"//[^/@]*@", "//", url)


def _known(book: _Book, name: str) -> Remote:
    if name not in book.remotes:
        raise SettingsError(f"there is no remote {name!r}.", _known_names(book))
    return book.remotes[name]


def _known_names(book: _Book) -> str:
    if not book.remotes:
        return "Add one with: openrl remote add NAME URL"
    return f"Known are: {', '.join(book.remotes)}. Choose the default with: openrl remote use NAME"


# -- the file --


@dataclass(frozen=True, slots=True)
class _KubeTable:
    service: str
    namespace: str = "default"
    port: int = DEFAULT_PORT
    context: str | None = None


@dataclass(frozen=True, slots=True)
class _Table:
    url: str
    token: str
    ca_file: str | None = None
    kube: _KubeTable | None = None


@dataclass(frozen=True, slots=True)
class _File:
    default: str | None = None
    remotes: Mapping[str, _Table] = field(default_factory=dict[str, _Table])


def _load() -> _Book:
    from openrl.codec import decode_object  # brings pydantic; `openrl --help` does without

    path = remotes_file()
    try:
        content = decode_object(_File, tomllib.loads(path.read_text()), "the file")
        remotes = {name: _remote(name, table) for name, table in content.remotes.items()}
    except FileNotFoundError:
        return _Book({}, None)
    except OSError as error:
        raise SettingsError(f"{path} cannot be read: {error.strerror}.") from error
    except (ValueError, BadRequest, SettingsError) as error:
        raise SettingsError(f"{path} is no list of remotes: {error}", "Mend it, or remove it to start anew.") from None
    if content.default is not None and content.default not in remotes:
        raise SettingsError(f"{path}: the default {content.default!r} is none of its remotes.", "Mend its first line.")
    return _Book(remotes, content.default)


def _remote(name: str, table: _Table) -> Remote:
    kube = table.kube
    return Remote(
        check_name(name),
        check_url(table.url),
        TokenSource.parse(table.token),
        None if table.ca_file is None else Path(table.ca_file),
        None if kube is None else KubeTarget(kube.service, kube.namespace, kube.port, kube.context),
    )


def _store(book: _Book) -> None:
    lines = ["# Written by `openrl remote`. It holds no keys, only where they are."]
    if book.default is not None:
        lines.append(f"default = {_text(book.default)}")
    for remote in book.remotes.values():
        lines += ["", f"[remotes.{_text(remote.name)}]", *_fields(remote)]
    private_file.write(remotes_file(), "\n".join(lines) + "\n")


def _fields(remote: Remote) -> list[str]:
    lines = [f"url = {_text(remote.url)}", f"token = {_text(str(remote.token))}"]
    if remote.ca_file is not None:
        lines.append(f"ca_file = {_text(str(remote.ca_file))}")
    if remote.kube is not None:
        kube = remote.kube
        fields = [f"service = {_text(kube.service)}", f"namespace = {_text(kube.namespace)}", f"port = {kube.port}"]
        if kube.context is not None:
            fields.append(f"context = {_text(kube.context)}")
        lines.append(f"kube = {{ {', '.join(fields)} }}")
    return lines


def _text(value: str) -> str:
    """A TOML string. JSON's escapes are TOML's too, but for DEL, which JSON leaves as it is."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")

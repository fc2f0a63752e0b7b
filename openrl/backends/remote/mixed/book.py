"""What lives on which remote: remembered from the moment it is made, also over a restart.

A client knows one session, which this machine made; each remote has one of its own in its place. Ids that a remote gave
are recognised by the session that they begin with, as the protocol wants it (11.1). A run that the client names itself,
by its own session (T19), is an alias of the remote's.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from openrl.codec import decode_json, encode_json
from openrl.errors import BadRequest

log = logging.getLogger(__name__)

SCHEME = "tinker://"


@dataclass(frozen=True, slots=True)
class Place:
    """Where something is; `remote` None is this machine. `there` is what it is called there."""

    remote: str | None
    there: str


@dataclass(frozen=True, slots=True)
class _Line:
    """One line of the file. With `session` and `remote`, a session's counterpart; with `session` and `body`, how it was
    made; with `id`, what a remote has under an id of its own; with `alias`, another name for a run."""

    session: str | None = None
    body: dict[str, Any] | None = None
    remote: str | None = None
    there: str | None = None
    id: str | None = None
    alias: str | None = None


def remote_for(base_model: str, routes: dict[str, str]) -> str | None:
    """Which remote serves a base model; None: this machine. The first pattern that matches counts."""
    return next((name for pattern, name in routes.items() if fnmatchcase(base_model, pattern)), None)


class Book:
    """Kept as lines that are only ever added, so that a crash costs at most the last one."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._bodies: dict[str, dict[str, Any]] = {}
        self._sessions: dict[str, dict[str, str]] = {}
        self._owners: dict[str, str] = {}
        self._aliases: dict[str, Place] = {}
        for line in _load(file):
            self._take(line)

    # -- asking --

    def place(self, identifier: str) -> Place:
        """Where a session, run, sampler or request is, and its id there."""
        head, _, rest = identifier.partition("/")  # a checkpoint's path goes on after its run
        alias = self._alias(head)
        if alias is not None:
            return Place(alias.remote, f"{alias.there}/{rest}" if rest else alias.there)
        owner = self._owners.get(head) or self._owners.get(head.partition(":")[0])
        return Place(owner, identifier)

    def path_place(self, path: str) -> Place:
        """The same for a `tinker://` path."""
        found = self.place(path.removeprefix(SCHEME))
        return Place(found.remote, SCHEME + found.there) if path.startswith(SCHEME) else Place(None, path)

    def counterpart(self, session: str, remote: str) -> str | None:
        return self._sessions.get(session, {}).get(remote)

    def counterparts(self, session: str) -> dict[str, str]:
        """Of a session of ours: its ids by remote."""
        return dict(self._sessions.get(session, {}))

    def made_with(self, session: str) -> dict[str, Any]:
        """The body that a session was made with."""
        return self._bodies.get(session, {})

    def is_counterpart(self, session: str) -> bool:
        return any(session in there.values() for there in self._sessions.values())

    def _alias(self, identifier: str) -> Place | None:
        """Of a run, or of what its id goes on to: `{run}:{seq}`."""
        if identifier in self._aliases:
            return self._aliases[identifier]
        run, _, seq = identifier.rpartition(":")
        if run in self._aliases and seq:
            found = self._aliases[run]
            return Place(found.remote, f"{found.there}:{seq}")
        return None

    # -- telling --

    def made(self, session: str, body: dict[str, Any]) -> None:
        self._add(_Line(session=session, body=body))

    def mirrored(self, session: str, remote: str, there: str) -> None:
        self._add(_Line(session=session, remote=remote, there=there))

    def renamed(self, alias: str, remote: str, there: str) -> None:
        if self._aliases.get(alias) != Place(remote, there):
            self._add(_Line(alias=alias, remote=remote, there=there))

    def owns(self, remote: str, identifier: str) -> None:
        """A remote has something; nothing is written if that can be told already."""
        if self.place(identifier).remote != remote:
            self._add(_Line(id=identifier, remote=remote))

    def _add(self, line: _Line) -> None:
        self._take(line)
        self._file.parent.mkdir(parents=True, exist_ok=True)
        content = {name: value for name in _Line.__slots__ if (value := getattr(line, name)) is not None}
        with self._file.open("ab") as file:
            file.write(encode_json(content) + b"\n")

    def _take(self, line: _Line) -> None:
        match line:
            case _Line(session=str(session), body=dict(body)):
                self._bodies[session] = body
            case _Line(session=str(session), remote=str(remote), there=str(there)):
                self._sessions.setdefault(session, {})[remote] = there
                self._owners[there] = remote
            case _Line(alias=str(alias), remote=str(remote), there=str(there)):
                self._aliases[alias] = Place(remote, there)
            case _Line(id=str(identifier), remote=str(remote)):
                self._owners[identifier] = remote
            case _:
                log.warning("a line of the book of remotes means nothing: %s", line)


def _load(file: Path) -> list[_Line]:
    try:
        lines = file.read_bytes().split(b"\n")
    except FileNotFoundError:
        return []
    found: list[_Line] = []
    for line in filter(None, lines):
        try:
            found.append(decode_json(_Line, line))
        except BadRequest:
            log.warning("%s has a line that was not written to its end; it is left out", file)
    return found

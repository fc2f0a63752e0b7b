"""Where a remote's key is, and how it is read: a variable, a file, a command, the system keyring, or nowhere.

A key is read when it is needed and never kept on disk by us, save by `openrl remote login`.
"""

from __future__ import annotations

import re
import shlex
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast, get_args

from openrl.errors import SettingsError
from openrl.settings import variable

Kind = Literal["env", "file", "command", "keyring", "none"]
LEGAL = 'env:VARIABLE, file:PATH, command:"PROGRAM ARGUMENTS", keyring or none'
_COMMAND_SECONDS = 60.0
_KEY = re.compile(r"[\x21-\x7e]+")  # what a header can carry
_SECRET = re.compile(r"(tml-|eyJ)[A-Za-z0-9._-]+")


@dataclass(frozen=True, slots=True)
class TokenSource:
    """`value` is the variable, the absolute path, the command line, or the name under which the keyring has it."""

    kind: Kind
    value: str = ""

    def __str__(self) -> str:
        """As `--token-from` takes it; holds no key."""
        return f"{self.kind}:{self.value}" if self.value else self.kind

    @property
    def shown(self) -> str:
        """For people: as `str`, without what looks like a key that someone has written into a command line."""
        return _SECRET.sub("[hidden]", str(self))

    @staticmethod
    def parse(text: str) -> TokenSource:
        """The inverse of `str`. Raises ValueError that says what is legal, without repeating what may be a key."""
        kind, _, value = text.partition(":")
        if kind not in get_args(Kind):
            raise ValueError(f"the given text does not say where the key is; legal: {LEGAL}")
        if kind != "keyring" and (kind == "none") == bool(value):
            raise ValueError(f"{kind} is not complete, or too much; legal: {LEGAL}")
        return TokenSource(cast("Kind", kind), value)

    def read(self) -> str:
        """The key; "" for `none`. May take seconds (a command, a keyring that asks): call it off the event loop.

        Raises SettingsError that says what to do, and never holds the key.
        """
        match self.kind:
            case "env":
                found = self._from_variable()
            case "file":
                found = self._from_file()
            case "command":
                found = self._from_command()
            case "keyring":
                found = self._from_keyring()
            case "none":
                return ""
        key = found.strip()
        if not _KEY.fullmatch(key):
            what = "nothing" if not key else "more than one word, or characters that no key has"
            raise SettingsError(
                f"the key's source ({self.shown}) gives {what}.", "It must give the key and nothing else."
            )
        return key

    def _from_variable(self) -> str:
        found = variable(self.value)
        if found is None:
            raise SettingsError(f"the variable {self.value}, which is to hold the key, is not set.", "Export it first.")
        return found

    def _from_file(self) -> str:
        try:
            return Path(self.value).read_text(errors="replace")
        except OSError as error:
            raise SettingsError(
                f"the key's file {self.value} cannot be read: {error.strerror}.",
                "Write the key into it (chmod 600), or store it with: openrl remote login NAME",
            ) from None

    def _from_command(self) -> str:
        try:
            words = shlex.split(self.value)
            done = subprocess.run(
                words, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_COMMAND_SECONDS, check=False
            )
        except subprocess.TimeoutExpired:
            raise SettingsError(f"the key's source ({self.shown}) took over {_COMMAND_SECONDS:.0f} s.") from None
        except (OSError, ValueError) as error:
            raise SettingsError(f"the key's source ({self.shown}) cannot be run: {error}.") from None
        if done.returncode:
            said = _SECRET.sub("[hidden]", done.stderr.strip().rpartition("\n")[2])
            raise SettingsError(f"the key's source ({self.shown}) failed with status {done.returncode}: {said}")
        return done.stdout

    def _from_keyring(self) -> str:
        from openrl import keyrings  # optional, and slow to import

        found = keyrings.get(self.value)
        if found is None:
            raise SettingsError(
                f"the system keyring has no key for the remote {self.value!r}.",
                f"Store it with: openrl remote login {self.value}",
            )
        return found

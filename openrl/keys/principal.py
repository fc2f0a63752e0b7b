"""Who a call comes from, and what that lets them do."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum

LOCAL_OWNER = "local"  # the machine's own: everything belongs to it that came before keys, or came without one
ANYONE = "*"  # a reader who may read what belongs to whomever: an administrator

OWNER_PATTERN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,63}")


class Scope(StrEnum):
    """What a key is good for."""

    USE = "use"  # train, sample, and change what is its owner's
    READ = "read"  # look at what is its owner's, and at the server's own figures
    ADMIN = "admin"  # everything, whoever it belongs to, and making keys


@dataclass(frozen=True, slots=True)
class Principal:
    """Whom a call comes from. `key` is the id of the key that said so, empty where none was asked for."""

    owner: str
    scopes: frozenset[Scope]
    key: str = ""

    @property
    def is_admin(self) -> bool:
        return Scope.ADMIN in self.scopes

    @property
    def can_work(self) -> bool:
        return self.is_admin or Scope.USE in self.scopes

    @property
    def reader(self) -> str:
        """As whom it reads checkpoints (`may_read`)."""
        return ANYONE if self.is_admin else self.owner

    def sees(self, owner: str | None) -> bool:
        """Whether it may see what belongs to `owner`; None is what belongs to nobody known."""
        return self.is_admin or owner == self.owner


LOCAL = Principal(LOCAL_OWNER, frozenset({Scope.ADMIN}))


def may_read(reader: str, owner: str, *, public: bool) -> bool:
    """Whether someone may read a checkpoint of `owner`; a published one is everybody's to read."""
    return public or reader in (owner, ANYONE)

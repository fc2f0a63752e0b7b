"""All keys of a server in memory, so that a call costs no look into the store; and who hangs on which key."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager

from openrl.keys.key import UNLIMITED, Key, Quotas, digest, machine_key

End = Callable[[], object]


class Keyring:
    """Three kinds of keys: the machine's own, those made by command (kept in the store), and those of the keys file.

    `holding` is for calls that wait: they are told when the key that they came with is revoked or expires.
    """

    def __init__(self) -> None:
        self._machine: Key | None = None
        self._stored: dict[str, Key] = {}  # these two by digest
        self._filed: dict[str, Key] = {}
        self._ids: dict[str, Key] = {}  # all, by id
        self._quotas: dict[str, Quotas] = {}  # by owner
        self._held: dict[str, set[End]] = {}  # by key id

    # -- asking --

    def open(self, given: str) -> Key | None:
        """The live key that a text is, if it is one."""
        found = digest(given)
        machine = self._machine
        if machine is not None and machine.digest == found:
            return machine
        key = self._stored.get(found) or self._filed.get(found)
        return key if key is not None and key.is_live(time.time()) else None

    def find(self, identity: str) -> Key | None:
        """A live key by its id."""
        key = self._ids.get(identity)
        return key if key is not None and key.is_live(time.time()) else None

    def all(self) -> list[Key]:
        """All keys, revoked and expired ones included; oldest first."""
        return sorted(self._ids.values(), key=lambda key: (key.created_at, key.id))

    def quotas(self, owner: str) -> Quotas:
        """What an owner may have: the most generous of its keys that are not revoked; none without such a key."""
        return self._quotas.get(owner, UNLIMITED)

    # -- changing --

    def set_machine(self, key: str) -> None:
        self._machine = machine_key(key)
        self._changed()

    def put(self, *keys: Key) -> None:
        """Keys of the store: new ones, or as they are from now on."""
        self._stored |= {key.digest: key for key in keys}
        self._changed()

    def set_filed(self, keys: Iterable[Key]) -> None:
        """The keys of the keys file, in place of those that were there."""
        self._filed = {key.digest: key for key in keys}
        self._changed()

    def _changed(self) -> None:
        machine = [] if self._machine is None else [self._machine]
        every = [*self._filed.values(), *self._stored.values(), *machine]
        self._ids = {key.id: key for key in every}
        quotas: dict[str, Quotas] = {}
        for key in self._ids.values():
            if key.revoked_at is None:
                known = quotas.get(key.owner)
                quotas[key.owner] = key.quotas if known is None else known.or_more(key.quotas)
        self._quotas = quotas
        self.end_dead()

    # -- waiting --

    @contextmanager
    def holding(self, identity: str, end: End) -> Generator[None]:
        """For the time of the block, `end` is called as soon as the key is good no more; at once if it is not now.

        An empty id is of a caller that needed no key.
        """
        if identity and self.find(identity) is None:
            end()
        held = self._held.setdefault(identity, set())
        held.add(end)
        try:
            yield
        finally:
            held.discard(end)
            if not held and self._held.get(identity) is held:
                del self._held[identity]

    def end_dead(self) -> None:
        """Tell those who wait with a key that is good no more; called after each change, and by the clock."""
        for identity in [held for held in self._held if held and self.find(held) is None]:
            for end in self._held.pop(identity):
                end()

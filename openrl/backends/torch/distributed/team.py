"""Rank 0's hold on all ranks, itself among them: what is told to all, and what they answer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from openrl.backends.torch.distributed.commands import Answer, Command
from openrl.backends.torch.distributed.followers import Followers
from openrl.backends.torch.distributed.group import GroupBroken
from openrl.backends.torch.distributed.member import Member

A = TypeVar("A", bound=Answer)


class Team:
    """`lost` is called when a rank is gone: nothing can be done with the others any more."""

    def __init__(self, member: Member, followers: Followers, lost: Callable[[str], None]) -> None:
        self.member = member
        self.followers = followers
        self._lost = lost
        self._fault: GroupBroken | None = None

    @property
    def size(self) -> int:
        return self.member.group.size

    def tell(self, command: Command) -> None:
        """Have a command carried out that is not answered. Raises `GroupBroken`."""
        self._all([command] * self.size)

    def ask(self, commands: Command | Sequence[Command], kind: type[A]) -> list[A]:
        """The answers of all ranks, by rank, to the same command or to one for each. Raises `GroupBroken`."""
        given = commands if isinstance(commands, Sequence) else [commands] * self.size
        others: list[Answer] = []
        try:
            own = self._all(given)
        finally:  # whatever becomes of ours, theirs must not be taken for those to a later command
            if self._fault is None:
                others = self._collected()
        return [answer for answer in (own, *others) if isinstance(answer, kind)]

    def end(self, command: Command) -> None:
        """As `tell`; nothing where there is nobody left to tell."""
        if self._fault is None:
            self.tell(command)

    def lose(self, error: GroupBroken) -> GroupBroken:
        """End all other ranks; returns the error, which every later command raises, too."""
        if self._fault is None:
            self._fault = error
            self.followers.close()
            self._lost(str(error))
        return self._fault

    def close(self) -> None:
        """End all other ranks, in good order."""
        self.followers.close()
        self.member.group.leave()

    def _collected(self) -> list[Answer]:
        try:
            return self.followers.answers()
        except GroupBroken as error:
            raise self.lose(error) from error

    def _all(self, commands: Sequence[Command]) -> Answer:
        if self._fault is not None:
            raise self._fault
        try:
            self.followers.tell(commands[1:])
            return self.member.do(commands[0])
        except GroupBroken as error:
            raise self.lose(error) from error

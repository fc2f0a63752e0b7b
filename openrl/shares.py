"""Fair shares of a device by virtual token counters: pure bookkeeping, no clock and no input or output.

The rule is that of the Virtual Token Counter in "Fairness in Serving Large Language Models" (Sheng et al., OSDI 2024):
each session has a counter of the tokens that it was served, divided by its weight; whoever has the least goes next.
A session that had no work for a while is lifted to the least counter among those that have, so that idle time gives
no credit; and whoever comes to an idle device to the counter of the session that was there last, so that it gives no
advantage over that one either. Between sessions that always have work, counters therefore differ by no more than a
request's tokens or so, whatever they send and however much. On ties the session that was served longest ago goes first.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from openrl.types import SessionId

_SPARE_ACCOUNTS = 64  # of sessions without work, that are kept before they are looked through


@dataclass(slots=True)
class Account:
    """What a session was served: `counter` in tokens divided by `weight`; `turn` counts up at each service."""

    counter: float = 0.0
    weight: float = 1.0
    turn: int = 0

    @property
    def rank(self) -> tuple[float, int]:
        """Whose is least goes next."""
        return self.counter, self.turn


class Shares:
    """The accounts of the sessions that use one lane of a device (its training, or its sampling)."""

    def __init__(self) -> None:
        self._accounts: dict[SessionId, Account] = {}
        self._active: frozenset[SessionId] = frozenset()
        self._floor = 0.0  # the counter of the session that was last to leave
        self._turn = 0

    @property
    def active(self) -> frozenset[SessionId]:
        """The sessions that have work, waiting or in hand."""
        return self._active

    def sync(self, weights: Mapping[SessionId, float]) -> None:
        """Say which sessions have work now, waiting or in hand, and what they weigh; newcomers are lifted."""
        active = frozenset(weights)
        came, left, stayed = active - self._active, self._active - active, active & self._active
        self._floor = max([self._floor, *(self._accounts[session].counter for session in left)])
        if came:
            floor = min((self._accounts[session].counter for session in stayed), default=self._floor)
            for session in came:
                account = self._accounts.setdefault(session, Account())
                account.counter = max(account.counter, floor)
        for session, weight in weights.items():
            self._accounts[session].weight = weight
        self._active = active
        if len(self._accounts) > 2 * len(active) + _SPARE_ACCOUNTS:
            self._forget()

    def _forget(self) -> None:
        """Drop accounts that say no more than none would: whoever comes back is lifted at least as far."""
        floor = min((self._accounts[session].counter for session in self._active), default=self._floor)
        self._accounts = {
            session: account
            for session, account in self._accounts.items()
            if session in self._active or account.counter > floor
        }

    def charge(self, session: SessionId, tokens: float) -> None:
        """Add to what an active session was served (or take back, when an estimate was too high)."""
        account = self._accounts[session]
        account.counter += tokens / account.weight

    def serve(self, session: SessionId, tokens: float) -> None:
        """As `charge`, for a session whose turn it is."""
        self._turn += 1
        self._accounts[session].turn = self._turn
        self.charge(session, tokens)

    def account(self, session: SessionId) -> Account:
        """A session's account; an empty one for a session that never had work here."""
        return self._accounts.get(session, Account())

    def accounts(self) -> Mapping[SessionId, Account]:
        """Accounts of the active sessions; not to be changed."""
        return {session: self._accounts[session] for session in self._active}

"""Quotas: whether an owner may have one more run, more tokens today, more bytes of checkpoints.

Tokens are those that metering writes down; today's sums are read once, at the start, and then kept. Work under way is
counted from its acceptance on, so that many requests at once do not pass where one would not.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Generator
from contextlib import contextmanager

from openrl.daemon.runs import Runs
from openrl.daemon.sessions import Sessions
from openrl.daemon.work import Train, Work
from openrl.errors import Busy, QuotaExceeded
from openrl.keys.principal import LOCAL_OWNER
from openrl.keys.ring import Keyring
from openrl.store import checkpoints, usage
from openrl.store.db import Database
from openrl.store.records import Run, RunState, SessionState
from openrl.types import RequestId, RunId, SamplePayload, SessionId

DAY = 86400
_OPEN = (RunState.CREATING, RunState.LIVE)


class Quotas:
    """Answers for all owners at once; `ring` knows what each may have."""

    def __init__(self, db: Database, ring: Keyring, sessions: Sessions, runs: Runs) -> None:
        self._db = db
        self._ring = ring
        self._sessions = sessions
        self._runs = runs
        self._opening: dict[RunId, str] = {}  # runs on their way into the store, and whose they are
        self._day = 0
        self._spent: dict[str, float] = defaultdict(float)  # tokens of the day, by owner
        self._reserved: dict[str, dict[RequestId, int]] = defaultdict(dict)

    async def load(self) -> None:
        """Take up today's sums from the store."""
        self._day = int(time.time()) // DAY
        start = self._day * DAY
        self._spent = defaultdict(float, await self._db.run(lambda db: usage.tokens_by_owner(db, start)))

    # -- runs --

    @contextmanager
    def opening(self, run: Run) -> Generator[QuotaExceeded | None]:
        """Why its owner may not open a run, if so; if not, it counts as open from here on. Asking again is free."""
        if run.id in self._runs or run.id in self._opening:
            yield None
        elif (exceeded := self._check_new_run(run.owner)) is not None:
            yield exceeded
        else:
            self._opening[run.id] = run.owner
            try:
                yield None
            finally:
                del self._opening[run.id]

    def _check_new_run(self, owner: str) -> QuotaExceeded | None:
        """Runs of a session that fell silent are not counted: they are on no device, and a client that crashed must not
        keep its owner out for ever."""
        most = self._ring.quotas(owner).runs
        if most is None:
            return None
        count = sum(
            handle.run.owner == owner
            and handle.run.state in _OPEN
            and self._sessions.get(handle.run.session_id).state is SessionState.ACTIVE
            for handle in self._runs.all()
        ) + sum(opening == owner for opening in self._opening.values())
        if count < most:
            return None
        return QuotaExceeded(
            f"quota: {count} runs of {owner} are open; the limit is {most}.",
            "End one (close its ServiceClient), or ask the server's administrator for more.",
        )

    # -- tokens --

    def reserve(self, owner: str, request: RequestId, work: Work) -> None:
        """Count the tokens of a training pass as taken until it ends; other work costs none. Raises QuotaExceeded."""
        most = self._ring.quotas(owner).tokens_per_day
        if most is None or not isinstance(work, Train):
            return
        reserved = self._reserved[owner]
        if request in reserved:
            return
        tokens = sum(len(datum.tokens) for datum in work.payload.data)
        if (used := self.spent_today(owner)) + sum(reserved.values()) + tokens > most:
            raise _tokens_exceeded(owner, used, most, tokens)
        reserved[request] = tokens

    def reserve_sample(self, session: SessionId, request: RequestId, payload: SamplePayload) -> QuotaExceeded | None:
        """The same for a sample, whose drawn tokens nobody knows yet: its limit counts, while others are under way.

        What it is refused for now but may get once others have ended raises Busy (429: the SDK sends it again); what
        no waiting helps against is returned, to become the failure of its future.
        """
        owner = self._sessions.owner_of(session) or LOCAL_OWNER
        most = self._ring.quotas(owner).tokens_per_day
        reserved = self._reserved[owner] if most is not None else {}
        if most is None or request in reserved:
            return None
        used, prompt = self.spent_today(owner), len(payload.prompt)
        if used + prompt + payload.num_samples > most:
            return _tokens_exceeded(owner, used, most, prompt + payload.num_samples)
        tokens = prompt + payload.num_samples * (payload.params.max_tokens or 1)
        if reserved and used + sum(reserved.values()) + tokens > most:
            raise Busy(f"quota: what {owner} has under way may use up the {most} tokens of a day.", "Try again soon.")
        reserved[request] = tokens
        return None

    def spent(self, session: SessionId, tokens: float) -> None:
        """Tokens that were used, as metering has written them down."""
        owner = self._sessions.owner_of(session) or LOCAL_OWNER
        self.spent_today(owner)
        self._spent[owner] += tokens

    def release(self, request: RequestId) -> None:
        """A request has ended, however: what it used, if anything, is spent by now."""
        owner = self._sessions.owner_of(request) or LOCAL_OWNER
        if (reserved := self._reserved.get(owner)) is not None:
            reserved.pop(request, None)
            if not reserved:
                del self._reserved[owner]

    def spent_today(self, owner: str) -> float:
        """Tokens since midnight UTC."""
        if (today := int(time.time()) // DAY) != self._day:
            self._day = today
            self._spent.clear()
        return self._spent.get(owner, 0.0)

    # -- bytes --

    async def check_room(self, owner: str, size: int, *, replaced: int = 0) -> None:
        """Raises QuotaExceeded if an owner may not keep `size` bytes more, in place of `replaced` bytes."""
        most = self._ring.quotas(owner).checkpoint_bytes
        if most is None:
            return
        stored = await self._db.run(lambda db: checkpoints.bytes_of(db, owner))
        if stored - replaced + size > most:
            raise QuotaExceeded(
                f"quota: the checkpoints of {owner} take {stored} bytes; with {size} more they would pass the limit of "
                f"{most}.",
                "Delete some, or ask the server's administrator for more.",
            )


def _tokens_exceeded(owner: str, used: float, most: int, tokens: int) -> QuotaExceeded:
    return QuotaExceeded(
        f"quota: {owner} has used {round(used)} of {most} tokens today; this needs at least {tokens} more.",
        "Go on after midnight UTC, or ask the server's administrator for more.",
    )

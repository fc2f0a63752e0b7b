"""Gets kept requests to the remote, whatever happens on the way.

A request that was sent but not answered is sent again until it is: the remote knows it by its key, so it runs once
(4.7). The client, which gives up after five minutes, must not be left with a number that never arrives: its run would
wait for that (O7). So when its patience is about to end, a training request becomes a future that fails, and its number
is used up at the remote as soon as that is there again.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections import OrderedDict
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Any

from openrl.backends.remote.access import TAKE_TOKENS
from openrl.backends.remote.body import Body, Broken
from openrl.backends.remote.calls import Call, Family, Key
from openrl.backends.remote.kept import Kept, Shelf
from openrl.backends.remote.link import AWAY_STATUSES, Away, Link, Reply
from openrl.backends.remote.withdrawals import Withdrawals
from openrl.codec import decode_json, encode_json
from openrl.errors import BadRequest, Category, SettingsError
from openrl.settings import RemoteSettings

log = logging.getLogger(__name__)

_ANSWER_S = 30.0  # an acceptance takes the remote well under a second
_WAITS = (0.0, 0.25, 0.5, 1.0, 2.0)  # before the first tries after a failed one; a connection may just have been stale
_LONGEST_WAIT_S = 5.0
_TICK_S = 15.0
_GRACE_S = 10.0  # for a request that comes when the remote has been away for longer than the patience
_FAILED_KEPT = 10_000
# Refusals that come from a gate before the server's own routes: these let bad training requests fail as futures, since
# a 4xx hangs the client (O6, T1).
_GATES = frozenset({401, 403, 413})


@dataclass(frozen=True, slots=True)
class Failure:
    """How a future ended that the remote knows nothing of."""

    error: str
    category: Category | str


@dataclass(frozen=True, slots=True)
class _Promise:
    request_id: str | None = None


class Keeper:
    """Owns the kept requests of one remote. Started and stopped on the loop that uses it."""

    def __init__(self, link: Link, settings: RemoteSettings, folder: Path) -> None:
        self._link = link
        self._patience = settings.patience
        self.shelf = Shelf(folder / "kept", settings.memory_bytes, settings.disk_bytes)
        self._withdrawals = Withdrawals(link, folder / "withdrawals.json")
        self._failed: OrderedDict[str, Failure] = OrderedDict()
        self._tasks: set[asyncio.Task[None]] = set()
        self._again = asyncio.Event()
        self.replayed = 0
        link.returned = self._again.set

    def start(self) -> None:
        self._run(self._replay_whenever_due())
        self._run(self._tidy())
        self._run(self._withdrawals.keep_sending())

    async def stop(self) -> None:
        tasks = [*self._tasks]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self.shelf.clear()

    def _run(self, work: Any) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # -- calls --

    async def take(self, key: Key, call: Call, body: Body) -> Kept:
        """Keep a call, and send it on until it is answered. Its body may still be coming. Raises Busy, NotReady."""
        kept = await self.shelf.add(key, call, body)
        self._run(self._send(kept))
        return kept

    def fail(self, key: Key, error: str, category: Category | str) -> Reply:
        """The promise of a future that fails; the number of a training request is used up at the remote too."""
        promise = f"openrl-remote:{secrets.token_hex(12)}"
        self._failed[promise] = Failure(error, category)
        while len(self._failed) > _FAILED_KEPT:
            self._failed.popitem(last=False)
        if key.family is Family.RUN:
            self._withdrawals.add(key.scope, int(key.number))
        return json_reply({"request_id": promise}, 200)

    def failure(self, request_id: str) -> Failure | None:
        return self._failed.get(request_id)

    async def bring_back(self, request_id: str) -> bool:
        """The remote does not know a request that it had accepted: send it again, with those of its run before it.
        False if it is not kept, or was sent again already in this life of the remote."""
        kept = self.shelf.promised(request_id)
        if kept is None or kept.resent_in == self._link.boot:
            return False
        before = [k for k in self.shelf.accepted() if k.key.scope == kept.key.scope]
        for earlier in before[: before.index(kept) + 1]:
            await self._resend(earlier)
        return True

    @property
    def picture(self) -> dict[str, Any]:
        """A part of the status, ready for JSON."""
        return {
            "kept_requests": len(self.shelf),
            "unanswered": len(self.shelf.waiting()),
            "kept_bytes": self.shelf.needed_bytes,
            "bytes_on_disk": self.shelf.disk,
            "replayed": self.replayed,
            "withdrawn": len(self._withdrawals),
        }

    # -- sending --

    async def _send(self, kept: Kept) -> None:
        tries = 0
        while (left := self._left(kept)) > 0:
            if not await self._link.wait_up(left):
                kept.reason = self._link.state.error
                if self._link.stopping:
                    self._end(kept, refusal("this server is stopping", 503))
                    return
                continue
            try:
                reply = await self._link.send(kept.call, kept.body, _ANSWER_S)
            except Broken:
                self._end(kept, refusal("the body never became whole", 400))
                return
            except (Away, SettingsError) as away:
                kept.reason = str(away)
                kept.sent |= isinstance(away, Away) and away.sent
            else:
                kept.sent = True
                await reply.close()
                if reply.status not in AWAY_STATUSES:
                    self._settle(kept, reply)
                    return
                kept.reason = f"it answers with status {reply.status}: {detail_of(reply)}"
            self.replayed += 1
            await asyncio.sleep(min(pause(tries), max(self._left(kept), 0)))
            tries += 1
        self._give_up(kept)

    def _left(self, kept: Kept) -> float:
        """Seconds for which it is tried on. In a long outage new requests do not wait all over again: a client that
        sends one after the other would hear of it after many times five minutes."""
        age, state = time.monotonic() - kept.since, self._link.state
        outage = 0.0 if state.connected else time.time() - state.since
        return max(self._patience - max(age, outage), min(_GRACE_S, self._patience) - age)

    def _settle(self, kept: Kept, reply: Reply) -> None:
        if reply.status in _GATES and kept.key.family is Family.RUN:
            self._end(kept, self.fail(kept.key, detail_of(self.worded(kept.call, reply)), "user"))
        elif promise := _promise(reply):
            self.shelf.accept(kept, promise)
            kept.answer.set_result(reply)
        else:
            self._end(kept, reply)

    def _give_up(self, kept: Kept) -> None:
        log.warning("gave a request up after %.0f s: %s", self._patience, kept.reason)
        error = self.away_text(time.monotonic() - kept.since, kept.reason)
        if kept.key.family is not Family.RUN:
            self._end(kept, refusal(error, 503))
        elif kept.sent:
            known = "It may have been carried out; load a checkpoint, or start from where the run is."
            self._end(kept, self.fail(kept.key, f"{error} {known}", "unknown"))
        else:
            self._end(kept, self.fail(kept.key, f"{error} It never arrived there, and will not be run.", "server"))

    def _end(self, kept: Kept, reply: Reply) -> None:
        kept.answer.set_result(reply)
        self.shelf.forget(kept)

    def away_text(self, waited: float, reason: str) -> str:
        """Why there is no answer. `waited` seconds were waited for it; the outage may be longer."""
        state = self._link.state
        seconds = waited if state.connected else max(waited, time.time() - state.since)
        return (
            f"the remote {self._link.name} ({self._link.url()}) has not answered for {seconds:.0f} s: {reason or '?'}. "
            "Requests are sent again for as long as the SDK waits, which is five minutes."
        )

    def worded(self, call: Call, reply: Reply) -> Reply:
        """A refusal of our key in words for our client, whose own key is good; any other answer as it is."""
        if reply.status != HTTPStatus.UNAUTHORIZED or call.name in TAKE_TOKENS:
            return reply  # there it may be another account's token that is refused
        return refusal(self._refused_text(reply), reply.status)

    def _refused_text(self, reply: Reply) -> str:
        name = self._link.name
        hint = "Give this server another one in OPENRL_REMOTE_TOKEN, or name the remote (openrl remote add)."
        if self._link.has_name:
            hint = (
                f"Give it a new one (openrl remote login {name}), or look what is wrong (openrl remote check {name})."
            )
        said = detail_of(reply)
        return f"the remote {name} ({self._link.url()}) refuses the key that this server has for it: {said} {hint}"

    # -- after the remote has come back --

    async def _replay_whenever_due(self) -> None:
        while True:
            await self._again.wait()
            self._again.clear()
            if not await self._replay():
                await self._link.wait_up(_LONGEST_WAIT_S)
                await asyncio.sleep(pause(1))
                self._again.set()

    async def _replay(self) -> bool:
        """Send everything again that the remote has accepted and may not have any more; it knows what it still has.
        False if it went away in between."""
        boot = self._link.boot
        for kept in self.shelf.accepted():
            if (kept.resent_in != boot or not boot) and not await self._resend(kept):
                return False
        return True

    async def _resend(self, kept: Kept) -> bool:
        if self.shelf.promised(kept.promise) is not kept:
            return True  # forgotten meanwhile
        try:
            reply = await self._link.send(kept.call, kept.body, _ANSWER_S)
        except (Away, Broken, SettingsError):
            return False
        if reply.status in AWAY_STATUSES:
            return False
        kept.resent_in = self._link.boot
        self.replayed += 1
        if promise := _promise(reply):
            kept.known_as = promise
        return True

    async def _tidy(self) -> None:
        while True:
            await asyncio.sleep(_TICK_S)
            self.shelf.forget_old()


def pause(tries: int) -> float:
    """Seconds to wait before the next try."""
    return _WAITS[tries] if tries < len(_WAITS) else _LONGEST_WAIT_S


def json_reply(content: object, status: int, retry_after: int | None = None) -> Reply:
    """An answer of our own in the form of the remote's."""
    headers = [(b"content-type", b"application/json")]
    if retry_after is not None:
        headers.append((b"retry-after", str(retry_after).encode()))
    return Reply(status, tuple(headers), encode_json(content))


def refusal(detail: str, status: int) -> Reply:
    return json_reply({"detail": detail}, status, 1 if status in (429, 503) else None)


def detail_of(reply: Reply) -> str:
    """What an error says, if it says it in JSON; else how it begins (a gateway's page)."""
    try:
        found = decode_json(dict[str, Any], reply.content).get("detail")
    except BadRequest:
        found = None
    text = found if isinstance(found, str) else reply.content[:200].decode("utf-8", "replace")
    return " ".join(text.split()) or f"status {reply.status}"


def _promise(reply: Reply) -> str | None:
    if not 200 <= reply.status < 300:
        return None
    try:
        return decode_json(_Promise, reply.content).request_id
    except BadRequest:
        return None

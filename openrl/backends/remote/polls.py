"""The long polls for results, passed on.

A client that waits for a result is never told that the remote is away: it is told to ask again, with the reason, in the
words that the protocol has for a server without room (4.3). So an outage of any length costs time and nothing else.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

from openrl.backends.remote.body import Body
from openrl.backends.remote.calls import Call
from openrl.backends.remote.keeper import Keeper, json_reply, pause, refusal
from openrl.backends.remote.link import AWAY_STATUSES, Away, Link, Reply
from openrl.codec import decode_json, encode_json
from openrl.errors import BadRequest, SettingsError
from openrl.wire.bodies import is_protobuf
from openrl.wire.messages import RetrieveFutureBody, RetrieveFuturesBody

_MARGIN_S = 15.0  # on top of how long the remote may hold a poll
_HELD_S = 30.0  # the longest that a server may (1.7)
_QUICK_S = 3.0  # for a poll that must not be held: its client waits for five seconds (T42)
_SMALL = 4096  # bytes: what says "not yet" is smaller
_NOT_YET = (b'"try_again"', b'"complete_metadata"')


class Polls:
    """`retrieve_future` and `retrieve_futures`."""

    def __init__(self, link: Link, keeper: Keeper, hold_s: float) -> None:
        """`hold_s`: how long a poll is held while the remote is away."""
        self._link = link
        self._keeper = keeper
        self._hold_s = hold_s

    async def future(self, call: Call, content: bytes) -> Reply:
        """One result, or 408."""
        try:
            request_id = decode_json(RetrieveFutureBody, content).request_id
        except BadRequest as error:
            return refusal(str(error), 400)
        if failure := self._keeper.failure(request_id):
            return json_reply({"error": failure.error, "category": failure.category}, 200)
        reply = await self._until_known(call, request_id, content)
        kept = self._keeper.shelf.promised(request_id)
        if kept is not None and _is_result(reply):
            self._keeper.shelf.deliver(kept)
        return reply

    async def _until_known(self, call: Call, request_id: str, content: bytes) -> Reply:
        started = time.monotonic()
        while True:
            kept = self._keeper.shelf.promised(request_id)
            asked = content if kept is None or kept.known_as == request_id else _renamed(content, kept.known_as)
            reply = await self._ask(call, asked, started + self._hold_s)
            if reply is None:
                return self._away(request_id)
            if reply.status not in (404, 410) or not await self._keeper.bring_back(request_id):
                return reply

    async def news(self, call: Call, content: bytes) -> Reply:
        """What ended of many; nothing while the remote is away."""
        try:
            body = decode_json(RetrieveFuturesBody, content)
        except BadRequest as error:
            return refusal(str(error), 400)
        quick = body.timeout is not None and body.timeout < _QUICK_S
        hold = _QUICK_S if quick else self._hold_s
        reply = await self._ask(call, content, time.monotonic() + hold)
        if reply is not None:
            return reply
        return json_reply({"completions": [], "cursor": body.prev_cursor or 0}, 200)

    async def _ask(self, call: Call, content: bytes, deadline: float) -> Reply | None:
        """The remote's answer; None if there is none until the deadline. Once it has begun to hold the poll, that is
        over when the remote lets it go."""
        tries = 0
        while await self._link.wait_up(deadline - time.monotonic()):
            try:
                reply = await self._link.send(call, Body(content), _HELD_S + _MARGIN_S, poll=True)
            except (Away, SettingsError):
                pass
            else:
                if reply.status not in AWAY_STATUSES:
                    return self._keeper.worded(call, reply)
                await reply.close()
            left = deadline - time.monotonic()
            if left <= 0:
                return None
            await asyncio.sleep(min(pause(tries), left))
            tries += 1
        return None

    def _away(self, request_id: str) -> Reply:
        state = self._link.state
        seconds = time.time() - state.since
        reason = f"the remote has been unreachable for {seconds:.0f} s; retrying ({state.error})"
        if state.connected:
            reason = "the remote answers, but not yet to this; retrying"
        elif seconds > 300:
            reason += "; new requests fail after five minutes, those that it accepted are waited for"
        body: dict[str, Any] = {
            "type": "try_again",
            "request_id": request_id,
            "queue_state": "paused_capacity",
            "queue_state_reason": reason,
        }
        return json_reply(body, 408)


def _renamed(content: bytes, request_id: str) -> bytes:
    return encode_json({**decode_json(dict[str, Any], content), "request_id": request_id})


def _is_result(reply: Reply) -> bool:
    """Whether the client has what it asked for once it has read this answer."""
    if reply.status != 200:
        return False
    if len(reply.content) > _SMALL or is_protobuf(reply.header(b"content-type")):
        return True
    return not reply.header(b"content-encoding") and not any(word in reply.content for word in _NOT_YET)

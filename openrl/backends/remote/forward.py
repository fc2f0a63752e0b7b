"""Passes a call on to the remote and its answer back, each in the way that its meaning allows."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Coroutine
from typing import Any

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from openrl.backends.remote import links
from openrl.backends.remote.access import with_remote_token
from openrl.backends.remote.body import Body, Passing
from openrl.backends.remote.calls import Call, Family, Key, Repeat, early_key, is_kept, key_of, repeatable
from openrl.backends.remote.headers import FILES, back, onward
from openrl.backends.remote.keeper import Keeper, pause, refusal
from openrl.backends.remote.kept import Kept
from openrl.backends.remote.link import AWAY_STATUSES, Away, Link, Reply
from openrl.backends.remote.polls import Polls
from openrl.errors import NotFound, SettingsError, TooLarge
from openrl.server.middleware import CLIENT_CLOSED
from openrl.server.requests import until_disconnect
from openrl.settings import ServerSettings

_READ_S = 60.0  # how long the remote may be silent in a call that is no long poll
_QUICK_S = 8.0  # for calls whose client waits for ten seconds (1.7)
_QUICK = frozenset({"session_heartbeat", "client/dynamic_config"})
_STREAMED = 256 << 10  # bytes: larger bodies are sent on while they arrive
_HEAD = 256 << 10  # bytes of them in which run and number must be found
_WITHOUT_BODY = frozenset({204, 304})


class Forwarder:
    """An endpoint for every path that is the remote's to answer."""

    def __init__(
        self, link: Link, keeper: Keeper, settings: ServerSettings, is_own: Callable[[str], bool] = lambda key: False
    ) -> None:
        """`is_own`: whether a text is a key of this server."""
        self._is_own = is_own
        self.link = link
        self.keeper = keeper
        self.limit = settings.max_body_bytes
        self._hold_s = settings.long_poll_seconds
        self._polls = Polls(link, keeper, settings.long_poll_seconds)

    async def answer(self, request: Request) -> Response:
        call = links.plainly(call_of(request))
        if is_kept(call):
            return response(await self.kept(call, Body(announced=_length(request)), request))
        if call.name == "retrieve_future":
            return await _while_there(request, self._polls.future(call, await request.body()))
        if call.name == "retrieve_futures":
            return await _while_there(request, self._polls.news(call, await request.body()))
        if (_length(request) or 0) > _STREAMED:
            return response(await self._once(request, call))
        reply = await self.plain(call, await request.body())
        return response(links.through_us(self.link, call, reply, str(request.base_url)), call.method)

    # -- calls that are kept --

    async def kept(self, call: Call, body: Body, request: Request) -> Reply:
        """Take a call in, and wait for its answer; a client that is left waiting is told to come again."""
        kept = None
        try:
            async for part in request.stream():
                body.add(part)
                if kept is None and self._streams(body) and (key := early_key(call, body.head(_HEAD))):
                    kept = await self._keep(key, call, body)
        except TooLarge as error:
            body.break_off()
            return self._too_large(call, body, error)
        except BaseException:
            body.break_off()
            raise
        body.end()
        if kept is None:
            return await self.whole(call, body)
        self.keeper.shelf.is_whole(kept)
        return await self._answer(kept)

    async def whole(self, call: Call, body: Body) -> Reply:
        """The same for a body that is all here."""
        call, body = await with_remote_token(call, body, self._is_own, await self.link.token.get())
        key = await self._key(call, body)
        if key is None:
            return await self.plain(call, await body.content())
        return await self._answer(await self._keep(key, call, body))

    def _streams(self, body: Body) -> bool:
        """Whether it pays to begin before the end: only bodies that will be large, and only while they begin."""
        return _STREAMED < (body.final_size or 0) <= self.limit and body.size <= _HEAD + (64 << 10)

    async def _key(self, call: Call, body: Body) -> Key | None:
        content = await body.content()
        if len(content) <= _STREAMED:
            return key_of(call, content, self.limit)
        return await asyncio.to_thread(key_of, call, content, self.limit)

    async def _keep(self, key: Key, call: Call, body: Body) -> Kept:
        """A repetition joins the first, unless that has lost its client halfway."""
        known = self.keeper.shelf.get(key)
        if known is not None and known.body.whole:
            return known
        return await self.keeper.take(key, call, body)

    async def _answer(self, kept: Kept) -> Reply:
        await asyncio.wait({kept.answer}, timeout=self._hold_s)
        if kept.answer.done():
            return self.keeper.worded(kept.call, kept.answer.result())
        return refusal(self.keeper.away_text(time.monotonic() - kept.since, kept.reason), 503)

    def _too_large(self, call: Call, body: Body, error: TooLarge) -> Reply:
        """As the daemon does: a future that fails, if it can be known whose (O6)."""
        head = body.head(_HEAD)
        key = early_key(call, head) or key_of(call, head, self.limit)
        if key is None or key.family is not Family.RUN:
            raise error
        return self.keeper.fail(key, str(error), "user")

    # -- calls that are not --

    async def plain(self, call: Call, content: bytes) -> Reply:
        """Try until there is an answer, as long as a client waits and a repetition does no harm."""
        deadline = time.monotonic() + (_QUICK_S if call.name in _QUICK else self._hold_s)
        tries, reason = 0, ""
        last: Reply | None = None
        while await self.link.wait_up(deadline - time.monotonic()):
            try:
                reply = await self.link.send(call, Body(content), _READ_S)
            except Away as away:
                reason = away.reason
                if away.sent and repeatable(call) is Repeat.NO:
                    break
            except SettingsError as error:
                reason = str(error)
            else:
                if reply.status not in AWAY_STATUSES or repeatable(call) is Repeat.NO:
                    return self.keeper.worded(call, reply)
                await reply.close()
                last = reply
            await asyncio.sleep(max(min(pause(tries), deadline - time.monotonic()), 0))
            tries += 1
            if time.monotonic() >= deadline:
                break
        if last is not None and last.rest is None:
            return last  # its own words for why it does not serve this yet
        return refusal(self.keeper.away_text(self._hold_s, reason or self.link.state.error), 503)

    async def _once(self, request: Request, call: Call) -> Reply:
        """A large body that is nothing to keep (a checkpoint's file on its way up): its client sends it again."""
        try:
            reply = await self.link.send(call, Passing(request.stream(), _length(request)), _READ_S)
        except (Away, SettingsError) as error:
            return refusal(self.keeper.away_text(0, str(error)), 503)
        return self.keeper.worded(call, reply)


async def _while_there(request: Request, asking: Coroutine[Any, Any, Reply]) -> Response:
    """A client that goes takes its poll at the remote with it."""
    reply = await until_disconnect(request, asking)
    return Response(status_code=CLIENT_CLOSED) if reply is None else response(reply)


def call_of(request: Request) -> Call:
    """A request as it is sent on; below `FILES`, without that and the remote's name. Raises NotFound for a path that
    climbs."""
    path: str = request.scope["path"]
    target: bytes = request.scope.get("raw_path") or path.encode()
    if any(part in (".", "..") for part in path.split("/")):
        raise NotFound(f"there is no {path!r}.")
    if path.startswith(FILES):
        path = _after_name(path)
        target = _after_name(target.decode("latin-1")).encode("latin-1")
    query: bytes = request.scope["query_string"]
    return Call(request.method, path, target + (b"?" + query if query else b""), onward(request.scope["headers"]))


def _after_name(path: str) -> str:
    return "/" + path.removeprefix(FILES).partition("/")[2]


def _length(request: Request) -> int | None:
    length = request.headers.get("content-length", "")
    return int(length) if length.isdecimal() else None


def response(reply: Reply, method: str = "POST") -> Response:
    """A reply for the client, streamed if it is large."""
    headers = back(reply.headers)
    if reply.rest is None:
        answer = Response(reply.content, reply.status)
        length = str(len(reply.content))
        if method == "HEAD" or reply.status in _WITHOUT_BODY:
            length = reply.header(b"content-length")
    else:
        answer = StreamingResponse(_all_of(reply), reply.status)
        length = reply.header(b"content-length")
    answer.raw_headers = [*headers, (b"content-length", length.encode())] if length else headers
    return answer


async def _all_of(reply: Reply) -> AsyncGenerator[bytes]:
    """What a large answer holds. One that breaks off ends the client's connection: it must not be taken for whole."""
    assert reply.rest is not None
    try:
        yield reply.content
        async for part in reply.rest:
            yield part
    finally:
        await reply.close()

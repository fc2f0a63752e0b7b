"""Where everything is, and how it comes there: ids by the book, what nobody has heard of by asking, sessions by making
their counterparts when they are first needed."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Mapping
from http import HTTPStatus
from typing import Any

from starlette.responses import Response
from starlette.types import ASGIApp, Scope

from openrl.backends.remote.calls import API, Call
from openrl.backends.remote.forward import Forwarder
from openrl.backends.remote.link import Reply
from openrl.backends.remote.mixed.book import SCHEME, Book, Place, remote_for
from openrl.backends.remote.mixed.fields import ABOUT, FROM, Fields, Found, Given
from openrl.backends.remote.mixed.sides import get_here, get_there, post_there
from openrl.codec import decode_json
from openrl.errors import BadRequest

_FUTURES_KEPT = 10_000
_SMALL_ANSWER = 64 << 10  # bytes: answers that hold ids are smaller
_JSON = ((b"content-type", b"application/json"),)


class Places:
    """`app` is the one of this machine; `forwarders` by the remote's name; `routes` from patterns to names."""

    def __init__(self, app: ASGIApp, forwarders: Mapping[str, Forwarder], routes: dict[str, str], book: Book) -> None:
        self._app = app
        self._forwarders = forwarders
        self._routes = routes
        self._book = book
        self._futures: OrderedDict[str, str] = OrderedDict()  # ids that do not say themselves which remote's they are
        self._locks: dict[tuple[str, str], asyncio.Lock] = {}
        self._aside: set[asyncio.Task[Any]] = set()

    # -- asking --

    def known(self, identifier: str) -> Place:
        """A session, run, sampler or request, without looking for it."""
        place = self._book.place(identifier)
        if place.remote is None and identifier in self._futures:
            return Place(self._futures[identifier], identifier)
        return place if place.remote in self._forwarders else Place(None, identifier)

    async def home(self, scope: Scope, kind: str, identifier: str) -> Place:
        """Where one of `kind` (a list's name) is. What nobody here has heard of is looked for, here first."""
        place = self.known(identifier)
        if place.remote is not None:
            return place
        if (await get_here(self._app, scope, f"{kind}/{identifier}")).status != HTTPStatus.NOT_FOUND:
            return place
        for name, forward in self._forwarders.items():
            if await get_there(forward, f"{kind}/{identifier}") is not None:
                self._book.owns(name, identifier)
                return Place(name, identifier)
        return place

    async def home_of(self, scope: Scope, path: str) -> Place:
        """Where a checkpoint is."""
        run, slash, rest = path.removeprefix(SCHEME).partition("/")
        place = await self.home(scope, "training_runs", run)
        return Place(place.remote, f"{SCHEME}{place.there}{slash}{rest}")

    async def target(self, name: str, scope: Scope, fields: Fields) -> Found | Reply | None:
        """Which remote gets a call; None: this machine. A reply, if what the call needs there cannot be had."""
        if name == "retrieve_futures":
            sampler = fields.target.sampling_session_id if fields.target else None
            return _found(self.known(sampler or ""), {})
        if name == "load_weights" and fields.model_id is not None:
            return self._load_into(fields)
        if name in ABOUT:
            return await self._about(ABOUT[name], scope, fields)
        source = getattr(fields, FROM[name]) if name in FROM else None
        if source is not None:
            home = await self.home_of(scope, source)
            return await self._in_session(home.remote, {FROM[name]: home.there}, scope, fields)
        if name in ("create_model", "create_sampling_session"):
            return await self._in_session(remote_for(fields.base_model or "", self._routes), {}, scope, fields)
        return None

    async def _about(self, field: str, scope: Scope, fields: Fields) -> Found | None:
        value: str | None = getattr(fields, field)
        if value is None:
            return None
        place = await self.home_of(scope, value) if field == "tinker_path" else self.known(value)
        return _found(place, {} if place.there == value else {field: place.there})

    def _load_into(self, fields: Fields) -> Found | None:
        """A checkpoint into a run, which stays where it is. If the checkpoint is elsewhere, its server says so."""
        run = self.known(fields.model_id or "")
        path = self._book.path_place(fields.path or "").there
        return _found(run, {"model_id": run.there} | ({"path": path} if fields.path is not None else {}))

    # -- sessions --

    async def _in_session(
        self, remote: str | None, changes: dict[str, Any], scope: Scope, fields: Fields
    ) -> Found | Reply | None:
        """A call in the remote's counterpart of its session."""
        if remote is None or fields.session_id is None:
            return None if remote is None else Found(remote, changes)
        there = await self._counterpart(scope, fields.session_id, remote)
        if not isinstance(there, str):
            return there
        if (number := fields.model_seq_id) is not None:  # of a run that the client may name by its own session (T19)
            self._book.renamed(f"{fields.session_id}:train:{number}", remote, f"{there}:train:{number}")
        return Found(remote, {**changes, "session_id": there})

    async def _counterpart(self, scope: Scope, session: str, remote: str) -> str | Reply | None:
        """A remote's session in the place of ours, made when it is first needed. None: it is not one of the caller's;
        a reply: what the remote said instead."""
        if (await get_here(self._app, scope, f"sessions/{session}")).status != HTTPStatus.OK:
            return None
        async with self._locks.setdefault((session, remote), asyncio.Lock()):
            if (known := self._book.counterpart(session, remote)) is not None:
                return known
            key = (b"x-idempotency-key", f"openrl-{session}".encode())
            reply = await post_there(
                self._forwarders[remote], "create_session", self._book.made_with(session), (key,)
            )  # fmt: skip
            if reply.status != HTTPStatus.OK:
                return reply
            there = str(decode_json(dict[str, Any], reply.content)["session_id"])
            self._book.mirrored(session, remote, there)
            return there

    def tell_counterparts(
        self, session: str, method: str, path: Callable[[str], str], body: Callable[[str], bytes]
    ) -> None:
        """What is said of a session (a sign of life, its end, its project) goes for its counterparts too. `path` and
        `body` are made from a counterpart's id. Nobody waits for it."""
        for remote, there in self._book.counterparts(session).items():
            if (forward := self._forwarders.get(remote)) is not None:
                target = API + path(there)
                told = forward.plain(Call(method, target, target.encode(), _JSON), body(there))
                task = asyncio.create_task(told)
                self._aside.add(task)
                task.add_done_callback(self._aside.discard)

    # -- telling --

    def remember(self, remote: str, answer: Response) -> None:
        """Ids in an answer that do not say themselves whose they are."""
        content = getattr(answer, "body", b"")
        if answer.status_code != HTTPStatus.OK or not 2 < len(content) <= _SMALL_ANSWER:
            return
        try:
            given = decode_json(Given, content)
        except BadRequest:
            return  # a result in protobuf
        if given.request_id and self._book.place(given.request_id).remote != remote:
            self._futures[given.request_id] = remote
            while len(self._futures) > _FUTURES_KEPT:
                self._futures.popitem(last=False)
        for identifier in given.owned():
            self._book.owns(remote, identifier)


def _found(place: Place, changes: dict[str, Any]) -> Found | None:
    return None if place.remote is None else Found(place.remote, changes)

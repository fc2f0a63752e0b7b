"""Lists of which every place has a part.

A remote that is away just now is named under `unreachable` (which the SDK ignores, and a person sees); its part is
missing then.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qs, urlencode

from starlette.types import ASGIApp, Scope

from openrl.backends.remote.forward import Forwarder
from openrl.backends.remote.mixed.book import Book, remote_for
from openrl.backends.remote.mixed.sides import get_here, get_there
from openrl.codec import to_object

Forwarders = Mapping[str, Forwarder]
_PAGE = 1000  # the most that a server gives at once


@dataclass(frozen=True, slots=True)
class Merged:
    """A list: in which field its rows are, by what of a row they are sorted (newest first), whether it has pages."""

    field: str
    by: str | None
    paged: bool = False


LISTS: Mapping[str, Merged] = {
    "training_runs": Merged("training_runs", "last_request_time", paged=True),
    "checkpoints": Merged("checkpoints", "time", paged=True),
    "sessions": Merged("sessions", None, paged=True),
    "audit": Merged("entries", "timestamp"),
    "billing/usage/events": Merged("data", "bucket_start"),
    "billing/usage/checkpoints/current": Merged("data", None),
}


async def merged_list(name: str, app: ASGIApp, scope: Scope, forwarders: Forwarders, book: Book) -> dict[str, Any]:
    """A list over all places, its pages cut out of the whole."""
    how = LISTS[name]
    query = {key: values[-1] for key, values in parse_qs(scope["query_string"].decode("latin-1")).items()}
    limit, offset = _number(query, "limit", 20), _number(query, "offset", 0)
    wanted = offset + limit if how.paged else None
    here = await _rows(lambda q: _of(get_here(app, scope, name, q)), how, query, wanted)
    theirs = await asyncio.gather(*[_rows(_asking(f, name), how, query, wanted) for f in forwarders.values()])
    first: dict[str, Any] = here.first or {}
    rows, total = [*here.rows], here.total
    for part in theirs:
        rows += [row for row in part.rows if not (isinstance(row, str) and book.is_counterpart(row))]
        total += part.total
    if how.by is not None:
        rows.sort(key=lambda row: str(row.get(how.by, "")), reverse=name != "billing/usage/events")
    answer = first | {how.field: rows[offset : offset + limit] if how.paged else rows}
    if "cursor" in first or name == "training_runs":
        answer["cursor"] = {"offset": offset, "limit": limit, "total_count": total}
    return _with_absent(answer, [key for key, part in zip(forwarders, theirs, strict=True) if part.first is None])


@dataclass(slots=True)
class _Part:
    rows: list[Any]
    total: int
    first: dict[str, Any] | None  # the first page; None: there was none to be had


Ask = Callable[[str], Any]


def _asking(forward: Forwarder, name: str) -> Ask:
    return lambda query: get_there(forward, name, query)


async def _of(asked: Any) -> dict[str, Any] | None:
    answer = await asked
    return answer.json() if answer.status == 200 else None


async def _rows(ask: Ask, how: Merged, query: Mapping[str, str], wanted: int | None) -> _Part:
    """The first `wanted` rows of one place (None: what it gives), and how many it has."""
    if wanted is None:
        page = await ask(urlencode(query))
        return _Part([] if page is None else page.get(how.field, []), 0, page)
    rows: list[Any] = []
    first: dict[str, Any] | None = None
    while True:
        size = max(1, min(_PAGE, wanted - len(rows)))
        page = await ask(urlencode({**query, "limit": size, "offset": len(rows)}))
        if page is None:
            return _Part(rows, len(rows), first)
        first = first or page
        found = page.get(how.field, [])
        rows += found
        if len(found) < size or len(rows) >= wanted:
            total = (page.get("cursor") or {}).get("total_count", len(rows))
            return _Part(rows, total, first)


def _number(query: Mapping[str, str], name: str, default: int) -> int:
    given = query.get(name, "")
    return int(given) if given.isdecimal() else default


def _with_absent(answer: dict[str, Any], absent: list[str]) -> dict[str, Any]:
    return answer | ({"unreachable": absent} if absent else {})


async def capabilities(app: ASGIApp, scope: Scope, forwarders: Forwarders, routes: dict[str, str]) -> dict[str, Any]:
    """What can be trained and sampled, each base model where the rules send it."""
    own = (await get_here(app, scope, "get_server_capabilities")).json()
    models = [entry for entry in own["supported_models"] if remote_for(entry["model_name"], routes) is None]
    absent: list[str] = []
    for name, forward in forwarders.items():
        theirs = await get_there(forward, "get_server_capabilities")
        if theirs is None:
            absent.append(name)
            continue
        for entry in theirs.get("supported_models", []):
            if remote_for(str(entry.get("model_name")), routes) == name:
                models.append({**entry, "remote": name})
    return _with_absent(to_object({**own, "supported_models": models}), absent)


async def session(app: ASGIApp, scope: Scope, forwarders: Forwarders, book: Book, identifier: str) -> dict[str, Any]:
    """A session of ours with what its counterparts have."""
    query = scope["query_string"].decode("latin-1")
    found = (await get_here(app, scope, f"sessions/{identifier}", query)).json()
    absent: list[str] = []
    for name, there in book.counterparts(identifier).items():
        theirs = await get_there(forwarders[name], f"sessions/{there}", query) if name in forwarders else None
        if theirs is None:
            absent.append(name)
            continue
        for field in ("training_run_ids", "sampler_ids"):
            found[field] = [*found.get(field, []), *theirs.get(field, [])]
    return _with_absent(found, absent)

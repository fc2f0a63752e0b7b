"""What a route asks of its caller, declared where the route is."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from enum import Enum
from functools import wraps

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from openrl.errors import Forbidden
from openrl.keys.principal import Principal, Scope

Endpoint = Callable[[Request], Awaitable[Response]]


class Needs(Enum):
    """Who may call a route."""

    OPEN = "nothing"
    SIGNED_URL = "a signature in the URL"
    ANY = "a key"  # whose owner looks at what is theirs
    WORK = "a key with scope use or admin"
    MONITOR = "a key with scope read or admin"
    MANAGE = "a key with scope admin"


_SCOPES: dict[Needs, frozenset[Scope]] = {
    Needs.ANY: frozenset(Scope),
    Needs.WORK: frozenset({Scope.USE, Scope.ADMIN}),
    Needs.MONITOR: frozenset({Scope.READ, Scope.ADMIN}),
    Needs.MANAGE: frozenset({Scope.ADMIN}),
}

OPEN, SIGNED_URL, ANY = Needs.OPEN, Needs.SIGNED_URL, Needs.ANY
WORK, MONITOR, MANAGE = Needs.WORK, Needs.MONITOR, Needs.MANAGE


class GuardedRoute(Route):
    """A route that refuses callers without the scope it needs (403). Keys themselves are checked before."""

    def __init__(self, path: str, endpoint: Endpoint, *, methods: list[str], needs: Needs) -> None:
        super().__init__(path, _checked(endpoint, needs), methods=methods)
        self.needs = needs

    @property
    def prefix(self) -> str:
        """The path up to its first parameter."""
        return self.path.partition("{")[0]


def _checked(endpoint: Endpoint, needs: Needs) -> Endpoint:
    if needs not in _SCOPES:
        return endpoint
    legal = _SCOPES[needs]

    @wraps(endpoint)  # its name and module stay visible: `openrl/server/measure.py` goes by them
    async def checked(request: Request) -> Response:
        principal: Principal = request.state.principal
        if not legal & principal.scopes:
            raise Forbidden(
                f"this call needs {needs.value}; the key given has {', '.join(sorted(principal.scopes)) or 'none'}.",
                "Ask the server's administrator for a key with another scope (openrl keys create --scope ...).",
            )
        return await endpoint(request)

    return checked

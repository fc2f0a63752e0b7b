"""A server as commands call it: over TLS, a port-forward or plainly, again and again while it does not answer."""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from http import HTTPStatus
from typing import Any, TypeVar
from urllib.parse import urlsplit

import httpx

from openrl.codec import decode_json
from openrl.errors import BadRequest, NotFound, NotReady, OpenRLError, SettingsError, TooLarge, Unauthorized
from openrl.kube import PortForward
from openrl.remotes import Remote
from openrl.settings import is_loopback

T = TypeVar("T")

_SECONDS = httpx.Timeout(60.0, connect=10.0)
_FIRST_WAIT, _LONGEST_WAIT = 0.5, 10.0
_AGAIN = frozenset({408, 425, 429, 500, 502, 503, 504})  # what a restart, or something in between, answers
_ERRORS: Mapping[int, type[OpenRLError]] = {400: BadRequest, 404: NotFound, 413: TooLarge}

OnWait = Callable[[str], None]


class Server:
    """Calls to one server; `name` is what messages call it. Made by `reach`.

    Until the first answer, a failure is final: the address may be wrong. After that, calls are repeated until nothing
    has come back for `patience` seconds.
    """

    def __init__(
        self,
        name: str,
        base: Callable[[], str],
        client: httpx.AsyncClient,
        patience: float,
        on_wait: OnWait,
        hint: str = "",
    ) -> None:
        self.name = name
        self._base = base
        self._client = client
        self._patience = patience
        self._on_wait = on_wait
        self._hint = hint
        self._answered = False

    async def json(self, kind: type[T], method: str, path: str, body: object = None) -> T:
        """The answer of a call below /api/v1 as a message. Raises OpenRLError in the server's words."""
        answer = await self.call(method, path, body=body)
        try:
            return decode_json(kind, answer.content, f"the answer of {self.name}")
        except BadRequest as error:
            raise OpenRLError(f"{self.name} does not answer as an openrl server does: {error}") from None

    async def call(
        self,
        method: str,
        path: str,
        *,
        body: object = None,
        headers: Mapping[str, str] | None = None,
        content: Callable[[], AsyncIterator[bytes]] | None = None,
        legal: tuple[int, ...] = (),
    ) -> httpx.Response:
        """The answer, whose status is good or one of `legal`. `content` makes the body anew for each try."""
        heard, wait = time.monotonic(), _FIRST_WAIT
        while True:
            try:
                answer = await self._client.request(
                    method,
                    f"{self._base()}/api/v1/{path}",
                    json=body,
                    headers=dict(headers or {}),
                    content=content() if content else None,
                )
                self._answered = True
                if answer.status_code not in _AGAIN or answer.status_code in legal:
                    return self._checked(answer, legal)
                problem = f"status {answer.status_code}: {detail(answer)}"
            except httpx.TransportError as error:
                problem = explain(error, self._base())
                if not self._answered or is_tls(error):
                    raise NotReady(f"{self.name} cannot be reached: {problem}.", self._hint) from error
            if time.monotonic() - heard > self._patience:
                raise NotReady(f"{self.name} has not answered for {self._patience:.0f} s: {problem}.", self._hint)
            self._on_wait(f"{self.name}: {problem}")
            await asyncio.sleep(wait)
            wait = min(2 * wait, _LONGEST_WAIT)

    async def once(self, path: str) -> httpx.Response:
        """One GET, whatever its answer, at the server's root. Raises httpx.TransportError."""
        return await self._client.get(f"{self._base()}/{path}")

    def _checked(self, answer: httpx.Response, legal: tuple[int, ...]) -> httpx.Response:
        status = answer.status_code
        if status < HTTPStatus.MULTIPLE_CHOICES or status in legal:
            return answer
        if status == HTTPStatus.UNAUTHORIZED:
            raise Unauthorized(f"{self.name} does not take this key: {detail(answer)}", "See: openrl remote check")
        raise _ERRORS.get(status, OpenRLError)(f"{self.name}: {detail(answer)}")


@asynccontextmanager
async def reach(
    remote: Remote,
    key: str | None = None,
    patience: float = 300.0,
    on_wait: OnWait = lambda _why: None,
    trust: ssl.SSLContext | None = None,
    hint: str = "See: openrl remote check",
) -> AsyncGenerator[Server]:
    """A remote's server for the time of the block, with its port-forward if it has one.

    `key` None: read from the remote's source; `trust` None: what the remote says; `hint` is for whom it is not
    reached. Raises SettingsError, and NotReady for a port-forward that does not come up.
    """
    if key is None:
        key = await asyncio.to_thread(remote.token.read)
    async with AsyncExitStack() as stack:
        base: Callable[[], str] = lambda: remote.url  # noqa: E731
        if remote.kube is not None:
            tunnel = await stack.enter_async_context(PortForward(remote.kube))
            base = lambda: tunnel.url  # noqa: E731
        client = await stack.enter_async_context(
            httpx.AsyncClient(
                headers={"X-API-Key": key} if key else {},
                timeout=_SECONDS,
                verify=trust or tls_context(remote),
                # A proxy of the environment is for the world, not for this machine's own ports.
                trust_env=not is_loopback(urlsplit(base()).hostname or ""),
                follow_redirects=False,
            )
        )
        yield Server(remote.name, base, client, patience, on_wait, hint)


def tls_context(remote: Remote) -> ssl.SSLContext | bool:
    """Whom to trust: the remote's own certificates, or the usual ones (True). Raises SettingsError."""
    if remote.ca_file is None:
        return True
    try:
        return ssl.create_default_context(cafile=remote.ca_file)
    except (OSError, ssl.SSLError) as error:
        raise SettingsError(f"ca_file {remote.ca_file} holds no certificates that can be read: {error}.") from error


def is_tls(error: BaseException) -> bool:
    """Whether a connection failed for its TLS, which no repetition mends."""
    return _cause(error, ssl.SSLError) is not None


def explain(error: httpx.TransportError, url: str) -> str:
    """What went wrong with a connection, in words."""
    certificate = _cause(error, ssl.SSLCertVerificationError)
    if isinstance(certificate, ssl.SSLCertVerificationError):
        return _explain_certificate(certificate, url)
    if (tls := _cause(error, ssl.SSLError)) is not None:
        return f"{url} does not speak TLS as expected ({tls}); is it http:// rather than https://?"
    match error:
        case httpx.ConnectTimeout():
            return f"{url} does not answer within {_SECONDS.connect:.0f} s (a firewall, or a machine that is off)"
        case httpx.TimeoutException():
            return "no answer in time"
        case httpx.ConnectError():
            return _explain_connect(str(error), url)
        case _:
            return f"the connection broke ({str(error) or type(error).__name__})"


def _explain_connect(text: str, url: str) -> str:
    host = urlsplit(url).hostname
    if any(
        word in text for word in ("Name or service not known", "nodename nor servname", "getaddrinfo", "resolution")
    ):
        return f"the name {host} is not known to DNS here"
    if "refused" in text or "All connection attempts failed" in text:
        return f"nothing listens at {url}"
    return f"no connection to {url} ({text})"


def _explain_certificate(error: ssl.SSLCertVerificationError, url: str) -> str:
    reason = error.verify_message or str(error)
    host = urlsplit(url).hostname
    if "expired" in reason:
        return f"the TLS certificate of {host} has expired (or this machine's clock is wrong)"
    if "not yet valid" in reason:
        return f"the TLS certificate of {host} is not valid yet: this machine's clock is probably wrong"
    if "mismatch" in reason or "not valid for" in reason:
        return f"the TLS certificate is for another name than {host}"
    if "self-signed" in reason or "self signed" in reason or "unable to get local issuer" in reason:
        return f"nobody trusted here vouches for the TLS certificate of {host} ({reason}); give its CA with --ca-file"
    return f"the TLS certificate of {host} is not accepted: {reason}"


def _cause(error: BaseException, kind: type[BaseException]) -> BaseException | None:
    """The first of `kind` among an error and what led to it."""
    seen: BaseException | None = error
    while seen is not None and not isinstance(seen, kind):
        seen = seen.__cause__ or seen.__context__
    return seen


def detail(answer: httpx.Response) -> str:
    """Why a server refused, in its own words."""
    try:
        content: Any = answer.json()
    except ValueError:
        return answer.text.strip()[:200] or answer.reason_phrase
    return str(content["detail"]) if isinstance(content, dict) and "detail" in content else answer.text[:200]

"""The server that a recipe runs against: the one that answers, or one for the time of the run."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from ssl import SSLContext
from urllib.parse import urlsplit

from openrl import apikey, remotes
from openrl.errors import BackendFault, BadRequest, NotReady
from openrl.settings import Resolved, is_loopback, load, variable
from openrl.tls import trusting
from openrl_cli import console
from openrl_recipes.local_server import ServerError, local_server

_SECONDS = 3.0


@dataclass(frozen=True, slots=True)
class Place:
    """Where a server is, its key, and certificates to trust; `variables` go into a recipe's environment."""

    url: str
    key: str
    certificates: Path | None = None
    local: bool = False

    def variables(self, online: bool = False) -> dict[str, str]:
        """What the SDK reads. A server here has put its models' tokenizers into the local cache: no hub is asked.

        With `online`, or if the user has decided on HF_HUB_OFFLINE, that is left as it is.
        """
        found = {"TINKER_BASE_URL": self.url}
        if self.key:
            found["TINKER_API_KEY"] = self.key
        if self.certificates is not None:
            found["SSL_CERT_FILE"] = str(self.certificates)
        if self.local and not online and variable("HF_HUB_OFFLINE") is None:
            found["HF_HUB_OFFLINE"] = "1"
        return found


@contextmanager
def server_for(models: Sequence[str], log: Path, remote: str | None = None) -> Generator[Place]:
    """The server of a remote, else of TINKER_BASE_URL, else of this machine's settings, else one of its own.

    Says on stderr which. Raises NotReady if a server elsewhere does not answer, BackendFault if its own does not start.
    """
    found = _of_remote(remote) if remote is not None else _of_environment() or _of_this_machine()
    if found is not None:
        _say(f"Running against the server at {found.url}.")
        yield found
        return
    command = " ".join(["openrl serve", *(f"--model {model}" for model in models)])
    _say(f"No server answers here: starting `{command}` for the time of this run. Its log: {log}")
    arguments = [word for model in models for word in ("--model", model)]
    try:
        with local_server(log, arguments) as endpoint:
            yield Place(endpoint.base_url, endpoint.api_key, local=True)
    except ServerError as error:
        raise BackendFault(str(error)) from None


def _say(text: str) -> None:
    """On stderr, unwrapped, so that paths and commands can be copied."""
    console.err.print(text, markup=False, soft_wrap=True)


def answers(url: str, trust: SSLContext | None = None) -> bool:
    """Whether something speaks HTTP there and is well."""
    import httpx

    try:
        return httpx.get(f"{url}/api/v1/healthz", timeout=_SECONDS, verify=trust or True).is_success
    except httpx.HTTPError:
        return False


def _of_remote(name: str) -> Place:
    remote = remotes.find(name)
    if remote.kube is not None:
        raise BadRequest(
            f"remote {name!r} is reached through a port-forward.",
            f"Serve it here first, and keep it: openrl remote {name}",
        )
    if not answers(remote.url, trusting(None, remote.ca_file)):
        raise NotReady(f"no server answers at {remote.url}.", f"See: openrl remote check {name}")
    return Place(remote.url, remote.token.read(), remote.ca_file)


def _of_environment() -> Place | None:
    """The server that the SDK's own variables name. One elsewhere was meant, and is not replaced by one here."""
    given = variable("TINKER_BASE_URL")
    if not given:
        return None
    url = remotes.check_url(given)
    local = is_loopback(urlsplit(url).hostname or "")
    if answers(url):
        return Place(url, variable("TINKER_API_KEY") or (_key(load({}, None)) if local else ""), local=local)
    if not local:
        raise NotReady(f"no server answers at {url} (TINKER_BASE_URL).", "Unset it to run the recipe on this machine.")
    _say(f"No server answers at {url} (TINKER_BASE_URL).")
    return None


def _of_this_machine() -> Place | None:
    """The server that `openrl serve` with this machine's settings is."""
    resolved = load({}, None)
    server = resolved.settings.server
    host = "127.0.0.1" if server.host in ("0.0.0.0", "::") else server.host
    scheme = "http" if server.tls_cert is None else "https"
    url = f"{scheme}://{f'[{host}]' if ':' in host else host}:{server.port}"
    if not answers(url, trusting(resolved.settings.data_dir, None)):
        return None
    return Place(url, _key(resolved), server.tls_cert, local=True)


def _key(resolved: Resolved) -> str:
    return resolved.api_key or apikey.api_key(resolved.settings.data_dir)

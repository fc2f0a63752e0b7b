"""What runs behind the app in front of a remote, as long as the server does: the tunnel, the link and the keeper."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

from openrl import remotes
from openrl.backends.remote.keeper import Keeper
from openrl.backends.remote.link import Link, label
from openrl.backends.remote.token import Token
from openrl.kube import PortForward
from openrl.remotes import Remote
from openrl.settings import RemoteSettings


def find_remote(settings: RemoteSettings) -> Remote:
    """The remote that the settings mean. Raises SettingsError if there is none."""
    return remotes.find(settings.name or settings.url)


def folder_of(remote: Remote, data_dir: Path) -> Path:
    """Where what belongs to a remote is kept."""
    return data_dir / "remote" / label(remote)


class RemoteService:
    """Everything about one remote that lives as long as the server. `key` is used until the remote refuses it."""

    def __init__(self, remote: Remote, settings: RemoteSettings, data_dir: Path, key: str | None = None) -> None:
        self.remote = remote
        self._tunnel = None if remote.kube is None else PortForward(remote.kube)
        self.link = Link(remote, self._url, Token(remote.token, key), explain=self._explain)
        self.keeper = Keeper(self.link, settings, folder_of(remote, data_dir))

    @asynccontextmanager
    async def reached(self) -> AsyncGenerator[None]:
        """Has the tunnel for the time of the block, where one is needed. Raises NotReady for a cluster that cannot be
        reached, and SettingsError; a remote that is away by its URL is waited for."""
        if self._tunnel is None:
            yield
            return
        async with self._tunnel:
            yield

    async def start(self) -> None:
        """Call it with the tunnel there."""
        self.link.start()
        self.keeper.start()

    def refuse_work(self) -> None:
        """The clients come again; what the remote has accepted goes on there."""
        self.link.let_go()

    async def wind_down(self, seconds: float) -> None:
        """Nothing of ours has to end: what was not accepted is with the client still."""

    async def stop(self) -> None:
        await self.keeper.stop()
        await self.link.stop()

    def _url(self) -> str:
        return self.remote.url if self._tunnel is None else self._tunnel.url

    def _explain(self) -> str | None:
        return None if self._tunnel is None else self._tunnel.error

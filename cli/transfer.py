"""`openrl push` and `openrl pull`: a checkpoint, with its optimizer state, from one server to another."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Mapping
from ssl import SSLContext
from typing import TYPE_CHECKING, Annotated
from urllib.parse import urlsplit

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.text import Text

from openrl import apikey, remotes
from openrl.instance import running_at
from openrl.remotes import Remote
from openrl.settings import Resolved, is_loopback, load
from openrl.tls import trusting
from openrl.tokens import TokenSource
from openrl_cli import console, options

if TYPE_CHECKING:
    from openrl.checkpoints.incoming import Announcement
    from openrl.transfer.copying import Moved

What = Annotated[
    str,
    typer.Argument(
        metavar="RUN|PATH",
        help="tinker://<run>/weights/<name>, or a run's id: its newest training checkpoint.",
        show_default=False,
    ),
]
To = Annotated[
    str | None, typer.Option("--to", metavar="REMOTE", help="A remote's name or URL. Default: the default remote.")
]
From = Annotated[
    str | None, typer.Option("--from", metavar="REMOTE", help="A remote's name or URL. Default: the default remote.")
]
LocalFrom = Annotated[
    str | None, typer.Option("--from", metavar="REMOTE", help="Another server than this machine's: name or URL.")
]
LocalTo = Annotated[
    str | None, typer.Option("--to", metavar="REMOTE", help="Another server than this machine's: name or URL.")
]
BaseModel = Annotated[
    str | None,
    typer.Option("--base-model", metavar="NAME", help="The base model's name there, if it is served under another."),
]
Patience = Annotated[
    float, typer.Option("--patience", metavar="SECONDS", min=0, help="How long a server may be away before we give up.")
]


def push(
    what: What,
    to: To = None,
    source: LocalFrom = None,
    base_model: BaseModel = None,
    patience: Patience = 300.0,
    data_dir: options.DataDir = None,
    config: options.Config = None,
) -> None:
    """Copy a checkpoint from this machine's server to a remote; prints its path there.

    The same command again goes on where an interrupted one ended.
    """
    resolved = load({"data_dir": data_dir}, config)
    _move(what, _End(resolved, source, local=True), _End(resolved, to, local=False), base_model, patience)


def pull(
    what: What,
    source: From = None,
    to: LocalTo = None,
    base_model: BaseModel = None,
    patience: Patience = 300.0,
    data_dir: options.DataDir = None,
    config: options.Config = None,
) -> None:
    """Copy a checkpoint from a remote to this machine's server; prints its path here.

    The same command again goes on where an interrupted one ended.
    """
    resolved = load({"data_dir": data_dir}, config)
    _move(what, _End(resolved, source, local=False), _End(resolved, to, local=True), base_model, patience)


class _End:
    """One end of a transfer: a remote and its key. `local`: this machine's server is meant if none is named."""

    def __init__(self, resolved: Resolved, name: str | None, *, local: bool) -> None:
        self.key: str | None = None  # None: from the remote's own source
        self.trust: SSLContext | None = None
        self.hint = "See: openrl remote check"
        if name is None and local:
            self.hint = "Start it with: openrl serve"
            self.trust = trusting(resolved.settings.data_dir, None)
            self.remote = Remote("this machine's server", _local_url(resolved), TokenSource("none"))
        else:
            self.remote = remotes.find(name)
        url = self.remote.url
        if self.remote.token.kind == "none" and self.remote.kube is None and is_loopback(urlsplit(url).hostname or ""):
            self.key = resolved.api_key or apikey.api_key(resolved.settings.data_dir)


def _local_url(resolved: Resolved) -> str:
    """Where the server of the data folder listens; if none does, where it would."""
    if url := running_at(resolved.settings.data_dir):
        return url.replace("//0.0.0.0:", "//127.0.0.1:").replace("//[::]:", "//[::1]:")
    server = resolved.settings.server
    host = "127.0.0.1" if server.host in ("0.0.0.0", "::") else server.host
    scheme = "http" if server.tls_cert is None else "https"
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{server.port}"


def _move(what: str, source: _End, target: _End, base_model: str | None, patience: float) -> None:
    with Bars() as bars:
        try:
            moved = asyncio.run(_moved(what, source, target, base_model, patience, bars))
        except KeyboardInterrupt:
            bars.close()
            console.err.print("interrupted; the same command again goes on from here")
            raise typer.Exit(130) from None
    how = f"{console.size(moved.sent)} sent" if moved.sent else "it was there already"
    found = f", {console.size(moved.found)} were there from before" if moved.sent and moved.found else ""
    console.err.print(Text(f"{how}{found}; every file's SHA-256 is right"), soft_wrap=True)
    console.out.print(Text(moved.path), soft_wrap=True)


async def _moved(what: str, source: _End, target: _End, base_model: str | None, patience: float, bars: Bars) -> Moved:
    from openrl.transfer.copying import copy_checkpoint  # these bring httpx
    from openrl.transfer.finding import find_checkpoint
    from openrl.transfer.server import reach

    async with (
        reach(source.remote, source.key, patience, bars.waiting, source.trust, source.hint) as giver,
        reach(target.remote, target.key, patience, bars.waiting, target.trust, target.hint) as taker,
    ):
        found = await find_checkpoint(giver, what)
        console.err.print(Text(f"{found.path}: {giver.name} -> {taker.name}"), soft_wrap=True)
        if found.note:
            console.err.print(Text.assemble(("note: ", "bold yellow"), found.note), soft_wrap=True)
        return await copy_checkpoint(giver, found.path, taker, bars, base_model)


class Bars:
    """A bar for each file, with speed and time left; a line an event where there is no terminal."""

    def __init__(self) -> None:
        self._console = Console(file=sys.stderr, highlight=False)
        self._bars = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=30),
            DownloadColumn(),
            TransferSpeedColumn(),
            TimeRemainingColumn(),
            console=self._console,
            disable=not self._console.is_terminal,
        )
        self._tasks: dict[str, TaskID] = {}
        self._said = ""

    def __enter__(self) -> Bars:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._bars.stop()

    def begin(self, announced: Announcement, received: Mapping[str, int]) -> None:
        """See `Progress.begin`."""
        there = sum(received.values())
        more = f", of which {console.size(there)} are there" if there else ""
        self._console.print(Text(f"{len(announced.files)} files, {console.size(announced.size)}{more}"))
        for name, digest in announced.files.items():
            self._tasks[name] = self._bars.add_task(name, total=digest.size, completed=received[name])
        self._bars.start()

    def moved(self, file: str, at: int) -> None:
        """See `Progress.moved`."""
        self._said = ""
        self._bars.update(self._tasks[file], completed=at)

    def checking(self) -> None:
        """See `Progress.checking`."""
        self._console.print("all sent; the server checks it")

    def waiting(self, why: str) -> None:
        """A server does not answer just now."""
        if why != self._said:
            self._console.print(Text.assemble(("waiting: ", "bold yellow"), why), soft_wrap=True)
        self._said = why

"""`openrl remote`: other OpenRL servers by name, and serving one of them here."""

from __future__ import annotations

import asyncio
import getpass
import json
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
import typer.core
from rich.table import Table
from rich.text import Text

from openrl import apikey, keyrings, private_file, remotes
from openrl.errors import BadRequest, SettingsError
from openrl.kube import DEFAULT_PORT, KubeTarget
from openrl.remotes import Remote
from openrl.setting_table import ENV_PREFIX
from openrl.settings import remotes_file
from openrl.tokens import LEGAL, TokenSource
from openrl_cli import console, options

if TYPE_CHECKING:
    from openrl.transfer.checking import Report


class _NamesServe(typer.core.TyperGroup):
    """`openrl remote NAME ...` means `openrl remote run NAME ...`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and not args[0].startswith("-") and args[0] not in self.commands:
            args = ["run", *args]
        return super().parse_args(ctx, args)


app = typer.Typer(
    cls=_NamesServe,
    no_args_is_help=True,
    help="Name other OpenRL servers, check them, and serve one here: openrl remote NAME.",
)

Name = Annotated[str, typer.Argument(metavar="NAME", help="The remote's name.", show_default=False)]
MaybeName = Annotated[
    str | None,
    typer.Argument(metavar="NAME", help="The remote's name. Default: the default one.", show_default=False),
]
Url = Annotated[
    str | None,
    typer.Argument(metavar="URL", help="https://HOST or http://HOST:PORT; not with --service.", show_default=False),
]
TokenFrom = Annotated[
    str | None, typer.Option("--token-from", metavar="SOURCE", help=f"Where the key is: {LEGAL}.", show_default=False)
]
CaFile = Annotated[
    Path | None,
    typer.Option("--ca-file", help="Certificates (PEM) that vouch for the server, instead of the usual ones."),
]
KubeContext = Annotated[
    str | None, typer.Option("--kube-context", help="kubectl's context. Default: its current one.", show_default=False)
]
Namespace = Annotated[
    str | None, typer.Option("--namespace", help="The service's namespace. Default: default.", show_default=False)
]
Service = Annotated[
    str | None,
    typer.Option("--service", help="A Kubernetes service, reached by kubectl port-forward.", show_default=False),
]
Port = Annotated[
    int | None, typer.Option("--port", min=1, max=65535, help=f"The service's port. Default: {DEFAULT_PORT}.")
]
Force = Annotated[bool, typer.Option("--force", help="Replace a remote of that name.")]


@app.command()
def add(
    name: Name,
    url: Url = None,
    token_from: TokenFrom = None,
    ca_file: CaFile = None,
    kube_context: KubeContext = None,
    namespace: Namespace = None,
    service: Service = None,
    port: Port = None,
    force: Force = False,
) -> None:
    """Name a server. The first one becomes the default."""
    _check_free(name)
    kube = _kube_target(kube_context, namespace, service, port)
    if (url is None) == (kube is None):
        raise BadRequest("a remote needs a URL, or --service for one in a Kubernetes cluster, and not both.")
    if ca_file is not None and not ca_file.is_file():
        raise BadRequest(f"--ca-file {ca_file} does not exist.")
    remote = Remote(
        name,
        remotes.check_url(url) if url else f"http://{service}.{namespace or 'default'}:{port or DEFAULT_PORT}",
        _token_source(name, token_from),
        ca_file.absolute() if ca_file else None,
        kube,
    )
    remotes.save(remote, replace=force)
    console.out.print(Text(f"{name} is {remote.kube or remote.url}; its key: {remote.token.shown}"), soft_wrap=True)
    if remote.token.kind == "none":
        console.err.print(Text(f"If it needs a key: openrl remote login {name}"))
    console.err.print(Text(f"See whether it works: openrl remote check {name}"))


@app.command("list")
def list_remotes(as_json: options.Json = False) -> None:
    """All named servers; the default one is marked."""
    default, found = remotes.default_name(), remotes.load_remotes().values()
    if as_json:
        typer.echo(json.dumps([_fields(remote, default) for remote in found], indent=2))
        return
    table = Table("", "name", "server", "key")
    for remote in found:
        mark = "*" if remote.name == default else ""
        where = f"kubernetes: {remote.kube}" if remote.kube else remote.url
        table.add_row(mark, *map(Text, (remote.name, where, remote.token.shown)))
    if found:
        console.out.print(table)
        console.out.print("* is the default; change it with: openrl remote use NAME")
    else:
        console.out.print("no remotes; add one with: openrl remote add NAME URL")


@app.command()
def use(name: Name) -> None:
    """Make a server the default one of commands that name none."""
    remotes.set_default(name)
    console.out.print(Text(f"{name} is the default remote"))


@app.command()
def remove(name: Name) -> None:
    """Forget a server, and the key that `login` has stored for it."""
    gone = remotes.remove(name)
    if gone.token.kind == "keyring":
        keyrings.forget(gone.token.value)
    if gone.token == TokenSource("file", str(_key_file(name))):
        _key_file(name).unlink(missing_ok=True)
    console.out.print(Text(f"{name} is forgotten"))


@app.command()
def login(name: Name) -> None:
    """Store a server's key: in the system keyring if there is one, else in a file that only you can read.

    Asks for it without showing it; or give it on standard input.
    """
    remote = _named(name)
    key = _ask_key(name)
    keyring = keyrings.usable()
    if keyring is not None:
        keyrings.put(name, key)
        source, place = TokenSource("keyring", name), f"the system keyring ({keyring})"
    else:
        private_file.write(_key_file(name), key + "\n")
        source, place = TokenSource("file", str(_key_file(name))), f"{_key_file(name)}, which only you can read"
    remotes.save(replace(remote, token=source), replace=True)
    console.out.print(Text(f"the key of {name} is in {place}"), soft_wrap=True)
    if keyring is None:
        console.err.print('For the system keyring: pip install "openrl[remote]"', markup=False)
    console.err.print(Text(f"See whether it is good: openrl remote check {name}"))


@app.command()
def check(name: MaybeName = None, as_json: options.Json = False) -> None:
    """Whether a server can be used from here, and what is wrong if not. Status 1 if something is."""
    from openrl.transfer.checking import check as look  # brings httpx

    report = asyncio.run(look(remotes.find(name)))
    if as_json:
        typer.echo(json.dumps({**asdict(report), "good": report.good}, indent=2))
    else:
        _show(report)
    raise typer.Exit(0 if report.good else 1)


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True}, add_help_option=False)
def run(context: typer.Context, name: Name) -> None:
    """Serve a remote here: the same as `openrl serve --backend remote --remote NAME`, whose options it takes."""
    from openrl_cli.serve import serve

    _named(name)
    command = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    command.command()(serve)
    arguments = ["--backend", "remote", "--remote", name, *context.args]
    code = command(arguments, prog_name=f"openrl remote {name}", standalone_mode=False)
    raise typer.Exit(code if isinstance(code, int) else 0)


def _named(name: str) -> Remote:
    """A remote by name only. Raises SettingsError that also shows the commands, since one may have been meant."""
    found = remotes.load_remotes()
    if name not in found:
        known = f"Known are: {', '.join(found)}. " if found else ""
        raise SettingsError(
            f"there is no remote {name!r}.", f"{known}Add it with: openrl remote add {name} URL (or see --help)"
        )
    return found[name]


def _check_free(name: str) -> None:
    remotes.check_name(name)
    taken = [command.name or getattr(command.callback, "__name__", "") for command in app.registered_commands]
    if name in taken:
        raise BadRequest(f"{name!r} is a command of `openrl remote`, and so it cannot be a remote's name.")


def _kube_target(
    context: str | None, namespace: str | None, service: str | None, port: int | None
) -> KubeTarget | None:
    if service is None:
        if context is not None or namespace is not None or port is not None:
            raise BadRequest("--kube-context, --namespace and --port go with --service.")
        return None
    for option, value in (("--service", service), ("--namespace", namespace), ("--kube-context", context)):
        if value is not None and (not value or value.startswith("-")):
            raise BadRequest(f"{option} {value!r} is not a name that kubectl takes.")
    return KubeTarget(service, namespace or "default", port or DEFAULT_PORT, context)


def _token_source(name: str, text: str | None) -> TokenSource:
    if text is None:
        return TokenSource("none")
    try:
        source = TokenSource.parse(text)
    except ValueError as error:
        raise BadRequest(f"--token-from: {error}.") from None
    match source.kind:
        case "file":
            return TokenSource("file", str(Path(source.value).expanduser().absolute()))
        case "keyring":
            return TokenSource("keyring", source.value or name)
        case "env" if source.value.startswith(ENV_PREFIX):
            raise BadRequest(
                f"--token-from: variables that begin with {ENV_PREFIX} are settings of the server, and others of that "
                "kind stop its start.",
                "Take another name, such as CLUSTER_KEY.",
            )
        case _:
            return source


def _ask_key(name: str) -> str:
    """The key from the terminal, unseen, or from standard input. Raises BadRequest for what can be none."""
    given = getpass.getpass(f"Key of {name} (not shown): ") if sys.stdin.isatty() else sys.stdin.readline()
    key = given.strip()
    if not apikey.is_key(key):
        raise BadRequest("that is no API key: one begins with `tml-`.", "Make one on the server: openrl keys create")
    return key


def _key_file(name: str) -> Path:
    return remotes_file().parent / "keys" / name


def _fields(remote: Remote, default: str | None) -> dict[str, Any]:
    return {
        "name": remote.name,
        "default": remote.name == default,
        "url": remote.url,
        "key": remote.token.shown,
        "ca_file": str(remote.ca_file) if remote.ca_file else None,
        "kube": asdict(remote.kube) if remote.kube else None,
    }


def _show(report: Report) -> None:
    table = Table(show_header=False, box=None)
    for label, value in _rows(report):
        table.add_row(f"[bold]{label}[/]", Text(value))
    console.out.print(table)
    for note in report.notes:
        console.out.print(Text.assemble(("note: ", "bold yellow"), note), soft_wrap=True)
    for problem in report.problems:
        console.out.print(Text.assemble(("problem: ", "bold red"), problem), soft_wrap=True)
    if report.good:
        console.out.print(Text.assemble(("good: ", "bold green"), f"{report.name} can be used from here"))


def _rows(report: Report) -> list[tuple[str, str]]:
    rows = [("remote", report.name), ("server", report.url), ("reached", "yes" if report.reached else "no")]
    if report.latency_ms is not None:
        rows.append(("latency", f"{report.latency_ms:.1f} ms (median)"))
    rows.append(("versions", f"here {report.client_version}, there {report.server_version or 'unknown'}"))
    if report.clock_skew_s is not None:
        rows.append(("clock", f"{report.clock_skew_s:+.1f} s"))
    rows.append(("key", f"{report.key_source}: {report.auth or 'not tried'}"))
    if report.scope is not None:
        rows.append(("scope", report.scope))
    rows += [("model", f"{model.name}  {model.state}") for model in report.models]
    return rows

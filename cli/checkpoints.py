"""`openrl checkpoints`: which checkpoints there are and how large; removing them, and taking them out and in."""

from __future__ import annotations

import json
import time
from contextlib import AbstractContextManager
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Column, Table
from rich.text import Text

from openrl.errors import BadRequest
from openrl.settings import Resolved, load
from openrl.store.records import Checkpoint
from openrl.types import CheckpointKind
from openrl_cli import adapters, console, options
from openrl_cli.adapters import Form

if TYPE_CHECKING:
    from openrl_cli.shelf import Shelf

app = typer.Typer(no_args_is_help=True, help="List, show, remove, export, import and prune checkpoints.")

_DAY = 86400.0

TinkerPath = Annotated[str, typer.Argument(metavar="PATH", help="tinker://<run>/<kind>/<name>", show_default=False)]
TinkerPaths = Annotated[
    list[str], typer.Argument(metavar="PATH...", help="tinker://<run>/<kind>/<name>", show_default=False)
]
Run = Annotated[str | None, typer.Option("--run", help="Only those of this run.", show_default=False)]
Kind = Annotated[CheckpointKind | None, typer.Option("--kind", help="Only those of this kind.", show_default=False)]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]
Out = Annotated[Path, typer.Option("--out", help="A new folder.", show_default=False)]
As = Annotated[Form, typer.Option("--as", help="What to make of it.")]
Base = Annotated[
    str | None,
    typer.Option("--base", help="The base model, if it is served under a name not known here.", show_default=False),
]
ImportBase = Annotated[
    str, typer.Option("--base", metavar="MODEL", help="The model that it was trained on.", show_default=False)
]
Name = Annotated[str | None, typer.Option("--name", help="The checkpoint's name. Default: DIR's.", show_default=False)]
Dir = Annotated[
    Path,
    typer.Argument(metavar="DIR", help="Folder of a PEFT adapter.", exists=True, file_okay=False, show_default=False),
]
OlderThan = Annotated[
    float | None, typer.Option("--older-than", metavar="DAYS", help="Made more than DAYS days ago.", show_default=False)
]
Keep = Annotated[
    int | None,
    typer.Option("--keep", metavar="N", min=0, help="All but the newest N of each run and kind.", show_default=False),
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Only show what would be removed.")]


@app.command("list")
def list_checkpoints(
    run: Run = None,
    kind: Kind = None,
    data_dir: options.DataDir = None,
    as_json: options.Json = False,
    config: options.Config = None,
) -> None:
    """Checkpoints, newest first, with their sizes."""
    with _open(load({"data_dir": data_dir}, config)) as shelf:
        found = _select(shelf, run, kind)
    if as_json:
        typer.echo(json.dumps([_fields(checkpoint) for checkpoint in found], indent=2))
        return
    console.out.print(_table(found))
    console.out.print(f"{len(found)} checkpoints, {console.size(_bytes(found))}")


@app.command()
def show(
    path: TinkerPath, data_dir: options.DataDir = None, as_json: options.Json = False, config: options.Config = None
) -> None:
    """What a checkpoint is, and its files."""
    with _open(load({"data_dir": data_dir}, config)) as shelf:
        checkpoint = shelf.find(path)
        folder = shelf.folders.absolute(checkpoint.folder)
    files = {file.name: file.stat().st_size for file in sorted(folder.iterdir())}
    if as_json:
        typer.echo(json.dumps({**_fields(checkpoint), "folder": str(folder), "files": files}, indent=2))
        return
    table = Table(show_header=False, box=None)
    for key, value in {**_fields(checkpoint), "folder": str(folder)}.items():
        table.add_row(f"[bold]{key.removesuffix('_bytes').replace('_', ' ')}[/]", Text(_plain(key, value)))
    for name, size in files.items():
        table.add_row("[bold]file[/]", Text(f"{name}  {console.size(size)}"))
    console.out.print(table)


@app.command()
def rm(paths: TinkerPaths, yes: Yes = False, data_dir: options.DataDir = None, config: options.Config = None) -> None:
    """Remove checkpoints. What a sampler or a run still needs stays on disk until it is done."""
    with _open(load({"data_dir": data_dir}, config)) as shelf:
        _remove(shelf, [shelf.find(path) for path in paths], ask=not yes)


@app.command()
def prune(
    older_than: OlderThan = None,
    keep: Keep = None,
    run: Run = None,
    kind: Kind = None,
    dry_run: DryRun = False,
    yes: Yes = False,
    data_dir: options.DataDir = None,
    config: options.Config = None,
) -> None:
    """Remove what is old, or all but the newest of each run. Published checkpoints stay."""
    if older_than is None and keep is None:
        raise BadRequest("prune needs --older-than DAYS, --keep N, or both.")
    with _open(load({"data_dir": data_dir}, config)) as shelf:
        doomed = _surplus([c for c in _select(shelf, run, kind) if not c.public], older_than, keep)
        if dry_run or not doomed:
            console.out.print(_table(doomed))
            console.out.print(f"{len(doomed)} checkpoints, {console.size(_bytes(doomed))} would be removed")
            return
        _remove(shelf, doomed, ask=not yes)


@app.command()
def export(
    path: TinkerPath,
    out: Out,
    form: As = Form.PEFT,
    base: Base = None,
    data_dir: options.DataDir = None,
    config: options.Config = None,
) -> None:
    """Write a checkpoint as a PEFT adapter, as Tinker's archive, or merged into its base model."""
    resolved = load({"data_dir": data_dir}, config)
    with _open(resolved) as shelf:
        checkpoint = shelf.find(path)
        folder = shelf.folders.absolute(checkpoint.folder)
    made = adapters.export(checkpoint, folder, form, out, base, resolved.settings)
    console.out.print(Text(str(made)), soft_wrap=True)


@app.command("import")
def import_adapter(
    folder: Dir,
    base: ImportBase,
    name: Name = None,
    data_dir: options.DataDir = None,
    config: options.Config = None,
) -> None:
    """Make a checkpoint of a PEFT adapter or an unpacked Tinker archive, to sample from and to train on."""
    resolved = load({"data_dir": data_dir}, config)
    with _open(resolved) as shelf:
        checkpoint = adapters.lay(folder, base, name, resolved.settings, shelf.folders)
        try:
            shelf.adopt(checkpoint)
        except BaseException:
            shelf.folders.remove(checkpoint.folder)
            raise
    console.out.print(Text(checkpoint.path), soft_wrap=True)


def _open(resolved: Resolved) -> AbstractContextManager[Shelf]:
    from openrl_cli.shelf import open_shelf  # brings the database; `openrl --help` does without

    return open_shelf(resolved)


def _select(shelf: Shelf, run: str | None, kind: CheckpointKind | None) -> list[Checkpoint]:
    return [c for c in shelf.all() if run in (None, c.run_id) and kind in (None, c.kind)]


def _surplus(candidates: list[Checkpoint], older_than: float | None, keep: int | None) -> list[Checkpoint]:
    """Those that are old enough and not among the newest `keep` of their run and kind; candidates come newest first."""
    seen: dict[tuple[str, str], int] = {}
    doomed: list[Checkpoint] = []
    for checkpoint in candidates:
        key = checkpoint.run_id, str(checkpoint.kind)
        seen[key] = seen.get(key, 0) + 1
        old = older_than is None or time.time() - checkpoint.created_at > older_than * _DAY
        if old and (keep is None or seen[key] > keep):
            doomed.append(checkpoint)
    return doomed


def _remove(shelf: Shelf, doomed: list[Checkpoint], *, ask: bool) -> None:
    if ask:
        console.err.print(_table(doomed))
        typer.confirm(f"Remove {len(doomed)} checkpoints ({console.size(_bytes(doomed))})?", abort=True, err=True)
    for checkpoint in doomed:
        shelf.delete(checkpoint)
        kept = shelf.folders.absolute(checkpoint.folder).exists()
        later = "; its files stay while they are needed" if kept else ""
        text = f"removed {checkpoint.path} ({console.size(checkpoint.size_bytes)}){later}"
        console.out.print(Text(text), soft_wrap=True)


def _table(found: list[Checkpoint]) -> Table:
    table = Table(Column("path", overflow="fold"), "base model", "rank", "size", "made", "expires", "public")
    for c in found:
        expires = "never" if c.expires_at is None else _when(c.expires_at)
        size, made = console.size(c.size_bytes), _when(c.created_at)
        rank = "full" if c.spec.rank is None else str(c.spec.rank)
        table.add_row(Text(c.path), Text(c.base_model), rank, size, made, expires, "yes" if c.public else "no")
    return table


def _bytes(found: list[Checkpoint]) -> int:
    return sum(checkpoint.size_bytes for checkpoint in found)


def _when(seconds: float) -> str:
    return datetime.fromtimestamp(seconds).astimezone().strftime("%Y-%m-%d %H:%M")


def _fields(checkpoint: Checkpoint) -> dict[str, Any]:
    fields = asdict(checkpoint)
    del fields["folder"], fields["ephemeral"]
    return fields


def _plain(key: str, value: Any) -> str:
    if key == "size_bytes":
        return console.size(value)
    if key in ("created_at", "expires_at"):
        return "never" if value is None else _when(value)
    if isinstance(value, dict):
        pairs: dict[str, Any] = value
        return ", ".join(f"{name}={inner}" for name, inner in pairs.items()) or "none"
    return ("yes" if value else "no") if isinstance(value, bool) else str(value)

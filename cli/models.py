"""`openrl models`: which models are here, fetching and removing them, and further names for them."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer
from rich.table import Column, Table
from rich.text import Text

from openrl.errors import ModelError
from openrl.models import aliases, catalog, hub_cache, info, store
from openrl.models.catalog import Kind
from openrl.models.store import Stored
from openrl.settings import load
from openrl_cli import console, options
from openrl_cli.progress import ModelBars

app = typer.Typer(no_args_is_help=True, help="List, pull, remove, show and rename models.")

Name = Annotated[
    str, typer.Argument(help="Embedded model, served name, folder, .gguf file or hub id.", show_default=False)
]
Pair = Annotated[str | None, typer.Argument(metavar="[NAME=MODEL]", help="The alias to save.", show_default=False)]
Drop = Annotated[str | None, typer.Option("--remove", help="Forget the alias of that name.", show_default=False)]


@app.command("list")
def list_models(data_dir: options.DataDir = None, as_json: options.Json = False, config: options.Config = None) -> None:
    """Models that are embedded, converted, or whole in the Hugging Face cache."""
    data = load({"data_dir": data_dir}, config).settings.data_dir
    known = store.stored(data)
    saved = aliases.read(data)
    if as_json:
        typer.echo(json.dumps([_fields(model, saved) for model in known], indent=2))
        return
    table = Table("model", Column("served as", overflow="fold"), "kind", "state", "size")
    for model in known:
        size = console.size(model.size_bytes) if model.size_bytes else f"{console.size(_to_fetch(model))} to fetch"
        state = "[green]ready[/]" if model.folder else "not pulled"
        names = ", ".join((model.spec.name, *_aliases(model, saved)))
        table.add_row(_title(model), names, model.kind.value, state, size)
    console.out.print(table)


@app.command()
def pull(model: Name, data_dir: options.DataDir = None, config: options.Config = None) -> None:
    """Fetch and convert a model now, so that `openrl serve` need not."""
    from openrl.models.prepare import prepare

    settings = load({"data_dir": data_dir}, config).settings
    spec = catalog.resolve(model)
    with ModelBars() as bars:
        folder = prepare(
            spec, settings.data_dir, lambda step: bars.update(spec.name, step.stage, step.done, step.total)
        )
    console.out.print(Text(f"{spec.name} is ready in {folder}"), soft_wrap=True)
    console.out.print(Text(f"Serve it with: openrl serve --model {spec.source}"), soft_wrap=True)


@app.command()
def show(
    model: Name, data_dir: options.DataDir = None, as_json: options.Json = False, config: options.Config = None
) -> None:
    """What a model is: names, size, context, memory it needs, and whether clients find its tokenizer."""
    data = load({"data_dir": data_dir}, config).settings.data_dir
    found = store.find(model, data)
    fields = _fields(found, aliases.read(data)) | _details(found)
    if as_json:
        typer.echo(json.dumps(fields, indent=2))
        return
    table = Table(show_header=False, box=None)
    for key, value in fields.items():
        table.add_row(f"[bold]{key.removesuffix('_bytes').replace('_', ' ')}[/]", Text(_plain(key, value)))
    console.out.print(table)
    if found.folder is None:
        console.err.print(Text(f"Fetch it with: openrl models pull {model}"), soft_wrap=True)


@app.command()
def rm(model: Name, data_dir: options.DataDir = None, config: options.Config = None) -> None:
    """Remove what was fetched and converted for a model, and its tokenizer from the Hugging Face cache."""
    data = load({"data_dir": data_dir}, config).settings.data_dir
    found = store.find(model, data)
    if not found.size_bytes:
        raise ModelError(f"{found.spec.name} is not on this machine.", "See `openrl models list`.")
    freed = store.remove(found, data)
    for name in (found.spec.name, *found.spec.aliases):
        hub_cache.take_up(name)
    console.out.print(Text(f"{found.spec.name} was removed ({console.size(freed)})"), soft_wrap=True)


@app.command()
def alias(
    pair: Pair = None, remove: Drop = None, data_dir: options.DataDir = None, config: options.Config = None
) -> None:
    """Save NAME=MODEL, so that `openrl serve` always serves MODEL under NAME too; without arguments, list them."""
    data = load({"data_dir": data_dir}, config).settings.data_dir
    if remove:
        aliases.drop(data, remove)
        hub_cache.take_up(remove)
    if pair:
        name, found, target = pair.partition("=")
        if not found or not target:
            raise ModelError(f"{pair!r} is not an alias.", "Write NAME=MODEL.")
        aliases.add(data, name, target)
    for name, target in aliases.read(data).items():
        console.out.print(Text(f"{name} = {target}"), soft_wrap=True)


def _title(model: Stored) -> str:
    return model.spec.source if model.kind is Kind.EMBEDDED else model.spec.name


def _aliases(model: Stored, saved: dict[str, str]) -> list[str]:
    own = (model.spec.name, model.spec.source)
    return [*model.spec.aliases, *(name for name, target in saved.items() if target in own)]


def _to_fetch(model: Stored) -> int:
    embedded = catalog.embedded(model.spec.source)
    return sum(wheel.size for wheel in embedded.wheels) if embedded else 0


def _fields(model: Stored, saved: dict[str, str]) -> dict[str, Any]:
    return {
        "name": model.spec.name,
        "aliases": _aliases(model, saved),
        "source": model.spec.source,
        "kind": model.kind.value,
        "ready": model.folder is not None,
        "folder": str(model.folder) if model.folder else None,
        "size_bytes": model.size_bytes,
    }


def _details(model: Stored) -> dict[str, Any]:
    embedded = catalog.embedded(model.spec.source)
    details: dict[str, Any] = {"license": embedded.license} if embedded else {}
    details["tokenizer_in_hub_cache"] = model.kind is Kind.HUB or hub_cache.is_laid(model.spec.name)
    if model.folder is None:
        return details
    known = info.describe(model.folder)
    needed = {f"memory_{dtype}": info.memory_needed(known, dtype) for dtype in ("bfloat16", "float32")}
    shape = {"family": known.family, "parameters": known.parameters, "vocab_size": known.vocab_size}
    return {**details, **shape, "max_context": known.max_context, "max_lora_rank": known.max_lora_rank, **needed}


def _plain(key: str, value: Any) -> str:
    if key == "size_bytes" or key.startswith("memory_"):
        return console.size(value)
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "none"
    return f"{value:,}" if isinstance(value, int) else str(value)

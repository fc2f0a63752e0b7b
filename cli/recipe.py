"""`openrl recipe`: the example programs that train, listed, shown, run, and run side by side."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any, get_args, get_type_hints

import typer
from rich import box
from rich.table import Table
from rich.text import Text

from openrl.errors import BadRequest, ModelError
from openrl_cli import console
from openrl_cli.recipe_options import flags, read, variants
from openrl_recipes import catalog
from openrl_recipes.catalog import Recipe

app = typer.Typer(no_args_is_help=True, help="Programs that train a model, to run as they are and to copy from.")

_NEEDED = ("tinker", "matplotlib", "transformers")

Name = Annotated[
    str,
    typer.Argument(
        metavar="NAME",
        help="A recipe (openrl recipe list), or a module of yours with Options and main.",
        show_default=False,
    ),
]
Parallel = Annotated[int, typer.Option(min=1, help="With --sweep: how many runs at once.")]
Sweep = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME=VALUE,VALUE",
        help="Run once for each value of an option; several sweeps make all combinations.",
        show_default=False,
    ),
]
Remote = Annotated[
    str | None,
    typer.Option("--remote", metavar="NAME", help="Run on a remote's server (openrl remote list).", show_default=False),
]


@app.command("list")
def list_recipes() -> None:
    """The recipes that come with OpenRL."""
    table = Table(box=None, padding=(0, 2, 0, 0))
    for name in ("name", "what it does", "minutes"):
        table.add_column(name, justify="right" if name == "minutes" else "left")
    for recipe in catalog.RECIPES:
        table.add_row(f"[bold]{recipe.name}[/]", recipe.summary, str(recipe.minutes))
    console.out.print(table)
    models = ", ".join(dict.fromkeys(recipe.model for recipe in catalog.RECIPES))
    console.out.print(f"\nMinutes on two CPU cores with what they train by default: {models}.", soft_wrap=True)
    console.out.print("Run one: openrl recipe run NAME. Its options: openrl recipe show NAME", soft_wrap=True)


@app.command()
def show(name: Name) -> None:
    """What a recipe does, its options with their defaults, where its source is, and how to run it."""
    loaded = _load(name)
    console.out.print(Text(inspect.getdoc(loaded.module) or ""), soft_wrap=True)
    table = Table(title="Options", title_justify="left", box=box.SIMPLE_HEAD)
    for heading in ("option", "default", "what it is"):
        table.add_column(heading, overflow="fold")
    hints = get_type_hints(loaded.options, include_extras=True)
    for field in dataclasses.fields(loaded.options):
        help_text = str(get_args(hints[field.name])[-1])
        table.add_row(Text(f"--{field.name.replace('_', '-')}"), Text(_default(field.default)), Text(help_text))
    console.out.print(table)
    console.out.print(Text(f"Source:  {loaded.module.__file__}"), soft_wrap=True)
    console.out.print(Text(f"Run it:  openrl recipe run {name} [--OPTION VALUE ...]"), soft_wrap=True)
    console.out.print(Text(f"Or:      python -m {loaded.recipe.module} [--OPTION VALUE ...]"), soft_wrap=True)


@app.command(context_settings={"ignore_unknown_options": True, "allow_extra_args": True})
def run(context: typer.Context, name: Name, parallel: Parallel = 3, sweep: Sweep = None, remote: Remote = None) -> None:
    """Run a recipe: every other --flag VALUE or key=value is an option of the recipe (openrl recipe show NAME).

    Runs against the server in TINKER_BASE_URL, or the one that `openrl serve` has started here; if none answers, one is
    started for the time of the run. Run again with the same options, a recipe goes on where it was stopped.

    With --sweep, runs are made side by side on one server, each in a folder of its own, and compared at the end:

        openrl recipe run pig_latin --parallel 3 --sweep lr=3e-4,1e-3,3e-3
    """
    from openrl_cli.recipe_runs import Interrupted, interruptible

    loaded = _load(name)
    values = read(context.args, loaded.options)
    plans = [
        _Plan.of(loaded, {**values, **variant.values}, variant.name)
        for variant in variants(sweep or [], loaded.options)
    ]
    try:
        with interruptible():
            status = _run_sweep(loaded, plans, parallel, remote) if sweep else _run_once(loaded, plans[0], remote)
    except Interrupted as interrupted:
        console.err.print("Stopped.")
        status = interrupted.status
    raise typer.Exit(status)


# ---- what a recipe is ----


@dataclass(frozen=True, slots=True)
class _Loaded:
    """A recipe with its module and its options' class."""

    recipe: Recipe
    module: ModuleType
    options: type[Any]


@dataclass(frozen=True, slots=True)
class _Plan:
    """One run: its options, checked, and the flags that give them."""

    options: Any
    flags: Sequence[str]
    name: str

    @staticmethod
    def of(loaded: _Loaded, values: Mapping[str, str], name: str) -> _Plan:
        """`name` is that of a run of a sweep, whose folder lies in the sweep's. Raises BadRequest for a bad value."""
        from openrl_recipes.shared.options import OptionError, parse

        try:
            options = parse(loaded.options, flags(values, loaded.options))
            if name:
                values = {**values, "out": str(Path(options.out) / name)}
                options = parse(loaded.options, flags(values, loaded.options))
        except OptionError as error:
            raise BadRequest(str(error), f"See: openrl recipe show {loaded.recipe.name}") from None
        return _Plan(options, flags(values, loaded.options), name)

    @property
    def models(self) -> list[str]:
        """The base models that it asks the server for: `model`, and what is named like `teacher_model`."""
        names = [field.name for field in dataclasses.fields(self.options)]
        found = [getattr(self.options, name) for name in names if name == "model" or name.endswith("_model")]
        return [str(model) for model in found if model]

    @property
    def online(self) -> bool:
        """Whether it asks for something of the Hugging Face hub; a recipe that may do so has a property `online`."""
        return bool(getattr(self.options, "online", False))


def _load(name: str) -> _Loaded:
    """Raises BadRequest for what is no recipe, ModelError if packages are missing."""
    missing = [package for package in _NEEDED if importlib.util.find_spec(package) is None]
    if missing:
        raise ModelError(f"recipes need {', '.join(missing)}.", "Run: pip install 'openrl[recipes]'")
    recipe = catalog.find(name) or (Recipe(name, "", name) if "." in name else None)
    if recipe is None:
        known = ", ".join(each.name for each in catalog.RECIPES)
        raise BadRequest(
            f"there is no recipe {name!r}.", f"There are: {known}; or a module of yours, such as my.recipe."
        )
    if str(Path.cwd()) not in sys.path:
        sys.path.append(str(Path.cwd()))  # where `python -m` looks, too
    try:
        module = importlib.import_module(recipe.module)
    except ModuleNotFoundError as error:
        raise ModelError(f"{recipe.module} cannot be imported: there is no {error.name}.") from error
    options = getattr(module, "Options", None)
    if not dataclasses.is_dataclass(options) or not callable(getattr(module, "main", None)):
        raise BadRequest(f"{recipe.module} is no recipe.", "It has a dataclass Options and a function main(options).")
    return _Loaded(recipe, module, options)  # pyright: ignore[reportArgumentType] -- a class, as it has no values yet


def _default(value: object) -> str:
    return "" if value == "" else str(value)


# ---- running ----


def _run_once(loaded: _Loaded, plan: _Plan, remote: str | None) -> int:
    from openrl_cli.recipe_runs import python_module, run_one
    from openrl_cli.recipe_server import server_for
    from openrl_recipes.local_server import inherited_environment

    with server_for(plan.models, Path(plan.options.out) / "server.log", remote) as place:
        environment = {**inherited_environment(), **place.variables(plan.online)}
        return run_one(python_module(loaded.recipe.module, plan.flags), environment)


def _run_sweep(loaded: _Loaded, plans: Sequence[_Plan], parallel: int, remote: str | None) -> int:
    from openrl_cli.recipe_runs import Experiment, python_module, run_all
    from openrl_cli.recipe_server import server_for
    from openrl_recipes.local_server import inherited_environment

    folders = [Path(plan.options.out) for plan in plans]
    out = folders[0].parent
    experiments = [
        Experiment(
            plan.name, python_module(loaded.recipe.module, plan.flags), folder, folder.with_name(f"{plan.name}.log")
        )
        for plan, folder in zip(plans, folders, strict=True)
    ]
    models = list(dict.fromkeys(model for plan in plans for model in plan.models))
    with server_for(models, out / "server.log", remote) as place:
        online = any(plan.online for plan in plans)
        run_all(experiments, parallel, {**inherited_environment(), **place.variables(online)})
    return _compare(experiments, out)


def _compare(experiments: Sequence[Any], out: Path) -> int:
    """Table, plot and page of all runs, the logs' ends of those that failed; 1 if any did."""
    from openrl_recipes.shared.compare import Compared, show_comparison, write_comparison

    compared = [Compared(each.name, each.folder, each.state) for each in experiments]
    failed = [each for each in experiments if each.state != "done"]
    for each in failed:
        console.err.print(Text(f"\n{each.name} failed. The end of {each.log}:", style="bold red"), soft_wrap=True)
        console.err.print(Text(each.tail()), soft_wrap=True)
    show_comparison(compared, console.out)
    page = write_comparison(compared, out)
    console.out.print(Text(f"Compared: {page} and {page.with_suffix('.png')}"), soft_wrap=True)
    return 1 if failed else 0

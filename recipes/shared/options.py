"""Options of a recipe: a frozen dataclass whose fields are `Annotated[type, "help"]`; each field is a flag.

@dataclass(frozen=True, slots=True)
class Options:
    steps: Annotated[int, "training steps"] = 60

if __name__ == "__main__":
    run(main, Options)
"""

from __future__ import annotations

import dataclasses
import inspect
import sys
from collections.abc import Callable, Sequence
from typing import Annotated, Any, TypeVar, get_args, get_type_hints

import typer

T = TypeVar("T")
# click's UsageError, of which newer releases of typer carry a copy of their own.
_UsageError: Any = typer.BadParameter.__base__


class OptionError(Exception):
    """An option with a value that the recipe cannot use. The message names the option and what is legal."""


def run(main: Callable[[T], object], options: type[T]) -> None:
    """Run `main` with the options of the command line; what the user can mend ends with a line and status 2."""
    app = _app(lambda values: main(options(**values)), options, (sys.modules[main.__module__].__doc__ or "").strip())
    try:
        app()
    except OptionError as error:
        typer.secho(str(error), fg="red", err=True)
        raise SystemExit(2) from None


def parse(options: type[T], arguments: Sequence[str]) -> T:
    """Options from a list of flags. Raises `OptionError` for an unknown flag or a value that is not legal."""
    app = _app(lambda values: options(**values), options, "")
    try:
        return typer.main.get_command(app).main([*arguments], prog_name="recipe", standalone_mode=False)
    except _UsageError as error:
        raise OptionError(error.format_message()) from None


def _app(call: Callable[[dict[str, Any]], object], options: type[Any], text: str) -> typer.Typer:
    """A typer app of one command with a flag for every field."""

    def command(**values: Any) -> object:
        return call(values)

    parameters = list(_parameters(options))
    command.__signature__ = inspect.Signature(parameters)  # pyright: ignore[reportFunctionMemberAccess]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command(help=text)(command)
    return app


def _parameters(options: type[Any]) -> Sequence[inspect.Parameter]:
    hints = get_type_hints(options, include_extras=True)
    made: list[inspect.Parameter] = []
    for field in dataclasses.fields(options):
        kind, text = get_args(hints[field.name])
        annotation = Annotated[kind, typer.Option(help=text)]
        only = inspect.Parameter.KEYWORD_ONLY
        made.append(inspect.Parameter(field.name, only, default=field.default, annotation=annotation))
    return made

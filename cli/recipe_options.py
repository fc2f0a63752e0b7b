"""What stands behind `openrl recipe run NAME`: flags and key=value as options of the recipe, and sweeps over them."""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from openrl.errors import BadRequest

_NOT_IN_A_NAME = re.compile(r"[^A-Za-z0-9._=,+-]+")
_YES, _NO = ("true", "yes", "on", "1"), ("false", "no", "off", "0")


@dataclass(frozen=True, slots=True)
class Variant:
    """One run of a sweep: what to call it (its folder, too), and its values."""

    name: str
    values: Mapping[str, str]


def read(words: Sequence[str], options: type[Any]) -> dict[str, str]:
    """Values by option from `--flag VALUE`, `--flag=VALUE`, `--switch`, `--no-switch` and `key=value`.

    Raises BadRequest for what is none of them, and for a name that no option or more than one has.
    """
    found: dict[str, str] = {}
    rest = [*words]
    while rest:
        word = rest.pop(0)
        name, given, value = word.removeprefix("--").partition("=")
        if not word.startswith("--") and not given:
            raise BadRequest(f"{word!r} is no option.", "The form is --flag VALUE or key=value.")
        if not given and _switched(name, options):
            option, value = _switch(name, options)
        else:
            option = resolve(name, options)
            if not given:
                if not rest:
                    raise BadRequest(f"--{name} wants a value.")
                value = rest.pop(0)
        found[option] = value
    return found


def resolve(name: str, options: type[Any]) -> str:
    """The option of a name: itself, what the recipe's `short` says, or the only one that ends with it, as `sft_lr`
    does with `lr`. Raises BadRequest."""
    wanted = name.replace("-", "_")
    names = _names(options)
    wanted = getattr(options, "short", {}).get(wanted, wanted)
    if wanted in names:
        return wanted
    candidates = [each for each in names if each.endswith(f"_{wanted}")]
    if len(candidates) == 1:
        return candidates[0]
    if candidates:
        raise BadRequest(f"{name!r} may mean {' or '.join(candidates)}.", "Give the whole name.")
    raise BadRequest(f"the recipe has no option {name!r}.", f"It has: {', '.join(names)}.")


def flags(values: Mapping[str, str], options: type[Any]) -> list[str]:
    """The command line for these values. Raises BadRequest for a switch that is neither true nor false."""
    words: list[str] = []
    for name, value in values.items():
        flag = name.replace("_", "-")
        if not _is_switch(name, options):
            words.append(f"--{flag}={value}")
        elif value.lower() in (*_YES, *_NO):
            words.append(f"--{flag}" if value.lower() in _YES else f"--no-{flag}")
        else:
            raise BadRequest(f"{name} is {value!r}.", "Legal: true or false.")
    return words


def variants(sweeps: Sequence[str], options: type[Any]) -> list[Variant]:
    """All combinations of sweeps such as "lr=1e-4,3e-4". Raises BadRequest for a malformed one."""
    axes: dict[str, list[str]] = {}
    for sweep in sweeps:
        name, given, listed = sweep.partition("=")
        each = [value.strip() for value in listed.split(",") if value.strip()]
        option = resolve(name, options) if given else ""
        if not each or len(set(each)) < len(each) or option in axes:
            raise BadRequest(
                f"--sweep {sweep!r} is no sweep.", "The form is NAME=VALUE,VALUE,... with each value once."
            )
        if option == "out":
            raise BadRequest("a sweep over `out` makes no sense: each run has a folder of its own.")
        axes[option] = each
    made: list[Variant] = []
    for combination in itertools.product(*axes.values()):
        values = dict(zip(axes, combination, strict=True))
        name = ",".join(f"{option}={value}" for option, value in values.items())
        made.append(Variant(_NOT_IN_A_NAME.sub("_", name), values))
    if len({variant.name for variant in made}) < len(made):
        raise BadRequest("two values of the sweep would have the same folder.")
    return made


def _names(options: type[Any]) -> list[str]:
    return [field.name for field in dataclasses.fields(options)]


def _is_switch(name: str, options: type[Any]) -> bool:
    return any(field.name == name and isinstance(field.default, bool) for field in dataclasses.fields(options))


def _switched(name: str, options: type[Any]) -> bool:
    """Whether `--name` stands alone: a switch, or a switch that is turned off."""
    wanted = name.replace("-", "_")
    return any(_is_switch(each, options) for each in (wanted, wanted.removeprefix("no_")))


def _switch(name: str, options: type[Any]) -> tuple[str, str]:
    wanted = name.replace("-", "_")
    return (wanted, "true") if _is_switch(wanted, options) else (wanted.removeprefix("no_"), "false")

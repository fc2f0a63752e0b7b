"""Run the cookbook's recipes and its own server tests against `openrl serve`, and write the table in docs/cookbook.md.

    python -m cookbook.run --env .venv/cookbook [--only NAME] [--write docs/cookbook.md]

`make cookbook` does it all. The outcome of each recipe is kept beside the environment, so that the table is whole also
after a run of a few. Exits with 1 if a recipe did not end as `cookbook.recipes` says it does.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from cookbook.recipes import ABSENT, RECIPES, TESTS, VALIDATE, Recipe
from cookbook.setting import Cookbook, Kitchen, kitchen

BEGIN, END = "<!-- results: begin -->", "<!-- results: end -->"
_ANSI = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_SHOWN = 240  # characters of a log's last line


@dataclass(frozen=True)
class Outcome:
    recipe: Recipe
    status: int  # exit status
    seconds: float
    last_line: str  # of the log

    @property
    def as_expected(self) -> bool:
        if self.recipe.fails_with:
            return self.status != 0 and self.recipe.fails_with in self.last_line
        return self.status == 0

    @property
    def word(self) -> str:
        if not self.as_expected:
            return "**failed**"
        return "refused" if self.recipe.fails_with else "runs"


def run(setting: Kitchen, recipe: Recipe) -> Outcome:
    """Run one recipe in a folder of its own; its output goes to `logs/<name>.log`."""
    slug = re.sub(r"[^a-z0-9]+", "-", recipe.name.lower()).strip("-")
    runs = setting.folder / "runs" / slug
    runs.mkdir(parents=True)
    log = setting.folder / "logs" / f"{slug}.log"
    log.parent.mkdir(exist_ok=True)
    started = time.monotonic()
    status = _call(setting, recipe, runs, log)
    if status == -signal.SIGABRT:
        # Seen once, after all output: Python aborts while it shuts down beside threads of the SDK that still run. That
        # says nothing of the server, so it has a second chance; the log beside has the first one's trace.
        log.rename(log.with_suffix(".aborted.log"))
        status = _call(setting, recipe, runs, log)
    last = _last_line(log, setting.folder, wanted=recipe.fails_with)
    return Outcome(recipe, status, time.monotonic() - started, last)


def _call(setting: Kitchen, recipe: Recipe, runs: Path, log: Path) -> int:
    filled = [part.replace("{folder}", str(setting.folder)) for part in recipe.command]
    command = [str(setting.cookbook.python), *filled]
    # Tests are modules of the source distribution; recipes are those of the installed package.
    where = setting.cookbook.source if recipe.module.startswith(("tests", "pytest")) else runs
    with log.open("wb") as file:
        try:
            return subprocess.run(
                command,
                cwd=where,
                env=setting.environment(runs),
                input=recipe.stdin.encode(),
                stdout=file,
                stderr=subprocess.STDOUT,
                timeout=recipe.timeout,
                check=False,
            ).returncode
        except subprocess.TimeoutExpired:
            file.write(f"\nnot done after {recipe.timeout:g} s\n".encode())
            return -1


def _last_line(log: Path, folder: Path, wanted: str) -> str:
    lines = [_ANSI.sub("", line).strip() for line in log.read_text(errors="replace").splitlines()]
    full = [line for line in lines if line and (not wanted or wanted in line)]
    return (full or lines or [""])[-1].replace(str(folder), "…")


def prepare(setting: Kitchen) -> None:
    """The data of the rubric recipe, made by its own generator."""
    folder = setting.folder / "rubric"
    folder.mkdir()
    code = (
        "import sys; from tinker_cookbook.recipes.rubric.generate_data import generate_dataset\n"
        "generate_dataset(num_train=8, num_test=2, seed=0, write_dir=sys.argv[1])"
    )
    command = [str(setting.cookbook.python), "-c", code, str(folder)]
    subprocess.run(command, cwd=folder, env=setting.environment(folder), check=True, stdout=subprocess.DEVNULL)


def own_tests() -> Iterator[Recipe]:
    """Each test alone: two text_arena runs within a minute would share their log folder."""
    for test in TESTS:
        arguments = ("-q", "-p", "no:cacheprovider", f"tests/recipes/{test}")
        yield Recipe(test, arguments, "nothing", module="pytest")
    yield VALIDATE


def keep(file: Path, outcome: Outcome) -> None:
    """Write an outcome down, under its recipe's name."""
    known = json.loads(file.read_text()) if file.exists() else {}
    known[outcome.recipe.name] = [outcome.status, outcome.seconds, outcome.last_line]
    file.write_text(json.dumps(known, indent=1))


def kept(file: Path) -> list[Outcome]:
    """The last outcome of every recipe that was run, in the order of the list."""
    known = json.loads(file.read_text())
    return [Outcome(recipe, *known[recipe.name]) for recipe in everything() if recipe.name in known]


def everything() -> list[Recipe]:
    return [*RECIPES, *own_tests()]


def table(outcomes: Sequence[Outcome]) -> str:
    """The results as Markdown: recipes, those not run, and the cookbook's own tests."""
    recipes = [outcome for outcome in outcomes if outcome.recipe in RECIPES]
    tests = [outcome for outcome in outcomes if outcome.recipe not in RECIPES]
    ran = [outcome.recipe.name.split()[0] for outcome in recipes if outcome.word == "runs"]
    head = "| {} | result | needs | seconds | arguments | last line of its log |\n|---|---|---|---|---|---|"
    return "\n".join(
        [
            f"{len(ran)} commands of {len(set(ran))} recipes ran to their end.\n",
            head.format("recipe"),
            *map(_row, recipes),
            "",
            "| recipe not run | it needs |\n|---|---|",
            *(f"| `{absent.name}` | {absent.why} |" for absent in ABSENT),
            "",
            head.format("own test"),
            *map(_row, tests),
            "",
        ]
    )


def _row(outcome: Outcome) -> str:
    recipe = outcome.recipe
    name, *rest = recipe.name.split(" ", 1)
    shown = " ".join([f"`{name}`", *rest])
    arguments = shlex.join(part.replace("{folder}/", "") for part in recipe.arguments).replace("|", "\\|")
    last = outcome.last_line.replace("|", "\\|").replace("`", "'")
    last = last if len(last) <= _SHOWN else last[:_SHOWN] + "…"
    return f"| {shown} | {outcome.word} | {recipe.needs} | {outcome.seconds:.0f} | `{arguments}` | `{last}` |"


def write(page: Path, results: str) -> None:
    """Put the results between the page's two marks."""
    text = page.read_text()
    before, _, rest = text.partition(BEGIN)
    after = rest.partition(END)[2]
    assert rest, f"{page} lacks {BEGIN}"
    page.write_text(f"{before}{BEGIN}\n\n{results}\n{END}{after}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--env", type=Path, default=Path(".venv/cookbook"), help="what `make cookbook-env` made")
    parser.add_argument("--only", default="", help="run those whose name this regular expression is found in")
    parser.add_argument("--work", type=Path, help="where the server and the recipes write; default: run, below --env")
    parser.add_argument("--write", type=Path, help="the page whose table is replaced")
    options = parser.parse_args()
    cookbook = Cookbook.at(options.env.absolute())
    assert cookbook, f"{options.env} holds no cookbook; run: make cookbook-env"
    results = options.env / "results.json"
    failed = 0
    with kitchen(cookbook, (options.work or options.env / "run").absolute()) as setting:
        prepare(setting)
        for recipe in [recipe for recipe in everything() if re.search(options.only, recipe.name)]:
            outcome = run(setting, recipe)
            keep(results, outcome)
            failed += not outcome.as_expected
            print(f"{outcome.word:10} {outcome.seconds:4.0f} s  {recipe.name}: {outcome.last_line}", flush=True)
    if options.write:
        write(options.write, table(kept(results)))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

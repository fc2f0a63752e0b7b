"""Options of recipes: a dataclass read from a command line."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import pytest

from openrl_recipes.shared.options import OptionError, parse


@dataclass(frozen=True, slots=True)
class Options:
    model: Annotated[str, "base model"] = "some/model"
    steps: Annotated[int, "training steps"] = 60
    sft_lr: Annotated[float, "learning rate"] = 1e-3
    loss: Annotated[Literal["ppo", "cispo"], "the loss"] = "ppo"
    tensorboard: Annotated[bool, "event files"] = False
    keep_best: Annotated[bool, "keep the best"] = True

    def __post_init__(self) -> None:
        if self.steps < 0:
            raise OptionError(f"--steps {self.steps}: at least 0.")


def test_without_flags_every_option_has_its_default() -> None:
    assert parse(Options, []) == Options()


def test_every_option_has_a_flag_and_a_switch_two() -> None:
    words = ["--model", "other/model", "--steps", "3", "--sft-lr", "2.5e-5", "--loss", "cispo"]
    options = Options("other/model", 3, 2.5e-5, "cispo", tensorboard=True, keep_best=False)
    assert parse(Options, [*words, "--tensorboard", "--no-keep-best"]) == options


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--stepps", "3"], "stepps"),
        (["--steps", "many"], "steps"),
        (["--loss", "dpo"], "ppo"),
        (["--steps", "-1"], "at least 0"),
        (["--steps"], "steps"),
    ],
)
def test_what_is_not_legal_is_an_error_that_names_the_option(words: list[str], named: str) -> None:
    with pytest.raises(OptionError, match=named):
        parse(Options, words)


def test_run_ends_with_a_line_and_status_2_for_what_the_user_can_mend(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        '"""What it teaches."""\n'
        "from dataclasses import dataclass\n"
        "from typing import Annotated\n"
        "from openrl_recipes.shared.options import OptionError, run\n\n"
        "@dataclass(frozen=True)\n"
        "class Options:\n"
        '    steps: Annotated[int, "how many"] = 1\n\n'
        "def main(options):\n"
        "    if options.steps > 1:\n"
        '        raise OptionError("--steps: too many")\n'
        "    print(options.steps * 41)\n\n"
        "run(main, Options)\n"
    )

    def ended(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "mine.py", *words], cwd=tmp_path, capture_output=True, text=True, check=False
        )

    assert ended().stdout == "41\n"
    refused = ended("--steps", "2")
    assert (refused.returncode, refused.stderr) == (2, "--steps: too many\n")
    told = ended("--help").stdout
    assert "What it teaches." in told
    assert "how many" in told

"""A recipe that trains nothing, for tests of `openrl recipe run`: it logs, and then ends as it is told."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from openrl_recipes.shared.folder import RunFolder
from openrl_recipes.shared.options import OptionError, run

VARIABLES = ("TINKER_BASE_URL", "TINKER_API_KEY", "HF_HUB_OFFLINE", "SSL_CERT_FILE")


@dataclass(frozen=True, slots=True)
class Options:
    model: Annotated[str, "base model"] = "some/model"
    judge_model: Annotated[str, "another one"] = ""
    out: Annotated[str, "run folder"] = "runs/fake"
    mode: Annotated[Literal["end", "fail", "refuse", "hang", "deaf"], "how to end"] = "end"
    sft_lr: Annotated[float, "learning rate of one stage"] = 1e-3
    rl_lr: Annotated[float, "learning rate of another"] = 1e-3
    rl_steps: Annotated[int, "steps"] = 2
    seconds: Annotated[float, "how long a step takes"] = 0.0
    source: Annotated[str, "data"] = "made"
    quick: Annotated[bool, "a switch"] = False

    def __post_init__(self) -> None:
        if self.rl_steps < 0:
            raise OptionError(f"--rl-steps {self.rl_steps}: at least 0.")

    @property
    def online(self) -> bool:
        return self.source.startswith("hub:")


def main(options: Options) -> None:
    folder = RunFolder(Path(options.out), options)
    environment = {name: os.environ[name] for name in VARIABLES if name in os.environ}
    (folder.path / "environment.json").write_text(json.dumps(environment))
    began = time.monotonic()
    for step in range(options.rl_steps):
        folder.log("grpo", step, reward=options.rl_lr * (step + 1), loss=1 / (step + 1))
        time.sleep(options.seconds)
    print(f"model {options.model}, {time.monotonic() - began:.1f} s")
    if options.mode == "refuse":
        raise OptionError("--mode refuse: not today")
    if options.mode == "fail":
        raise RuntimeError("the reward is not a number")
    if options.mode in ("hang", "deaf"):
        _hang(folder.path, deaf=options.mode == "deaf")


def _hang(folder: Path, deaf: bool) -> None:
    """Until someone ends it. Has a child, as recipes that judge answers have."""
    if deaf:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    (folder / "pids.new").write_text(json.dumps([os.getpid(), child.pid]))
    (folder / "pids.new").rename(folder / "pids.json")
    while True:
        time.sleep(600)


if __name__ == "__main__":
    run(main, Options)

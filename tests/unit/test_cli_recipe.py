"""`openrl recipe`: what it lists and shows, how it reads options, and how runs end."""

from __future__ import annotations

import ast
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import psutil
import pytest
from typer.testing import CliRunner

from openrl.errors import BadRequest, ModelError, NotReady
from openrl_cli import recipe, recipe_runs
from openrl_cli.main import app
from openrl_cli.recipe_options import flags, read, resolve, variants
from openrl_cli.recipe_runs import Interrupted, interruptible, run_one
from openrl_recipes.catalog import RECIPES, find
from openrl_recipes.local_server import free_port, openrl_command
from openrl_recipes.text_to_sql.options import Options as OfSql
from support.fake_recipe import Options

ROOT = Path(__file__).parents[2]
FAKE = "support.fake_recipe"


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user in an empty folder, without settings; no server answers."""
    for name in [
        name for name in os.environ if name.startswith(("OPENRL_", "TINKER_", "HF_HUB_OFFLINE", "SSL_CERT_FILE"))
    ]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("OPENRL_DATA_DIR", str(tmp_path / "data"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("OPENRL_PORT", str(free_port()))
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "tests"))
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def server(home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Something that answers where TINKER_BASE_URL points."""
    with answering() as url:
        monkeypatch.setenv("TINKER_BASE_URL", url)
        monkeypatch.setenv("TINKER_API_KEY", "tml-of-the-environment")
        yield url


class Answering:
    """A web server that is well."""

    def __enter__(self) -> str:
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.send_response(200 if self.path == "/api/v1/healthz" else 404)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, format: str, *arguments: Any) -> None:
                del format, arguments

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return f"http://127.0.0.1:{self._server.server_port}"

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()


def answering() -> Answering:
    return Answering()


def invoke(*words: str) -> tuple[int, str]:
    """Exit status and stdout. Errors for the user come through."""
    result = CliRunner().invoke(app, ["recipe", *words], catch_exceptions=False)
    return result.exit_code, result.stdout


# ---- list and show ----


def test_list_names_every_recipe() -> None:
    _, text = invoke("list")
    assert all(each.name in text for each in RECIPES)
    assert [each.name for each in RECIPES if find(each.name.replace("_", "-")) is not each] == []


@pytest.mark.parametrize("each", RECIPES, ids=lambda each: each.name)
def test_every_recipe_says_what_it_teaches_and_how_it_is_run(each: recipe.Recipe, home: Path) -> None:
    status, text = invoke("show", each.name)
    assert status == 0
    assert f"openrl recipe run {each.name}" in text
    assert f"python -m {each.module}" in text
    assert all(flag in text for flag in ("--model", "--rank", "--seed", "--out", "--tensorboard"))
    assert each.model in text
    source = ROOT / "recipes" / each.module.removeprefix("openrl_recipes.").replace(".", "/")
    assert str(source.with_suffix(".py")) in text


def test_the_catalog_names_modules_that_are_there() -> None:
    for each in RECIPES:
        file = ROOT / "recipes" / (each.module.removeprefix("openrl_recipes.").replace(".", "/") + ".py")
        defined = {node.name for node in ast.parse(file.read_text()).body if isinstance(node, ast.FunctionDef)}
        assert "main" in defined


def test_a_name_that_is_no_recipe_is_refused_with_those_that_are() -> None:
    with pytest.raises(BadRequest, match="pig_latin"):
        invoke("show", "piglatin")
    with pytest.raises(BadRequest, match="no recipe"):
        invoke("run", "os.path")
    with pytest.raises(ModelError, match="not_there"):
        invoke("run", "not_there.at_all")


def test_missing_packages_are_named_with_the_command_that_installs_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recipe, "_NEEDED", ("tinker", "not_there"))
    with pytest.raises(ModelError, match=r"recipes need not_there\. Run: pip install 'openrl\[recipes\]'"):
        invoke("run", "pig_latin")


# ---- options ----


@pytest.mark.parametrize(
    ("words", "values"),
    [
        (["--rl-steps", "3"], {"rl_steps": "3"}),
        (["--rl_steps=3"], {"rl_steps": "3"}),
        (["rl-steps=3"], {"rl_steps": "3"}),
        (["steps=3", "--steps", "4"], {"rl_steps": "4"}),
        (["--out", "a=b"], {"out": "a=b"}),
        (["out=a=b"], {"out": "a=b"}),
        (["--quick", "--source", "x"], {"quick": "true", "source": "x"}),
        (["--no-quick"], {"quick": "false"}),
        (["quick=yes"], {"quick": "yes"}),
        (["--sft-lr", "-1"], {"sft_lr": "-1"}),
    ],
)
def test_flags_and_assignments_are_options_of_the_recipe(words: list[str], values: Mapping[str, str]) -> None:
    assert read(words, Options) == values


def test_a_short_name_must_mean_one_option() -> None:
    assert resolve("steps", Options) == "rl_steps"
    with pytest.raises(BadRequest, match="'lr' may mean sft_lr or rl_lr"):
        resolve("lr", Options)
    with pytest.raises(BadRequest, match=r"no option 'stepz'.*rl_steps"):
        resolve("stepz", Options)


@pytest.mark.parametrize(
    ("words", "said"), [(["fast"], "form is"), (["--source"], "wants a value"), (["-x", "1"], "form is")]
)
def test_words_that_are_no_option_are_refused(words: list[str], said: str) -> None:
    with pytest.raises(BadRequest, match=said):
        read(words, Options)


def test_switches_become_flags() -> None:
    assert flags({"quick": "On", "source": "-x"}, Options) == ["--quick", "--source=-x"]
    assert flags({"quick": "0"}, Options) == ["--no-quick"]
    with pytest.raises(BadRequest, match="quick is 'perhaps'"):
        flags({"quick": "perhaps"}, Options)


def test_sweeps_make_all_combinations_with_a_folder_each() -> None:
    made = variants(["sft-lr=1e-4,3e-4", "model=a/b,c"], Options)
    assert [each.name for each in made] == [
        "sft_lr=1e-4,model=a_b",
        "sft_lr=1e-4,model=c",
        "sft_lr=3e-4,model=a_b",
        "sft_lr=3e-4,model=c",
    ]
    assert made[1].values == {"sft_lr": "1e-4", "model": "c"}
    assert [each.name for each in variants([], Options)] == [""]


@pytest.mark.parametrize(
    "sweeps",
    [["rl_lr"], ["rl_lr="], ["rl_lr=1,1"], ["rl_lr=1", "rl-lr=2"], ["lr=1,2"], ["out=a,b"], ["model=a/b,a:b"]],
)
def test_sweeps_that_make_no_sense_are_refused(sweeps: list[str]) -> None:
    with pytest.raises(BadRequest):
        variants(sweeps, Options)


@pytest.mark.parametrize("words", [["--rl-steps", "x"], ["--mode", "sing"], ["--sweep", "rl_steps=1,-1"]])
def test_bad_values_are_refused_before_anything_runs(words: list[str], server: str, home: Path) -> None:
    with pytest.raises(BadRequest, match=r"--(rl-steps|mode)"):
        invoke("run", FAKE, *words)
    assert not (home / "runs").exists()


# ---- one run ----


def environment(folder: Path) -> dict[str, str]:
    return json.loads((folder / "environment.json").read_text())


def test_a_run_uses_the_server_that_the_environment_names(server: str, home: Path) -> None:
    assert invoke("run", FAKE, "--out", "here", "rl_steps=3")[0] == 0
    assert environment(home / "here") == {
        "TINKER_BASE_URL": server,
        "TINKER_API_KEY": "tml-of-the-environment",
        "HF_HUB_OFFLINE": "1",
    }
    assert len((home / "here" / "metrics.jsonl").read_text().splitlines()) == 3


def test_a_run_uses_the_server_of_this_machine_with_its_key(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with answering() as url:
        monkeypatch.setenv("OPENRL_PORT", url.rpartition(":")[2])
        assert invoke("run", FAKE)[0] == 0
    seen = environment(home / "runs" / "fake")
    assert seen["TINKER_BASE_URL"] == url
    assert seen["TINKER_API_KEY"] == (home / "data" / "api_key").read_text().strip()


def test_what_the_user_says_of_the_hub_stands(server: str, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    invoke("run", FAKE, "--source", "hub:some/data", "--out", "asks")
    assert "HF_HUB_OFFLINE" not in environment(home / "asks")
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    invoke("run", FAKE, "--out", "said")
    assert environment(home / "said")["HF_HUB_OFFLINE"] == "0"


def test_a_server_elsewhere_that_does_not_answer_is_not_replaced(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINKER_BASE_URL", "http://name.invalid:1")
    with pytest.raises(NotReady, match=r"name\.invalid.*Unset"):
        invoke("run", FAKE)


@pytest.mark.parametrize(("mode", "status"), [("end", 0), ("fail", 1), ("refuse", 2)])
def test_the_exit_status_is_the_recipes(mode: str, status: int, server: str) -> None:
    assert invoke("run", FAKE, "--mode", mode)[0] == status


def test_a_recipe_that_is_killed_counts_as_failed(home: Path) -> None:
    command = [sys.executable, "-c", "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"]
    assert run_one(command, os.environ) == 128 + signal.SIGKILL


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
@pytest.mark.parametrize("sweep", [False, True])
def test_a_signal_ends_all_and_leaves_nothing(
    number: signal.Signals, status: int, sweep: bool, server: str, home: Path
) -> None:
    more = ["--sweep", "rl_lr=1,2", "--parallel", "2"] if sweep else []
    folders = [home / "runs/fake" / name for name in (("rl_lr=1", "rl_lr=2") if sweep else ("",))]
    command = [openrl_command(), "recipe", "run", FAKE, "--mode", "hang", *more]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    started = [pid for folder in folders for pid in pids(folder)]
    process.send_signal(number)
    _, said = process.communicate(timeout=20)
    assert process.returncode == status, said
    assert said.endswith("Stopped.\n")
    assert gone(started)


def test_a_recipe_that_hears_no_signal_is_killed(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recipe_runs, "_STOP_SECONDS", 0.3)
    command = [sys.executable, "-m", FAKE, "--mode", "deaf"]
    found: list[int] = []

    def interrupt() -> None:
        found.extend(pids(home / "runs" / "fake"))
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.1)
        os.kill(os.getpid(), signal.SIGINT)  # a second one does not disturb the cleaning up

    thread = threading.Thread(target=interrupt)
    thread.start()  # it waits for the recipe to hang
    with interruptible(), pytest.raises(Interrupted) as raised:
        run_one(command, os.environ)
    thread.join()
    assert raised.value.status == 143
    assert len(found) == 2
    assert gone(found)


def gone(processes: list[int]) -> bool:
    """Whether all have ended, with a moment for the kernel; one that nobody has waited for has ended, too."""
    there = [psutil.Process(pid) for pid in processes if psutil.pid_exists(pid)]
    deadline = time.monotonic() + 2
    while any(each.is_running() and each.status() != psutil.STATUS_ZOMBIE for each in there):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def pids(folder: Path) -> list[int]:
    """The processes of a fake recipe that hangs, once it does."""
    deadline = time.monotonic() + 20
    while not (folder / "pids.json").exists():
        assert time.monotonic() < deadline, f"{folder} has no pids.json"
        time.sleep(0.02)
    return json.loads((folder / "pids.json").read_text())


# ---- several runs ----


def test_a_sweep_runs_all_and_compares_them(server: str, home: Path) -> None:
    status, text = invoke("run", FAKE, "--sweep", "rl_lr=0.1,0.2,0.3", "--parallel", "2", "--out", "all", "--quick")
    assert status == 0
    rows = [line.split() for line in text.splitlines() if line.strip().startswith("rl_lr=")]
    assert [row[:3] for row in rows] == [
        ["rl_lr=0.1", "done", "0.20"],  # the last of two steps
        ["rl_lr=0.2", "done", "0.40"],
        ["rl_lr=0.3", "done", "0.60"],
    ]
    assert (home / "all" / "compare.png").exists()
    assert "rl_lr=0.3" in (home / "all" / "compare.html").read_text()
    config = json.loads((home / "all" / "rl_lr=0.2" / "config.json").read_text())
    assert (config["rl_lr"], config["sft_lr"], config["quick"]) == (0.2, 1e-3, True)
    assert (home / "all" / "rl_lr=0.2.log").read_text().startswith("model some/model")


def test_a_run_that_fails_is_shown_with_the_end_of_its_log_and_stops_no_other(
    server: str, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = CliRunner().invoke(app, ["recipe", "run", FAKE, "--parallel", "1", "--sweep", "mode=fail,end"])
    assert result.exit_code == 1
    states = [line.split()[:2] for line in result.stdout.splitlines() if line.strip().startswith("mode=")]
    assert states == [["mode=fail", "failed"], ["mode=end", "done"]]
    assert "mode=fail failed. The end of" in result.stderr
    assert "RuntimeError: the reward is not a number" in result.stderr


def test_no_more_than_parallel_run_at_once(server: str, home: Path) -> None:
    invoke("run", FAKE, "--parallel", "1", "--sweep", "rl_lr=1,2", "--seconds", "0.3")
    first, second = (home / "runs" / "fake" / f"rl_lr={n}" for n in (1, 2))
    assert (first / "metrics.jsonl").stat().st_mtime < (second / "config.json").stat().st_mtime


def test_a_recipe_says_what_a_short_name_means() -> None:
    """text_to_sql has a learning rate a stage; `lr` alone is that of the stage which the recipe is about."""
    assert resolve("lr", OfSql) == "rl_lr"
    assert resolve("sft-lr", OfSql) == "sft_lr"

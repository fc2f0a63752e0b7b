"""Probes of the SDK's command line, each run as a process of its own with a home of its own."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from typing import Any

from safetensors.numpy import load_file

from compat.hub_door import hub_door
from compat.registry import command
from compat.stage import MODEL, TIMEOUT, Stage
from compat.surface import VERSION


@command("tinker version")
def version(stage: Stage) -> str:
    assert VERSION in stage.cli("version").stdout
    return "nothing is asked of the server"


# ---- auth ----


@command("tinker auth login")
def login(stage: Stage) -> None:
    """The key is typed in, checked by the server, and then enough for a command."""
    _login(stage)
    done = stage.cli("--format", "json", "run", "info", stage.run, TINKER_API_KEY="")
    assert json.loads(done.stdout)["training_run_id"] == stage.run
    _logout(stage)


@command("tinker auth logout")
def logout(stage: Stage) -> None:
    _login(stage)
    _logout(stage)
    assert stage.cli("auth", "status", check=False, TINKER_API_KEY="").returncode != 0


def _login(stage: Stage) -> None:
    stage.cli("auth", "logout", check=False)
    done = stage.cli("auth", "login", typed=stage.server.endpoint.api_key + "\n", TINKER_API_KEY="")
    assert "Logged in" in done.stdout


def _logout(stage: Stage) -> None:
    assert "Removed credential" in stage.cli("auth", "logout").stdout


@command("tinker auth status")
def status(stage: Stage) -> None:
    assert "Tinker accessible: yes" in stage.cli("auth", "status").stdout
    wrong = stage.cli("auth", "status", check=False, TINKER_API_KEY="tml-not-the-key-of-this-server")
    assert wrong.returncode != 0
    assert "Tinker accessible: no" in wrong.stdout


@command("tinker auth whoami")
def whoami(stage: Stage) -> None:
    assert stage.cli_json("auth", "whoami")["org_urn"].startswith("tml:organization:")


# ---- models, runs, sessions ----


@command("tinker model list")
def model_list(stage: Stage) -> None:
    (model,) = stage.cli_json("model", "list", "TINY")["models"]
    assert (model["model_name"], model["max_context_length"]) == (MODEL, 256)
    none = stage.cli("model", "list", "no-such-model", check=False)
    assert none.returncode != 0
    assert "tml:organization:" in none.stderr


@command("tinker run list")
def run_list(stage: Stage) -> None:
    """All of them, also in pages."""
    stage.new_trainer()
    runs = stage.cli_json("run", "list", "--limit", "0")["runs"]
    assert stage.run in [run["training_run_id"] for run in runs]
    assert len(stage.cli_json("run", "list", "--limit", "1")["runs"]) == 1
    assert "Rank 4" in stage.cli("run", "list", COLUMNS="200").stdout


@command("tinker run info")
def run_info(stage: Stage) -> None:
    run = stage.cli_json("run", "info", stage.run)
    assert (run["training_run_id"], run["base_model"], run["lora_rank"]) == (stage.run, MODEL, 4)


@command("tinker session export-trace")
def export_trace(stage: Stage) -> None:
    target = stage.folder / "trace.pftrace"
    stage.cli("session", "export-trace", stage.session, "--output", str(target))
    assert stage.run.encode() in target.read_bytes()


# ---- checkpoints ----


@command("tinker checkpoint list")
def checkpoint_list(stage: Stage) -> None:
    everything = stage.cli_json("checkpoint", "list", "--limit", "0")["checkpoints"]
    ours = stage.cli_json("checkpoint", "list", "--run-id", stage.run)["checkpoints"]
    paths = {entry["tinker_path"] for entry in ours}
    assert {stage.trained.state, stage.trained.weights} <= paths
    assert paths <= {entry["tinker_path"] for entry in everything}


@command("tinker checkpoint info")
def checkpoint_info(stage: Stage) -> None:
    info = stage.cli_json("checkpoint", "info", stage.trained.state)
    assert (info["tinker_path"], info["checkpoint_type"]) == (stage.trained.state, "training")
    assert (info["is_lora"], info["lora_rank"]) == (True, 4)


@command("tinker checkpoint publish")
def checkpoint_publish(stage: Stage) -> None:
    path = stage.save()
    stage.cli("checkpoint", "publish", path)
    assert _entry(stage, path).public


@command("tinker checkpoint unpublish")
def checkpoint_unpublish(stage: Stage) -> None:
    path = stage.save()
    stage.rest.publish_checkpoint_from_tinker_path(path).result(TIMEOUT)
    stage.cli("checkpoint", "unpublish", path)
    assert not _entry(stage, path).public


@command("tinker checkpoint set-ttl")
def checkpoint_set_ttl(stage: Stage) -> None:
    path = stage.save()
    stage.cli("checkpoint", "set-ttl", path, "--ttl", "7200")
    assert _entry(stage, path).expires_at is not None
    stage.cli("checkpoint", "set-ttl", path, "--remove")
    assert _entry(stage, path).expires_at is None
    assert stage.cli("checkpoint", "set-ttl", path, "--ttl", "1", check=False).returncode != 0


@command("tinker checkpoint delete")
def checkpoint_delete(stage: Stage) -> None:
    """By path, and by run with dates (which compares our times with the client's)."""
    paths = [stage.save(), stage.save()]
    done = stage.cli_json("checkpoint", "delete", "--yes", *paths)
    assert done == {"deleted_count": 2, "failed": []}
    assert [stage.checkpoint(path) for path in paths] == [None, None]
    kept = ("checkpoint", "delete", "--yes", "--run-id", stage.run, "--before", "2020-01-01")
    assert "No checkpoints found" in stage.cli(*kept).stdout
    trainer = stage.new_trainer()
    path = trainer.save_state("one").result(TIMEOUT).path
    tomorrow = (datetime.now(UTC) + timedelta(days=1)).isoformat()
    run = path.split("/")[2]
    stage.cli("checkpoint", "delete", "--yes", "--run-id", run, "--after", "2020-01-01", "--before", tomorrow)
    assert stage.checkpoint(path) is None


@command("tinker checkpoint download")
def checkpoint_download(stage: Stage) -> None:
    """Of a training checkpoint (through a temporary export, which is gone afterwards) and of an export."""
    external = stage.trained.trainer.save_weights_external(stage.unique("downloaded")).result(TIMEOUT).path
    for path in (stage.trained.state, external):
        stage.cli("checkpoint", "download", path, "--output", str(stage.folder / "out"), "--force")
        folder = stage.folder / "out" / path.removeprefix("tinker://").replace("/", "_")
        assert json.loads((folder / "adapter_config.json").read_text())["r"] == 4
        assert load_file(folder / "adapter_model.safetensors")
    listed = stage.rest.list_user_checkpoints(limit=1000).result(TIMEOUT).checkpoints
    assert not [entry for entry in listed if entry.tinker_path.endswith("external_weights/download")]


@command("tinker checkpoint push-hf")
def push_hf(stage: Stage) -> str:
    """As far as the hub's door: the adapter is exported and read, then a repository is asked for."""
    with hub_door() as (address, calls):
        environment = {"HF_ENDPOINT": address, "HF_TOKEN": "hf_nothing", "HF_HUB_OFFLINE": "0"}
        command_line = ("checkpoint", "push-hf", stage.trained.state, "--repo", "someone/adapter")
        done = stage.cli(*command_line, check=False, **environment)
    assert done.returncode != 0
    assert any(call.startswith("POST /api/repos/create") and '"adapter"' in call for call in calls), done.stderr[-300:]
    return "up to the hub's door: the adapter is exported and a repository asked for; what follows is the hub's"


def _entry(stage: Stage, path: str) -> Any:
    entry = stage.checkpoint(path)
    assert entry is not None
    return entry


# ---- billing ----


@command("tinker billing usage")
def billing_usage(stage: Stage) -> None:
    assert stage.trained
    hour = datetime.now(UTC).replace(minute=0, second=0, microsecond=0)
    window = [(hour + timedelta(hours=shift)).isoformat().replace("+00:00", "Z") for shift in (-1, 1)]
    rows = stage.cli_json("billing", "usage", *window)["data"]
    assert any(row["event_info"]["type"] == "training" and row["event_info"]["token_count"] > 0 for row in rows)
    table = stage.folder / "usage.csv"
    stage.cli("billing", "usage", *window, "--csv", str(table))
    assert "token_count" in table.read_text().splitlines()[0]


@command("tinker billing checkpoint-storage")
def billing_checkpoint_storage(stage: Stage) -> None:
    assert stage.trained
    rows = stage.cli_json("billing", "checkpoint-storage")["data"]
    assert sum(row["checkpoint_count"] for row in rows) >= 2
    assert sum(row["size_bytes"] for row in rows) > 0

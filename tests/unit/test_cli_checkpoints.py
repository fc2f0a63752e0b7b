"""`openrl checkpoints` on a data folder without a server: lists, sizes, removal, pruning; and who may change it."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from openrl.errors import BadRequest, ModelError, NotFound
from openrl.instance import InUse, owning
from openrl_cli.main import app
from support.daemons import Harness

SAVES = ("a", "b", "c")


@pytest.fixture
def data_dir(tmp_path: Path) -> Path:
    """A data folder with three checkpoints of one run; a sampler of an active session draws from `b`."""

    async def fill() -> None:
        h = await Harness(tmp_path).start()
        run = await h.open_run()
        for seq, name in enumerate(SAVES, 1):
            assert (await h.result(await h.save(run, seq, name))).error is None
        await h.daemon.create_sampler(h.session, 1, None, f"tinker://{run}/weights/b")
        await h.daemon.stop()

    asyncio.run(fill())
    return tmp_path


def call(data_dir: Path, *arguments: str, answer: str | None = None) -> str:
    """Run a command in this process; its stdout. Errors that we foresee are raised."""
    done = CliRunner().invoke(
        app, ["checkpoints", *arguments, "--data-dir", str(data_dir)], input=answer, catch_exceptions=False
    )
    assert done.exit_code in (0, 1), done.output
    return done.stdout


def listed(data_dir: Path) -> list[dict[str, Any]]:
    return json.loads(call(data_dir, "list", "--json"))


def test_list_and_show(data_dir: Path) -> None:
    found = listed(data_dir)
    assert [checkpoint["name"] for checkpoint in found] == ["c", "b", "a"]
    assert all(checkpoint["size_bytes"] > 0 for checkpoint in found)
    total = call(data_dir, "list")
    assert "3 checkpoints" in total
    shown = json.loads(call(data_dir, "show", found[0]["path"], "--json"))
    assert set(shown["files"]) == {"manifest.json", "scalar.json"}
    assert shown["base_model"] in call(data_dir, "show", found[0]["path"])
    assert call(data_dir, "list", "--run", "other", "--json").strip() == "[]"
    with pytest.raises(NotFound):
        call(data_dir, "show", found[0]["path"] + "x")


def test_rm_frees_what_nobody_needs(data_dir: Path) -> None:
    """S15: the files that a sampler of an active session draws from stay; the server removes them later."""
    by_name = {checkpoint["name"]: checkpoint["path"] for checkpoint in listed(data_dir)}
    call(data_dir, "rm", by_name["a"], answer="n\n")
    assert len(listed(data_dir)) == 3
    said = call(data_dir, "rm", by_name["a"], by_name["b"], "--yes")
    assert "its files stay" in said.splitlines()[1]
    assert [checkpoint["name"] for checkpoint in listed(data_dir)] == ["c"]
    assert sorted(path.name[0] for path in data_dir.glob("checkpoints/*/weights/*")) == ["b", "c"]

    async def restart() -> None:
        h = await Harness(data_dir).start()
        assert (await h.daemon.life.page(10, 0)).total == 1
        for session in [run.run.session_id for run in h.daemon._runs.all()]:
            await h.daemon.finish_session(session, "success", None)
        await h.daemon._housekeeping.once()
        await h.daemon.stop()

    asyncio.run(restart())
    assert sorted(path.name[0] for path in data_dir.glob("checkpoints/*/weights/*")) == ["c"]


def test_prune(data_dir: Path) -> None:
    with pytest.raises(BadRequest, match="older-than"):
        call(data_dir, "prune")
    assert "0 checkpoints" in call(data_dir, "prune", "--older-than", "1", "--keep", "0")
    assert "2 checkpoints" in call(data_dir, "prune", "--keep", "1", "--dry-run")
    assert len(listed(data_dir)) == 3
    call(data_dir, "prune", "--keep", "1", "--yes")
    assert [checkpoint["name"] for checkpoint in listed(data_dir)] == ["c"]


def test_gguf_is_refused_with_the_way_out(data_dir: Path, tmp_path: Path) -> None:
    path = listed(data_dir)[0]["path"]
    with pytest.raises(ModelError, match=r"convert_hf_to_gguf\.py"):
        call(data_dir, "export", path, "--as", "gguf", "--out", str(tmp_path / "out"))
    with pytest.raises(BadRequest, match="adapter_config"):
        call(data_dir, "export", path, "--out", str(tmp_path / "out"))  # a scalar checkpoint has no adapter
    assert not (tmp_path / "out").exists()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    with pytest.raises(BadRequest, match="empty"):
        call(data_dir, "export", path, "--out", str(tmp_path / "full"))


def test_an_empty_data_folder(tmp_path: Path) -> None:
    assert listed(tmp_path / "new") == []


def test_one_owner_at_a_time(data_dir: Path) -> None:
    """Nobody changes the store behind a server's back; a server is found by what it wrote into its lock."""
    with owning(data_dir) as owner:
        with pytest.raises(InUse, match="starting"):
            call(data_dir, "list")
        owner.announce("http://127.0.0.1:9")
        assert len(listed(data_dir)) == 3, "looking needs nobody's leave"
        with pytest.raises(InUse, match=r"127\.0\.0\.1:9"), owning(data_dir):
            pass
    assert len(listed(data_dir)) == 3

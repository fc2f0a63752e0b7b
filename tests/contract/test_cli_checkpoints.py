"""`openrl checkpoints import` and `export` without a server: out and in again is the same adapter, bit for bit."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file
from typer.testing import CliRunner

from openrl.errors import BadRequest
from openrl_cli.main import app
from support.training import RUN, ce, create, forward, trainer


def call(data_dir: Path, *arguments: str) -> str:
    done = CliRunner().invoke(app, ["checkpoints", *arguments, "--data-dir", str(data_dir)], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.stdout.strip().replace("\n", "")


def test_import_and_export_alone(model_folder: Callable[..., Path], tmp_path: Path) -> None:
    base, data_dir = model_folder("llama", tied=True), tmp_path / "data"
    held = trainer(base)
    create(held, tmp_path)
    made = tmp_path / "adapter"
    made.mkdir()
    held.save(RUN, made, optimizer=False, gradients=False)
    path = call(data_dir, "import", str(made), "--base", str(base))
    assert path.startswith("tinker://")
    assert path.endswith(":train:0/weights/adapter")
    shown = json.loads(call(data_dir, "show", path, "--json"))
    assert shown["spec"]["rank"] == 4
    assert set(shown["files"]) == {
        "adapter_config.json",
        "adapter_model.safetensors",
        "manifest.json",
        "optimizer.safetensors",
    }
    resumed = trainer(base)
    resumed.load(RUN, Path(shown["folder"]), optimizer=True)
    assert np.array_equal(*(one.parameters(RUN)["lm_head.lora_B"] for one in (held, resumed)))
    for form in ("peft", "merged"):
        out = tmp_path / form
        assert call(data_dir, "export", path, "--as", form, "--out", str(out), "--base", str(base)) == str(out)
    tensors, original = (load_file(f / "adapter_model.safetensors") for f in (tmp_path / "peft", made))
    assert {k: v.tobytes() for k, v in tensors.items()} == {k: v.tobytes() for k, v in original.items()}
    assert not (tmp_path / "peft" / "manifest.json").exists()
    merged = trainer(tmp_path / "merged")
    merged.create(RUN, held.trainable(RUN).adapter.spec)  # B = 0: the merged model itself
    gap = forward(merged, ce(24, seed=5)).logprobs[0] - forward(held, ce(24, seed=5)).logprobs[0]
    assert np.abs(gap).max() < 2e-5
    archive = call(data_dir, "export", path, "--as", "archive", "--out", str(tmp_path / "tar"))
    assert Path(archive).is_file()


def test_what_does_not_fit_is_not_kept(model_folder: Callable[..., Path], tmp_path: Path) -> None:
    held = trainer(model_folder("llama"))
    create(held, tmp_path)
    made = tmp_path / "adapter"
    made.mkdir()
    held.save(RUN, made, optimizer=False, gradients=False)
    config = json.loads((made / "adapter_config.json").read_text())
    (made / "adapter_config.json").write_text(json.dumps({**config, "use_dora": True}))
    with pytest.raises(BadRequest, match="DoRA"):
        call(tmp_path / "data", "import", str(made), "--base", str(model_folder("llama")))
    assert call(tmp_path / "data", "list", "--json") == "[]"
    assert not list((tmp_path / "data" / "checkpoints").glob("*/*/*"))

"""Checkpoints of runs that train all parameters, outside of the engine: archived, exported, and pushed elsewhere."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from pydantic import TypeAdapter
from safetensors.numpy import load_file, save_file

from openrl.checkpoints import full, manifest
from openrl.checkpoints.archive import archive
from openrl.checkpoints.incoming import Announcement, check_announcement, check_content
from openrl.codec import decode_json, encode_json
from openrl.errors import BadRequest
from openrl.settings import load
from openrl.store.records import Checkpoint
from openrl.types import CheckpointKind, FullSpec, LoraSpec, RunId, TrainSpec
from openrl_cli.adapters import Form, export

WEIGHTS = {"model.embed_tokens.weight": np.ones((4, 2), np.float32), "model.norm.weight": np.ones(2, np.float32)}
PATH = "tinker://0123456789abcdef:train:0/weights/whole"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A training checkpoint's files."""
    made = tmp_path / "whole"
    made.mkdir()
    (made / "config.json").write_text("{}")
    (made / "tokenizer.json").write_text("{}")
    save_file(WEIGHTS, made / "model.safetensors")
    moments = {f"{prefix}.{name}": value for prefix in "mv" for name, value in WEIGHTS.items()}
    save_file({**moments, "t": np.array(3)}, made / "optimizer.safetensors")
    return made


def checkpoint() -> Checkpoint:
    run = RunId("0123456789abcdef:train:0")
    return Checkpoint(PATH, run, CheckpointKind.TRAINING, "whole", "f", "org/m", FullSpec(), 1, 1.0, None, {})


def announced(folder: Path) -> Announcement:
    digests = manifest.digest_files(folder)
    return Announcement(PATH, CheckpointKind.TRAINING, "whole", "org/m", FullSpec(), digests)


def test_f5_export_as_merged_is_the_model_itself(folder: Path, tmp_path: Path) -> None:
    """F5: nothing to merge, and no base model needed; there is no adapter, which is said in words."""
    settings = load({"data_dir": tmp_path / "data"}, None).settings
    assert full.is_full(folder)
    out = export(checkpoint(), folder, Form.MERGED, tmp_path / "out", None, settings)
    assert sorted(p.name for p in out.iterdir()) == ["config.json", "model.safetensors", "tokenizer.json"]
    assert np.array_equal(load_file(out / "model.safetensors")["model.norm.weight"], WEIGHTS["model.norm.weight"])
    with pytest.raises(BadRequest, match=r"holds the whole model and no adapter\..*--as merged"):
        export(checkpoint(), folder, Form.PEFT, tmp_path / "peft", None, settings)
    tar = export(checkpoint(), folder, Form.ARCHIVE, tmp_path / "tar", None, settings)
    assert tar.stat().st_size == archive(folder).size


def test_the_manifest_rebuilds_the_row(folder: Path) -> None:
    (folder / manifest.FILE).write_text(manifest.to_json(checkpoint(), manifest.digest_files(folder)))
    assert manifest.read(folder) == checkpoint()


def test_specs_cross_the_wire_unmixed() -> None:
    """C9: an announcement's spec is read as the kind that it is."""
    for spec in (FullSpec(), LoraSpec(4, 1)):
        assert TypeAdapter(TrainSpec).validate_json(encode_json(spec)) == spec


def test_a_whole_model_may_be_pushed(folder: Path) -> None:
    """Its files and no others; headers are checked before it is taken in."""
    good = announced(folder)
    assert decode_json(Announcement, encode_json(good)) == good
    check_announcement(good, 1 << 30)
    check_content(folder, good)
    stray = replace(good, files={**good.files, "pickle.bin": good.files["config.json"]})
    with pytest.raises(BadRequest, match=r"files has 'pickle\.bin'"):
        check_announcement(stray, 1 << 30)
    with pytest.raises(BadRequest, match="files has"):
        check_announcement(replace(good, spec=LoraSpec(4, 1)), 1 << 30)
    sampler = replace(good, kind=CheckpointKind.SAMPLER)
    with pytest.raises(BadRequest, match=r"files has 'optimizer\.safetensors'"):
        check_announcement(sampler, 1 << 30)


def test_what_is_pushed_must_belong_together(folder: Path) -> None:
    save_file({**load_file(folder / "optimizer.safetensors"), "m.x": np.ones(1)}, folder / "optimizer.safetensors")
    with pytest.raises(BadRequest, match=r"optimizer\.safetensors has 'm\.x'"):
        check_content(folder, announced(folder))

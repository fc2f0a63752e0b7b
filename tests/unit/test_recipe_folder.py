"""The run folder: what is kept, what a new start goes on from, and what it refuses."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from openrl_recipes.shared.folder import RunFolder, read_lines
from openrl_recipes.shared.options import OptionError


@dataclass(frozen=True)
class Options:
    lr: float = 1e-3
    loss: str = "ppo"
    out: str = "runs/x"
    tensorboard: bool = False


def test_records_samples_and_options_are_kept(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "a" / "run", Options())
    folder.log("sft", 0, loss=1.5, train_tokens=40, sent=0.0)
    folder.sample("before", prompt="p", completion="c", score=0.5)
    (record,) = read_lines(folder.path / "metrics.jsonl")
    assert record.items() >= {"stage": "sft", "step": 0, "loss": 1.5, "train_tokens": 40}.items()
    assert record["seconds"] > 0
    assert record["at"] >= 0
    assert read_lines(folder.path / "samples.jsonl") == [
        {"stage": "before", "prompt": "p", "completion": "c", "score": 0.5}
    ]
    assert json.loads((folder.path / "config.json").read_text()) == {
        "lr": 1e-3,
        "loss": "ppo",
        "out": "runs/x",
        "tensorboard": False,
    }


def test_a_return_cuts_off_what_came_after_the_newest_point(tmp_path: Path) -> None:
    first = RunFolder(tmp_path, Options())
    first.log("sft", 0, loss=2.0)
    first.sample("before", prompt="p", completion="kept")
    first.reached("sft", 1, path="tinker://weights/1")
    first.log("sft", 1, loss=1.0)
    first.sample("before", prompt="p", completion="cut")

    again = RunFolder(tmp_path, Options())
    assert again.point is not None
    assert (again.point.stage, again.point.step, again.point.notes) == ("sft", 1, {"path": "tinker://weights/1"})
    assert [record["loss"] for record in again.records] == [2.0]
    again.log("sft", 1, loss=1.25)
    assert [record["loss"] for record in read_lines(tmp_path / "metrics.jsonl")] == [2.0, 1.25]
    assert [sample["completion"] for sample in read_lines(tmp_path / "samples.jsonl")] == ["kept"]
    assert again.records[1]["at"] >= again.records[0]["at"]


def test_a_run_that_reached_no_point_begins_anew(tmp_path: Path) -> None:
    RunFolder(tmp_path, Options()).log("sft", 0, loss=2.0)
    again = RunFolder(tmp_path, Options())
    assert again.point is None
    assert again.records == []
    assert (tmp_path / "metrics.jsonl").read_text() == ""


def test_other_options_are_refused_with_their_names(tmp_path: Path) -> None:
    RunFolder(tmp_path, Options())
    with pytest.raises(OptionError, match=r"lr=0\.001 \(now 0\.5\), loss='ppo' \(now 'cispo'\)"):
        RunFolder(tmp_path, Options(lr=0.5, loss="cispo"))
    assert json.loads((tmp_path / "config.json").read_text())["lr"] == 1e-3


def test_a_finished_run_is_not_overwritten(tmp_path: Path) -> None:
    first = RunFolder(tmp_path, Options())
    first.log("sft", 0, loss=2.0)
    first.finished()
    with pytest.raises(OptionError, match=r"holds a finished run.*another --out"):
        RunFolder(tmp_path, Options())
    again = RunFolder(tmp_path, Options(), goes_on=True)
    assert again.point is not None
    assert again.point.stage == "done"
    assert [record["loss"] for record in again.records] == [2.0]


def test_free_options_may_differ(tmp_path: Path) -> None:
    RunFolder(tmp_path, Options())
    RunFolder(tmp_path, Options(out="elsewhere", tensorboard=True))
    RunFolder(tmp_path, Options(lr=0.5), free=("lr", "out", "tensorboard"))


def test_a_line_that_is_still_being_written_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"a": 1}\n{"a": 2}\n{"a"')
    assert read_lines(tmp_path / "metrics.jsonl") == [{"a": 1}, {"a": 2}]
    assert read_lines(tmp_path / "none.jsonl") == []


def test_tensorboard_has_what_the_records_have_after_a_return_too(tmp_path: Path) -> None:
    first = RunFolder(tmp_path, Options(), tensorboard=True)
    first.log("grpo", 0, reward=0.25, note="words are no curve")
    first.reached("grpo", 1)
    first.log("grpo", 1, reward=0.9)
    assert _events(tmp_path) == {"grpo/reward": [(0, 0.25), (1, pytest.approx(0.9))]}

    again = RunFolder(tmp_path, Options(), tensorboard=True)
    again.log("grpo", 1, reward=0.5)
    assert _events(tmp_path) == {"grpo/reward": [(0, 0.25), (1, 0.5)]}


def test_tensorboard_is_not_imported_without_the_flag_and_tensorflow_never(tmp_path: Path) -> None:
    code = (
        "import sys\n"
        "from pathlib import Path\n"
        "from dataclasses import make_dataclass\n"
        "from openrl_recipes.shared.folder import RunFolder\n"
        "options = make_dataclass('Options', ['a'])(1)\n"
        "RunFolder(Path(sys.argv[1]), options).log('sft', 0, loss=1.0)\n"
        "assert 'tensorboard' not in sys.modules\n"
        "RunFolder(Path(sys.argv[1]), options, tensorboard=True).log('sft', 0, loss=1.0)\n"
        "heavy = {'tensorflow', 'torch', 'grpc', 'pandas'} & set(sys.modules)\n"
        "sys.exit(str(heavy) if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def _events(folder: Path) -> dict[str, list[tuple[int, float]]]:
    read = EventAccumulator(str(folder / "tensorboard"))
    read.Reload()
    return {tag: [(e.step, e.tensor_proto.float_val[0]) for e in read.Tensors(tag)] for tag in read.Tags()["tensors"]}

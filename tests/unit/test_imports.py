"""The layers, walked: who may import whom, no cycles, heavy packages only where they belong (docs/architecture.md)."""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = {"openrl": ROOT / "openrl", "openrl_cli": ROOT / "cli", "openrl_recipes": ROOT / "recipes"}

# A module may import its own package, those named here, and BASE. The longest matching prefix counts.
BASE = {"openrl.types", "openrl.errors", "openrl.version", "openrl.telemetry", "openrl.durable"}
ALLOWED: dict[str, set[str]] = {
    "openrl.types": set(),
    "openrl.errors": set(),
    "openrl.version": set(),
    "openrl.durable": set(),
    "openrl.telemetry": set(),
    "openrl.losses": set(),
    "openrl.shares": set(),
    "openrl.codec": set(),
    "openrl.custom_loss_ops": set(),
    "openrl.custom_loss": {"openrl.custom_loss_ops"},
    "openrl.validation": {"openrl.custom_loss", "openrl.losses"},
    "openrl.setting_kinds": set(),
    "openrl.setting_table": {"openrl.setting_kinds", "openrl.models"},
    "openrl.settings": {"openrl.setting_kinds", "openrl.setting_table", "openrl.models"},
    "openrl.apikey": {"openrl.private_file", "openrl.settings"},
    "openrl.private_file": set(),
    "openrl.keys": set(),
    "openrl.tls": {"openrl.private_file"},
    "openrl.exposure": {"openrl.keys", "openrl.settings", "openrl.store"},
    "openrl.keyrings": set(),
    "openrl.kube": set(),
    "openrl.tokens": {"openrl.keyrings", "openrl.settings"},
    "openrl.remotes": {
        "openrl.codec",
        "openrl.kube",
        "openrl.private_file",
        "openrl.settings",
        "openrl.tokens",
    },
    "openrl.app_events": set(),
    "openrl.instance": set(),
    "openrl.transfer": {
        "openrl.checkpoints",
        "openrl.codec",
        "openrl.kube",
        "openrl.remotes",
        "openrl.settings",
    },
    "openrl.graceful": set(),
    "openrl.app": {
        "openrl.app_events",
        "openrl.backends.base",
        "openrl.backends.registry",
        "openrl.backends.remote",
        "openrl.daemon",
        "openrl.graceful",
        "openrl.instance",
        "openrl.models",
        "openrl.server",
        "openrl.settings",
        "openrl.tls",
        "openrl.wire",
        "openrl.workers",
    },
    "openrl.wire": {
        "openrl.codec",
        "openrl.custom_loss",
        "openrl.daemon.work",
        "openrl.losses",
        "openrl.store.records",
        "openrl.validation",
    },
    "openrl.server": {
        "openrl.checkpoints.archive",
        "openrl.checkpoints.incoming",
        "openrl.checkpoints.rope",
        "openrl.codec",
        "openrl.custom_loss",
        "openrl.daemon",
        "openrl.keys",
        "openrl.models.hub_files",
        "openrl.private_file",
        "openrl.settings",
        "openrl.store.records",
        "openrl.wire",
    },
    "openrl.daemon.work": {"openrl.custom_loss", "openrl.keys.principal"},
    "openrl.daemon": {
        "openrl.backends.base",
        "openrl.checkpoints",
        "openrl.codec",
        "openrl.custom_loss",
        "openrl.keys",
        "openrl.settings",
        "openrl.shares",
        "openrl.store",
        "openrl.validation",
        "openrl.workers.messages",
        "openrl.workers.protocol",
    },
    "openrl.store": {"openrl.keys"},
    "openrl.checkpoints": {"openrl.codec", "openrl.private_file", "openrl.store.records"},
    "openrl.models": set(),
    "openrl.models.linear": {"openrl.checkpoints", "openrl.models"},
    "openrl.models.merge": {"openrl.checkpoints.peft", "openrl.models"},
    "openrl.models.fetch": {"openrl.models", "openrl.settings"},  # the environment of the pip it runs
    "openrl.workers.main": {"openrl.backends", "openrl.models", "openrl.workers"},
    "openrl.workers": {"openrl.backends.base", "openrl.shares"},
    "openrl.backends.base": {"openrl.custom_loss"},
    "openrl.backends.quantize": set(),
    "openrl.backends.registry": {"openrl.backends.base", "openrl.backends.quantize"},
    "openrl.backends.remote": {
        "openrl.codec",
        "openrl.keys",
        "openrl.kube",
        "openrl.private_file",
        "openrl.remotes",
        "openrl.server",
        "openrl.settings",
        "openrl.tokens",
        "openrl.wire",
    },
    "openrl.backends.common": {
        "openrl.backends.base",
        "openrl.checkpoints.full",
        "openrl.checkpoints.peft",
        "openrl.checkpoints.tensor_file",
        "openrl.losses",
    },
    "openrl.backends.mps": {
        "openrl.backends.base",
        "openrl.backends.common",
        "openrl.checkpoints.full",
        "openrl.checkpoints.peft",
        "openrl.losses",
        "openrl.models.info",  # free memory
    },
    "openrl.backends.torch": {
        "openrl.backends.base",
        "openrl.backends.common",
        "openrl.backends.quantize",
        "openrl.checkpoints.full",
        "openrl.checkpoints.peft",
        "openrl.checkpoints.tensor_file",
        "openrl.custom_loss",
        "openrl.custom_loss_ops",
        "openrl.losses",
        "openrl.models.info",  # free memory
    },
    "openrl.backends.vllm": {
        "openrl.backends.base",
        "openrl.backends.common",
        "openrl.checkpoints.full",
        "openrl.checkpoints.peft",
        "openrl.checkpoints.tensor_file",
    },
    "openrl.backends.torch.distributed": {
        "openrl.backends.base",
        "openrl.backends.common",
        "openrl.backends.torch",
        "openrl.checkpoints.full",
        "openrl.losses",
        "openrl.workers.process",
    },
    "openrl.backends.cpu": {"openrl.backends.base", "openrl.backends.torch", "openrl.backends.vllm"},
    "openrl.backends.cuda": {"openrl.backends.base", "openrl.backends.torch", "openrl.backends.vllm"},
    "openrl.bench": {"openrl.backends", "openrl.models", "openrl.settings"},
    "openrl.selftest": {
        "openrl.backends.base",
        "openrl.backends.registry",
        "openrl.checkpoints.full",
        "openrl.checkpoints.peft",
        "openrl.custom_loss",
        "openrl.workers",
    },
    "openrl_cli": {"openrl", "openrl_recipes.catalog", "openrl_recipes.local_server", "openrl_recipes.shared"},
    "openrl_recipes": set(),
}

# Heavy packages, and the only modules that may import them at all.
HEAVY = {
    "torch": (
        "openrl.backends.torch",
        "openrl.backends.cuda",
        "openrl.backends.registry",
        "openrl.models.merge",  # conversion must do without: Apple Silicon has no torch
        "openrl.bench",
        "openrl_recipes.dpo",
    ),
    "transformers": ("openrl.backends.torch", "openrl.backends.common.stops", "openrl.bench"),
    "mlx": ("openrl.backends.mps", "openrl.bench"),
    "mlx_lm": ("openrl.backends.mps", "openrl.bench"),
    "peft": ("openrl.bench",),
    "rich": ("openrl_cli", "openrl_recipes", "openrl.telemetry"),
    "typer": ("openrl_cli", "openrl_recipes"),
    "sqlite3": ("openrl.store", "openrl.daemon", "openrl_recipes"),
    "tinker": ("openrl_recipes", "openrl.bench"),
    "datasets": ("openrl_recipes",),
}


def modules() -> dict[str, Path]:
    found: dict[str, Path] = {}
    for package, folder in PACKAGES.items():
        for path in folder.rglob("*.py"):
            parts = [package, *path.relative_to(folder).with_suffix("").parts]
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


MODULES = modules()


def imports(path: Path, *, top_level: bool) -> set[str]:
    """Modules that a file imports; with `top_level` only those outside of functions and `if TYPE_CHECKING`."""
    tree = ast.parse(path.read_text())
    nodes = list(tree.body) if top_level else list(ast.walk(tree))
    names: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                names.add(whole if whole in MODULES else node.module)
    return names


def within(module: str, prefix: str) -> bool:
    return module == prefix or module.startswith(prefix + ".")


@pytest.mark.parametrize("module", sorted(MODULES))
def test_arrows(module: str) -> None:
    layers = [layer for layer in ALLOWED if within(module, layer)]
    if not layers:
        assert module.count(".") <= 1, f"{module} belongs to no layer"
        return
    layer = max(layers, key=len)
    package = module if module in PACKAGES else layer
    for name in imports(MODULES[module], top_level=False):
        ours = within(name, "openrl") or within(name, "openrl_cli") or within(name, "openrl_recipes")
        if ours and not any(within(name, allowed) for allowed in {package, layer, *BASE, *ALLOWED[layer]}):
            pytest.fail(f"{module} imports {name}; {layer} may import {sorted(ALLOWED[layer] | BASE)}")


@pytest.mark.parametrize("heavy", sorted(HEAVY))
def test_heavy_packages_stay_in_their_place(heavy: str) -> None:
    for module, path in MODULES.items():
        if any(within(name, heavy) for name in imports(path, top_level=False)):
            assert any(within(module, place) for place in HEAVY[heavy]), f"{module} imports {heavy}"


def test_no_cycles() -> None:
    graph = {m: {n for n in imports(p, top_level=True) if n in MODULES and n != m} for m, p in MODULES.items()}
    done: set[str] = set()

    def visit(module: str, trail: tuple[str, ...]) -> None:
        assert module not in trail, f"import cycle: {' -> '.join((*trail[trail.index(module) :], module))}"
        if module not in done:
            for other in graph[module]:
                visit(other, (*trail, module))
            done.add(module)

    for module in graph:
        visit(module, ())


def test_every_package_is_in_the_wheel() -> None:
    """`packages` is a list by hand: a forgotten one works when editable and is missing from the wheel."""
    listed = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"])
    on_disk = {m for m, path in MODULES.items() if path.name == "__init__.py"}
    assert listed == on_disk


def test_the_daemon_runs_without_torch() -> None:
    code = (
        "import sys, openrl.app; "
        "bad = {'torch', 'transformers', 'huggingface_hub', 'mlx', 'vllm'} & set(sys.modules); "
        "sys.exit(f'imported: {bad}' if bad else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr

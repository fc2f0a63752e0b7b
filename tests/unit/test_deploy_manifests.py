"""What deploy/ says agrees with the program: settings, probes, times, memory, users. Helm is `make deploy-check`."""

from __future__ import annotations

import importlib.util
import math
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

from openrl.models import catalog, info
from openrl.server.access import OPEN
from openrl.server.app import routes
from openrl.setting_table import BY_KEY, SETTINGS
from openrl.types import ModelInfo

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
MANIFESTS = sorted((DEPLOY / "manifests").glob("*.yaml"))
GIB, MIB = 1 << 30, 1 << 20


def load(name: str) -> ModuleType:
    """A script of deploy/, which is no package."""
    spec = importlib.util.spec_from_file_location(f"deploy_{name}", DEPLOY / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


container, render = load("container"), load("render")


@pytest.fixture(params=MANIFESTS, ids=lambda path: path.stem)
def manifest(request: pytest.FixtureRequest) -> Path:
    return request.param


def pod(manifest: Path) -> dict[str, Any]:
    return container.pod(manifest)


def containers(manifest: Path) -> Iterator[dict[str, Any]]:
    yield from pod(manifest).get("initContainers", ())
    yield from pod(manifest)["containers"]


def test_both_variants_are_there() -> None:
    assert [path.stem for path in MANIFESTS] == sorted(render.NAMES)


def test_manifests_are_of_this_chart(manifest: Path) -> None:
    """A chart that was changed and not rendered again shows by its hash, without Helm."""
    found = re.search(r"sha256:([0-9a-f]{64})", manifest.read_text())
    assert found is not None
    assert found[1] == render.digest(manifest.stem), "run: make deploy-check, or python deploy/render.py"


@pytest.mark.skipif(importlib.util.find_spec("helm_python") is None, reason="needs helm-python-sdk (make deploy-check)")
def test_manifests_are_what_helm_renders(manifest: Path) -> None:
    assert manifest.read_text() == render.manifest(manifest.stem)


def test_every_variable_is_a_setting_with_a_legal_value(manifest: Path) -> None:
    settings = {setting.env: setting for setting in SETTINGS}
    given = container.documents(manifest)["ConfigMap"]["data"]
    for name, value in given.items():
        settings[name].kind.parse(value)
    image = container.image_env(target="cuda" if "gpu" in manifest.stem else "cpu")
    for name, value in image.items():
        if name.startswith("OPENRL_"):
            assert given[name] == value, f"{name} is one thing in the image and another in the manifest"


def test_no_service_variables_reach_the_settings(manifest: Path) -> None:
    """A service named openrl would set OPENRL_PORT=tcp://..., and the server refuses to start."""
    assert pod(manifest)["enableServiceLinks"] is False


def test_the_pod_outlives_the_shutdown(manifest: Path) -> None:
    grace = float(container.documents(manifest)["ConfigMap"]["data"]["OPENRL_SHUTDOWN_GRACE"])
    assert pod(manifest)["terminationGracePeriodSeconds"] >= grace + 10


def test_probes_ask_open_routes_of_the_right_port(manifest: Path) -> None:
    opened = {route.path for route in routes() if route.needs is OPEN}
    (server,) = pod(manifest)["containers"]
    ports = {port["name"]: port["containerPort"] for port in server["ports"]}
    assert ports == {"http": int(container.image_env()["OPENRL_PORT"])}
    assert {name for name in server if name.endswith("Probe")} == {"startupProbe", "livenessProbe", "readinessProbe"}
    for name in ("startupProbe", "livenessProbe", "readinessProbe"):
        assert server[name]["httpGet"]["path"] in opened
        assert server[name]["httpGet"]["port"] == "http"
    assert server["readinessProbe"]["httpGet"]["path"].endswith("readyz")
    assert server["livenessProbe"]["httpGet"]["path"].endswith("healthz"), "a loading server must not be restarted"


def test_one_server_a_disk(manifest: Path) -> None:
    kinds = container.documents(manifest)
    assert kinds["StatefulSet"]["spec"]["replicas"] == 1
    (claim,) = kinds["StatefulSet"]["spec"]["volumeClaimTemplates"]
    assert claim["spec"]["accessModes"] == ["ReadWriteOncePod"]
    assert kinds["StatefulSet"]["spec"]["persistentVolumeClaimRetentionPolicy"]["whenDeleted"] == "Retain"
    assert "Deployment" not in kinds
    assert kinds["Service"]["spec"]["publishNotReadyAddresses"] is True


def test_nothing_runs_as_root_or_can_write_outside_its_volumes(manifest: Path) -> None:
    spec = pod(manifest)
    dockerfile = (DEPLOY / "Dockerfile").read_text()
    assert f"USER {spec['securityContext']['runAsUser']}:{spec['securityContext']['runAsGroup']}" in dockerfile
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert spec["automountServiceAccountToken"] is False
    for one in containers(manifest):
        security = one["securityContext"]
        assert security["readOnlyRootFilesystem"] is True
        assert security["allowPrivilegeEscalation"] is False
        assert security["capabilities"] == {"drop": ["ALL"]}
        assert {mount["mountPath"] for mount in one["volumeMounts"]} == {"/data", "/tmp"}
    for name, value in container.image_env().items():
        if name in ("HOME", "HF_HOME", "OPENRL_DATA_DIR", "OPENRL_LOG_FOLDER"):
            assert value.startswith("/data/"), name


def test_the_key_comes_from_a_secret_and_is_nowhere_in_the_files(manifest: Path) -> None:
    (server,) = pod(manifest)["containers"]
    (key,) = [entry for entry in server["env"] if entry["name"] == BY_KEY["server.api_key"].env]
    assert key["valueFrom"]["secretKeyRef"] == {"name": "openrl-keys", "key": "api-key"}
    assert not re.search(r"tml-[A-Za-z0-9_-]{8,}", manifest.read_text())


def test_memory_is_what_doctor_reckons(manifest: Path) -> None:
    """For each model openrl.models.info.memory_needed, half a GiB for the server, and resources.extraMemory."""
    values = yaml.safe_load((DEPLOY / "helm/openrl/values.yaml").read_text()) | render.values(manifest.stem)
    models = [
        ModelInfo(
            vocab_size=1, max_context=1, max_lora_rank=1, parameters=model["parametersMillion"] * 10**6, family=""
        )
        for model in values["models"]
    ]
    needed = sum(math.ceil((info.memory_needed(m, values["dtype"]) - info.RUNTIME) / MIB) for m in models)
    expected = needed + len(models) * info.RUNTIME // MIB + 512 + 2048
    for one in containers(manifest):
        assert one["resources"]["requests"]["memory"] == one["resources"]["limits"]["memory"] == f"{expected}Mi"


def test_the_default_model_is_the_chart_s_and_its_size_is_right() -> None:
    (model,) = yaml.safe_load((DEPLOY / "helm/openrl/values.yaml").read_text())["models"]
    assert model == {"source": catalog.DEFAULT.name, "parametersMillion": 135}


def test_a_gpu_is_asked_for_where_there_is_one() -> None:
    manifest = DEPLOY / "manifests/gpu-l4.yaml"
    spec = pod(manifest)
    (server,) = spec["containers"]
    assert server["resources"]["limits"]["nvidia.com/gpu"] == 1
    assert spec["nodeSelector"] == {"cloud.google.com/gke-accelerator": "nvidia-l4"}
    assert {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"} in spec["tolerations"]
    assert container.documents(manifest)["ConfigMap"]["data"]["OPENRL_BACKEND"] == "cuda"
    assert "nvidia.com/gpu" not in str(pod(DEPLOY / "manifests/cpu.yaml"))


def test_init_containers_fetch_what_the_server_serves(manifest: Path) -> None:
    served = container.documents(manifest)["ConfigMap"]["data"]["OPENRL_MODELS"].split(",")
    pulled = [one["args"] for one in pod(manifest)["initContainers"]]
    assert pulled == [["models", "pull", name] for name in served]


def test_the_image_starts_what_the_pod_asks_for() -> None:
    assert container.entrypoint() == ["tini", "--", "openrl"]
    for manifest in MANIFESTS:
        assert container.args(manifest, "openrl") == ["serve"]
        assert not any("command" in one for one in containers(manifest)), "it would go round tini"


def test_stages_of_the_image_exist_and_copy_what_the_context_has() -> None:
    text = (DEPLOY / "Dockerfile").read_text()
    stages = re.findall(r"^FROM \S+ AS (\S+)", text, re.MULTILINE)
    assert {"cpu", "cuda"} <= set(stages)
    allowed = {line[1:] for line in (DEPLOY / "Dockerfile.dockerignore").read_text().splitlines() if line[0] == "!"}
    for line in re.findall(r"^COPY (?!--from)(.+)$", text, re.MULTILINE):
        for source in line.split()[:-1]:
            assert (ROOT / source).exists()
            assert source in allowed, f"{source} is not in the build context"
    for source in re.findall(r"--from=(\S+)", text):
        assert source in stages


def test_the_base_image_is_named_once() -> None:
    given = (DEPLOY / "images.env").read_text()
    tag = re.search(r"^PYTHON_IMAGE=([^@\n]+)(@sha256:[0-9a-f]{64})?$", given, re.MULTILINE)
    assert tag is not None
    assert f"ARG PYTHON_IMAGE={tag[1]}\n" in (DEPLOY / "Dockerfile").read_text()


def test_constraints_hold_what_the_project_depends_on() -> None:
    import tomllib

    held = {line.split("==")[0] for line in (DEPLOY / "constraints.txt").read_text().splitlines() if line[0] != "#"}
    wanted = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    names = {re.split(r"[><=; ]", entry)[0].lower().replace("_", "-") for entry in wanted if "== 'darwin'" not in entry}
    assert names - held == {"torch"}, "PyTorch is the Dockerfile's own argument"


def test_the_digest_covers_the_variant() -> None:
    assert len({render.digest(name) for name in render.NAMES}) == len(render.NAMES)

"""Everything about deploy/ that can be checked without a container engine and without a cluster: `make deploy-check`.

Prints a line for each check and says plainly what could not be had. Exits with 1 if anything that ran found a fault.
Packages: deploy/requirements-check.txt; for custom resources Node.js with npm (deploy/crds), else they go unchecked.
"""

from __future__ import annotations

import argparse
import copy
import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import render
import yaml

VARIANTS = ("minimal", "cpu", "gpu-l4", "everything")
# The oldest Kubernetes that the chart admits, and the newest that the schemas know.
KUBERNETES = ("1.29", "1.37")
CUSTOM = ("gateway.networking.k8s.io", "networking.gke.io", "monitoring.googleapis.com", "monitoring.coreos.com")

# Values that must be refused, and a word of the message that says why.
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no image": ({"image": {"repository": ""}}, "repository"),
    "a model of unknown size": ({"models": [{"source": "org/model"}]}, "parametersMillion"),
    "a GPU of no kind": ({"gpu": {"enabled": True}}, "accelerator"),
    "a gateway without TLS": ({"gateway": {"enabled": True, "hostname": "a.example"}}, "TLS"),
    "an ingress without TLS": ({"ingress": {"enabled": True, "host": "a.example"}}, "TLS"),
    "a misspelt value": ({"gpus": {"enabled": True}}, "gpus"),
    "a setting that is no OPENRL_ variable": ({"config": {"PORT": "1"}}, "PORT"),
}


class Report:
    """Lines as they come, and whether all was well."""

    def __init__(self) -> None:
        self.failed = False

    def ok(self, name: str, found: str = "") -> None:
        print(f"  ok       {name}{': ' if found else ''}{found}")

    def bad(self, name: str, found: str) -> None:
        self.failed = True
        print(f"  FAILED   {name}: {found}")

    def missing(self, name: str, why: str) -> None:
        print(f"  NOT RUN  {name}: {why}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tools", type=Path, required=True, help="folder for the packages of deploy/crds")
    tools: Path = parser.parse_args().tools
    report = Report()
    checks: list[Callable[[], None]] = [
        lambda: helm(report),
        lambda: manifests(report),
        lambda: schemas(report),
        lambda: custom_resources(report, tools),
        lambda: dockerfile(report),
        lambda: scripts(report),
    ]
    for check in checks:
        check()
    return int(report.failed)


def helm(report: Report) -> None:
    """Lint and render each variant; refuse what must be refused."""
    import helm_python

    print(f"Helm {helm_python.helm_sdk_version()} (helm-python-sdk)")
    for variant in VARIANTS:
        found = helm_python.lint(render.CHART, render.values(variant), strict=True, kube_version="v1.30.0")
        faults = [message["error"] for message in found["messages"] if message["severity"] >= 2]
        (report.bad if faults else report.ok)(f"lint {variant}", "; ".join(faults) or "no warning")
        report.ok(f"template {variant}", f"{len(render.render(render.values(variant)))} documents")
    for name, (values, word) in REFUSED.items():
        given = copy.deepcopy(render.values("cpu")) | values
        try:
            render.render(given)
        except helm_python.HelmError as error:
            (report.ok if word in str(error) else report.bad)(
                f"refuses {name}", word if word in str(error) else str(error)
            )
        else:
            report.bad(f"refuses {name}", "it was rendered")


def manifests(report: Report) -> None:
    print("Plain manifests")
    for name in render.NAMES:
        same = (render.MANIFESTS / f"{name}.yaml").read_text() == render.manifest(name)
        (report.ok if same else report.bad)(f"manifests/{name}.yaml", "as rendered" if same else "run deploy/render.py")


def documents() -> Iterator[tuple[str, dict[str, Any]]]:
    for variant in VARIANTS:
        for text in render.render(render.values(variant)):
            yield variant, yaml.safe_load(text)


def schemas(report: Report) -> None:
    """Each resource of Kubernetes' own against its schema, unknown fields refused."""
    import kubernetes_validate

    print(f"Kubernetes schemas (kubernetes-validate {kubernetes_validate.__version__})")
    for version in KUBERNETES:
        count = 0
        for variant, document in documents():
            if document["apiVersion"].startswith(CUSTOM):
                continue
            try:
                kubernetes_validate.validate(document, version, strict=True)
                count += 1
            except kubernetes_validate.ValidationError as error:
                report.bad(f"{variant} {document['kind']} in {version}", str(error))
        report.ok(f"schemas of {version}", f"{count} resources")


def custom_resources(report: Report, tools: Path) -> None:
    """Gateway API, GKE's policies and the Prometheus operator's resources, by the models of npm packages."""
    print("Custom resources (@kubernetes-models, npm)")
    if shutil.which("npm") is None or shutil.which("node") is None:
        report.missing("custom resources", "needs Node.js with npm")
        return
    tools.mkdir(parents=True, exist_ok=True)
    for path in (render.DEPLOY / "crds").iterdir():
        shutil.copy(path, tools)
    made = subprocess.run(["npm", "install", "--silent", "--no-audit", "--no-fund"], cwd=tools, check=False)
    if made.returncode:
        report.missing("custom resources", "npm could not install the models")
        return
    found = [document for _, document in documents() if document["apiVersion"].startswith(CUSTOM)]
    done = subprocess.run(
        ["node", "validate.mjs"], cwd=tools, input=json.dumps(found), capture_output=True, text=True, check=False
    )
    if done.stderr:
        report.bad("custom resources", done.stderr.strip())
    for line in done.stdout.splitlines():
        word, _, rest = line.partition(" ")
        match word:
            case "ok":
                report.ok(rest)
            case "unknown":
                report.missing(rest, "no package has a model of it; its fields were compared with the CRD by eye")
            case _:
                report.bad("custom resource", rest)


def dockerfile(report: Report) -> None:
    print("Dockerfile (hadolint)")
    hadolint = Path(sys.executable).parent / "hadolint"
    done = subprocess.run([hadolint, render.DEPLOY / "Dockerfile"], capture_output=True, text=True, check=False)
    (report.bad if done.returncode else report.ok)("Dockerfile", done.stdout.strip() or "no finding")


def scripts(report: Report) -> None:
    """Shell scripts by their shell's own parser, and by shellcheck where it is installed."""
    print("Shell scripts")
    paths = sorted(render.DEPLOY.glob("*.sh"))
    for path in paths:
        done = subprocess.run(["sh", "-n", path], capture_output=True, text=True, check=False)
        (report.bad if done.returncode else report.ok)(path.name, done.stderr.strip())
    shellcheck = shutil.which("shellcheck")
    if shellcheck is None:
        report.missing("shellcheck", "not installed (Debian: apt-get install shellcheck)")
        return
    done = subprocess.run(
        [shellcheck, "-x", *paths], cwd=render.DEPLOY.parent, capture_output=True, text=True, check=False
    )
    (report.bad if done.returncode else report.ok)("shellcheck", done.stdout.strip() or "no finding")


if __name__ == "__main__":
    sys.exit(main())

"""Plain manifests from the Helm chart: `python deploy/render.py` writes deploy/manifests, `--check` compares.

The renderer is Helm itself, as the library that `helm-python-sdk` carries; nothing else needs to be installed. Each
file names the chart it came from by a hash, so that tests notice a chart that was changed and not rendered again even
where Helm is absent.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
from pathlib import Path
from typing import Any

import yaml

DEPLOY = Path(__file__).parent
CHART = DEPLOY / "helm" / "openrl"
MANIFESTS = DEPLOY / "manifests"
VARIANTS = DEPLOY / "variants"
NAMES = ("cpu", "gpu-l4")
NAMESPACE = "openrl"

_HEADER = """\
# Made from the Helm chart by deploy/render.py with deploy/variants/{name}.yaml: change those, not this file.
# chart and variant: sha256:{digest}
#
#   kubectl create namespace {namespace}
#   kubectl -n {namespace} create secret generic openrl-keys --from-literal=api-key=tml-$(openssl rand -hex 24)
#   sed 's|REGISTRY/|YOUR-REGISTRY/|' deploy/manifests/{name}.yaml | kubectl -n {namespace} apply -f -
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare with what is there instead of writing")
    check = parser.parse_args().check
    stale = [name for name in NAMES if (MANIFESTS / f"{name}.yaml").read_text() != manifest(name)] if check else []
    for name in stale:
        print(f"deploy/manifests/{name}.yaml is not what the chart gives; run: python deploy/render.py")
    if not check:
        for name in NAMES:
            (MANIFESTS / f"{name}.yaml").write_text(manifest(name))
    return 1 if stale else 0


def manifest(name: str) -> str:
    """The text of deploy/manifests/<name>.yaml."""
    header = _HEADER.format(name=name, digest=digest(name), namespace=NAMESPACE)
    return "---\n".join([header, *(part.strip() + "\n" for part in render(values(name)))])


def render(given: dict[str, Any]) -> list[str]:
    """The chart's documents as text, in the order of their templates' names; needs helm-python-sdk."""
    from helm_python import Chart

    with Chart.load(CHART) as chart:
        rendered = chart.render(given, name="openrl", namespace=NAMESPACE, is_install=True)
    texts = [rendered[path] for path in sorted(rendered) if path.endswith(".yaml")]
    documents = [part for text in texts for part in text.split("\n---\n")]
    return [document for document in documents if yaml.safe_load(document) is not None]


def values(name: str) -> dict[str, Any]:
    return yaml.safe_load((VARIANTS / f"{name}.yaml").read_text())


def digest(name: str) -> str:
    """A hash over everything that a rendered file depends on."""
    total = hashlib.sha256()
    for path in [*sorted(CHART.rglob("*")), VARIANTS / f"{name}.yaml", Path(__file__)]:
        if path.is_file():
            total.update(f"{path.relative_to(DEPLOY).as_posix()}\n".encode() + path.read_bytes() + b"\0")
    return total.hexdigest()


if __name__ == "__main__":
    sys.exit(main())

"""What a container gets from deploy/Dockerfile and a rendered manifest, for deploy/try_local.sh and tests.

python deploy/container.py env MANIFEST        NAME=VALUE lines: the image's ENV, then the ConfigMap
python deploy/container.py entrypoint          the image's ENTRYPOINT, a word a line
python deploy/container.py args MANIFEST NAME  the arguments of a container of the pod, a word a line
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import yaml

DOCKERFILE = Path(__file__).parent / "Dockerfile"


def image_env(dockerfile: Path = DOCKERFILE, target: str = "cpu") -> dict[str, str]:
    """ENV of a target and of the stage that it stands on."""
    found: dict[str, str] = {}
    for stage in ("runtime", target):
        for line in _instructions(_stage(dockerfile, stage), "ENV"):
            found |= dict(re.findall(r"(\w+)=(\S+)", line))
    return found


def entrypoint(dockerfile: Path = DOCKERFILE) -> list[str]:
    (line,) = _instructions(_stage(dockerfile, "runtime"), "ENTRYPOINT")
    return json.loads(line)


def documents(manifest: Path) -> dict[str, Any]:
    """The documents of a manifest by kind; each of ours comes once."""
    return {document["kind"]: document for document in yaml.safe_load_all(manifest.read_text()) if document}


def pod(manifest: Path) -> dict[str, Any]:
    return documents(manifest)["StatefulSet"]["spec"]["template"]["spec"]


def args(manifest: Path, name: str) -> list[str]:
    spec = pod(manifest)
    containers = [*spec.get("initContainers", ()), *spec["containers"]]
    return next(container["args"] for container in containers if container["name"] == name)


def _stage(dockerfile: Path, name: str) -> str:
    """The lines of one stage, continued lines joined, comments left out."""
    text = re.sub(r"^#.*\n", "", dockerfile.read_text(), flags=re.MULTILINE).replace("\\\n", " ")
    stages = re.split(r"^(?=FROM )", text, flags=re.MULTILINE)
    return next(stage for stage in stages if re.match(rf"FROM \S+ AS {name}\n", stage))


def _instructions(stage: str, name: str) -> list[str]:
    return [line.removeprefix(f"{name} ").strip() for line in stage.splitlines() if line.startswith(f"{name} ")]


def main(command: str, *rest: str) -> None:
    match command:
        case "env":
            lines = image_env() | documents(Path(rest[0]))["ConfigMap"]["data"]
            print(*(f"{name}={value}" for name, value in lines.items()), sep="\n")
        case "entrypoint":
            print(*entrypoint(), sep="\n")
        case "args":
            print(*args(Path(rest[0]), rest[1]), sep="\n")
        case _:
            sys.exit(__doc__)


if __name__ == "__main__":
    main(*sys.argv[1:])

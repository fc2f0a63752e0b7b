"""Run what the container runs, where there is no container engine: started by deploy/try_local.sh, as root on Linux.

What is as in the pod: the wheel of this checkout in a fresh environment at /opt/openrl (made as the Dockerfile makes
it), the image's ENTRYPOINT and ENV, the manifest's ConfigMap and arguments, the user id, no capability, no new
privileges, a root file system that cannot be written, /data (group of the pod) and /tmp. The server has a network of
its own without a way out, so what the init container fetched has to do.

Then: probes from the start on, keys, figures, a training step, SIGTERM with time taken, a second start that finds
everything again, and SIGTERM while the model loads.

What is not: the image's layers and base, seccomp, limits of memory and CPU, a kubelet.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import container

HERE = Path(__file__).resolve().parent
SOURCE = HERE.parent
KEY = "tml-" + os.urandom(12).hex()
URL = "http://127.0.0.1:8000"
MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib64", "/etc")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=SOURCE / "build" / "try-local", help="keeps environment and data")
    parser.add_argument("--torch", default="torch==2.13.0", help="what pip installs as PyTorch")
    parser.add_argument("--manifest", type=Path, default=HERE / "manifests" / "cpu.yaml")
    parser.add_argument("--rootfs", type=Path, help="an image's files, unpacked (buildah mount): try those instead")
    options = parser.parse_args()
    box = Box(options.work.resolve(), options.manifest)
    if options.rootfs:
        box.mount_image(options.rootfs)
    else:
        box.mount_system()
        box.install(options.torch)
    box.close()
    say("init container:", *container.args(options.manifest, "pull-0"))
    start = time.monotonic()
    box.start(container.args(options.manifest, "pull-0"), {}).wait_zero()
    say(f"  ended after {time.monotonic() - start:.0f} s")
    unshare_network()
    run("ip", "link", "set", "lo", "up")
    trained = first_life(box, options.manifest)
    second_life(box, options.manifest, trained)
    third_life(box, options.manifest)
    say("all as it should be")


def first_life(box: Box, manifest: Path) -> str:
    """Start, probes, keys, a step, SIGTERM. Returns the run's id."""
    say("first start, without a network but its own")
    server = box.start(container.args(manifest, "openrl"), {"OPENRL_API_KEY": KEY})
    until_ready(server)
    check("no key: status 401", call("/api/v1/status", key=None)[0] == 401)
    check("no key: /metrics 401", call("/metrics", key=None)[0] == 401)
    status, text = call("/metrics", key=None, headers={"authorization": f"Bearer {KEY}"})
    check("bearer: /metrics 200 and ready", status == 200 and "\nopenrl_ready 1.0\n" in text)
    trained = train_a_step()
    identity(server)
    seconds = server.terminate()
    check(f"SIGTERM: exit code 0 after {seconds:.1f} s, grace {grace(manifest):g} s", seconds < grace(manifest))
    return trained


def second_life(box: Box, manifest: Path, trained: str) -> None:
    say("second start, on the same data")
    server = box.start(container.args(manifest, "openrl"), {"OPENRL_API_KEY": KEY})
    until_ready(server)
    check("the run is there again", call(f"/api/v1/training_runs/{trained}")[0] == 200)
    check("it goes on where it was", "metrics" in result(post("optim_step", step_body(trained, 3))))
    check("tokens trained are remembered", 'kind="train"' in call("/metrics")[1])
    check(f"SIGTERM: exit code 0 after {server.terminate():.1f} s", True)


def third_life(box: Box, manifest: Path) -> None:
    say("third start, ended while the model loads")
    server = box.start(container.args(manifest, "openrl"), {"OPENRL_API_KEY": KEY})
    while call("/api/v1/healthz", key=None)[0] != 200:
        time.sleep(0.05)
    status, text = call("/api/v1/readyz", key=None)
    say(f"  readyz {status} {text}")
    check("not ready while it loads", status == 503)
    seconds = server.terminate()
    check(f"SIGTERM: exit code 0 after {seconds:.1f} s", seconds < grace(manifest))


class Box:
    """A root folder like the image's, in a mount namespace of our own."""

    def __init__(self, work: Path, manifest: Path) -> None:
        self.work = work
        self.root = work / "root"
        self.user = container.pod(manifest)["securityContext"]["runAsUser"]
        self.group = container.pod(manifest)["securityContext"]["fsGroup"]
        self.env = container.image_env() | container.documents(manifest)["ConfigMap"]["data"]

    def mount_image(self, files: Path) -> None:
        """The root of an image that was built: nothing of this machine but the kernel and /dev."""
        self._prepare()
        run("mount", "--bind", files, self.root)
        self._mount_volumes()

    def mount_system(self) -> None:
        """This machine's system, with a fresh environment at /opt/openrl."""
        self._prepare()
        run("mount", "-t", "tmpfs", "-o", "mode=755", "root", self.root)
        base = Path(sys.base_prefix)
        shown = [Path(name) for name in SYSTEM] + ([] if base == Path("/usr") else [base])
        for folder in [*shown, *(path for path in Path("/opt").glob("*") if path.is_dir())]:
            self._show(folder)
        for name in ("opt/openrl", "dev", "proc", "tmp", "data"):
            (self.root / name).mkdir(parents=True, exist_ok=True)
        run("mount", "--bind", self.work / "venv", self.root / "opt/openrl")
        self._mount_volumes()

    def _prepare(self) -> None:
        for folder in (self.root, self.work / "venv", self.work / "data"):
            folder.mkdir(parents=True, exist_ok=True)
        run("mount", "--make-rprivate", "/")

    def _mount_volumes(self) -> None:
        run("mount", "--rbind", "/dev", self.root / "dev")
        run("mount", "-t", "proc", "proc", self.root / "proc")
        run("mount", "-t", "tmpfs", "-o", "mode=1777", "tmp", self.root / "tmp")
        run("mount", "--bind", self.work / "data", self.root / "data")

    def _show(self, folder: Path) -> None:
        """A folder of this machine at its place, read-only."""
        there = self.root / folder.relative_to("/")
        if folder.is_symlink():
            there.symlink_to(folder.readlink())
        elif folder.is_dir():
            there.mkdir(parents=True, exist_ok=True)
            run("mount", "--rbind", folder, there)
            run("mount", "-o", "remount,bind,ro", there)

    def install(self, torch: str) -> None:
        """The wheel of the checkout, and what it needs, which a later try finds there."""
        say("making wheel and environment")
        build, wheels = self.work / "build", self.root / "tmp" / "wheels"
        shutil.rmtree(build, ignore_errors=True)
        for name in ("pyproject.toml", "README.md", "LICENSE", "openrl", "cli", "recipes"):
            _copy(SOURCE / name, build / name)
        run(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", wheels, build)
        shutil.copy(HERE / "constraints.txt", self.root / "tmp")
        wheel = f"/tmp/wheels/{next(wheels.glob('*.whl')).name}"
        pip = ("/opt/openrl/bin/pip", "install", "--quiet", "--no-cache-dir")
        run("chroot", self.root, Path(sys.base_prefix) / "bin" / "python3", "-m", "venv", "/opt/openrl")
        run("chroot", self.root, *pip, *torch.split())
        run("chroot", self.root, *pip, "--constraint", "/tmp/constraints.txt", wheel)
        run("chroot", self.root, *pip, "--force-reinstall", "--no-deps", wheel)  # an earlier try's has the same version

    def close(self) -> None:
        """Nothing but /data and /tmp can be written from here on; /data as the kubelet hands it to a group."""
        if (self.root / "opt/openrl").is_mount():
            run("mount", "-o", "remount,bind,ro", self.root / "opt/openrl")
        run("mount", "-o", "remount,bind,ro", self.root)
        os.chown(self.work / "data", 0, self.group)
        (self.work / "data").chmod(0o2775)

    def start(self, args: list[str], more: dict[str, str]) -> Server:
        entry = container.entrypoint()
        if not (self.root / "usr/bin/tini").exists():
            say("  tini is not installed here: the command runs without it")
            entry = entry[entry.index("--") + 1 :]
        rights = ("--no-new-privs", "--bounding-set=-all", "--inh-caps=-all")
        ids = (f"--reuid={self.user}", f"--regid={self.group}", f"--groups={self.group}")
        words = [f"{name}={value}" for name, value in (self.env | more).items()]
        inner = ["chroot", self.root, "setpriv", *ids, *rights, "env", "-i", "-C", "/data", *words, *entry, *args]
        # Process 1 of a namespace of its own, with the /proc that goes with it, as in a container.
        own_proc = f'mount -t proc proc "{self.root}/proc" && exec "$@"'
        command = ["unshare", "--pid", "--mount", "--fork", "--kill-child", "--", "sh", "-c", own_proc, "sh", *inner]
        return Server(command, self.work / "container.log")


class Server:
    """A container's process."""

    def __init__(self, command: list[Any], log: Path) -> None:
        self._log = log
        self._file = log.open("w")
        self.process = subprocess.Popen([str(word) for word in command], stdout=self._file, stderr=self._file)

    def first(self) -> int:
        """Process 1 of the container, by its number here."""
        return int(_children(self.process.pid)[0])

    def alive(self) -> bool:
        if self.process.poll() is None:
            return True
        fail(f"the container ended with {self.process.returncode}:\n{self._log.read_text()}")
        return False

    def wait_zero(self) -> None:
        if self.process.wait() != 0:
            fail(f"exit code {self.process.returncode}:\n{self._log.read_text()}")

    def terminate(self) -> float:
        """SIGTERM to process 1 of the container; seconds until it is gone. Its code has to be 0."""
        start = time.monotonic()
        os.kill(self.first(), signal.SIGTERM)
        self.process.wait(120)
        self.wait_zero()
        return time.monotonic() - start


def until_ready(server: Server) -> None:
    """Ask both probes until the model is loaded; every answer has to be legal."""
    start, alive, seen = time.monotonic(), 0.0, None
    while server.alive() and time.monotonic() - start < 300:
        lives, (status, text) = call("/api/v1/healthz", key=None)[0], call("/api/v1/readyz", key=None)
        if lives == 200 and not alive:
            alive = time.monotonic() - start
            say(f"  healthz 200 after {alive:.1f} s")
        if alive and lives != 200:
            fail(f"healthz went from 200 to {lives}")
        if alive and text != seen:
            seen = text
            say(f"  readyz {status} after {time.monotonic() - start:.1f} s: {text}")
        if status == 200:
            return
        time.sleep(0.1)
    fail("not ready after 300 s")


def identity(server: Server) -> None:
    """The server's process as the kernel sees it: user, capabilities, and what it cannot write."""
    pid = _children(server.first())[0]
    lines = dict(line.split(":\t", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines() if ":\t" in line)
    check("user and group 10001", lines["Uid"].split() == lines["Gid"].split() == ["10001"] * 4)
    check("no capability, no new privileges", int(lines["CapBnd"], 16) == 0 and lines["NoNewPrivs"] == "1")
    mounts = [line.split() for line in Path(f"/proc/{pid}/mountinfo").read_text().splitlines()]
    writable = sorted({mount[4] for mount in mounts if "rw" in mount[5].split(",")})
    inside = [place for place in writable if not place.startswith(("/dev", "/proc"))]
    check(f"only {' and '.join(inside)} can be written", inside == ["/data", "/tmp"])


def train_a_step() -> str:
    """Session, run, one pass and step over HTTP, as an old SDK sends them. Returns the run's id."""
    session = post("create_session", {"sdk_version": "0.38.0"})["session_id"]
    body = {"session_id": session, "model_seq_id": 0, "base_model": MODEL, "lora_config": {"rank": 8}}
    run_id = result(post("create_model", body))["model_id"]
    targets = {"data": [5, 9, 11], "dtype": "int64", "shape": [3]}
    datum = {"model_input": {"chunks": [{"tokens": [1, 5, 9]}]}, "loss_fn_inputs": {"target_tokens": targets}}
    content = {"data": [datum], "loss_fn": "cross_entropy"}
    passed = post("forward_backward", {"model_id": run_id, "seq_id": 1, "forward_backward_input": content})
    stepped = post("optim_step", step_body(run_id, 2))
    check("a training step", result(passed)["metrics"]["loss:sum"] > 0 and "metrics" in result(stepped))
    return run_id


def step_body(run_id: str, seq: int) -> dict[str, Any]:
    return {"model_id": run_id, "seq_id": seq, "adam_params": {}}


def post(path: str, body: dict[str, Any]) -> dict[str, Any]:
    status, text = call(f"/api/v1/{path}", body=body)
    check(f"POST {path} 200", status == 200, text)
    return json.loads(text)


def result(promise: dict[str, Any]) -> dict[str, Any]:
    while True:
        status, text = call("/api/v1/retrieve_future", body={"request_id": promise["request_id"]})
        if status != 408:
            return json.loads(text)


def call(
    path: str, *, key: str | None = KEY, body: dict[str, Any] | None = None, headers: dict[str, str] | None = None
) -> tuple[int, str]:
    """Status and text of one call; status 0 while nothing listens."""
    given = {"accept": "application/json", "content-type": "application/json", **(headers or {})}
    if key:
        given["x-api-key"] = key
    request = urllib.request.Request(URL + path, None if body is None else json.dumps(body).encode(), given)
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()
    except OSError:
        return 0, ""


def grace(manifest: Path) -> float:
    return float(container.documents(manifest)["ConfigMap"]["data"]["OPENRL_SHUTDOWN_GRACE"])


def unshare_network() -> None:
    """os.unshare came with Python 3.12."""
    if ctypes.CDLL(None, use_errno=True).unshare(0x40000000) != 0:  # CLONE_NEWNET
        fail(f"unshare: {os.strerror(ctypes.get_errno())}")


def _children(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()


def _copy(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    if source.is_dir():
        shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
    else:
        shutil.copy(source, target)


def run(*words: object) -> None:
    subprocess.run([str(word) for word in words], check=True)


def check(what: str, good: bool, found: str = "") -> None:
    if not good:
        fail(f"{what}: no {found}")
    say("  ok:", what)


def say(*words: object) -> None:
    print(*words, flush=True)


def fail(message: str) -> None:
    sys.exit(f"FAILED: {message}")


if __name__ == "__main__":
    main()

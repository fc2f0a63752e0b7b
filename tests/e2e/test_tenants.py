"""Several users of one real server, through the real SDK: keys, owners, revocation under load, https."""

from __future__ import annotations

import json
import os
import ssl
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import tinker
import trustme
from tinker import types

from openrl_recipes.local_server import Endpoint, free_port, openrl_command
from support.real_server import datum, ints

MODEL = "local/tiny"
ADMIN = "tml-" + "a" * 40
Arguments = Callable[..., list[str]]


@contextmanager
def served(arguments: list[str], log: Path, scheme: str = "http", **environment: str) -> Iterator[Endpoint]:
    """`openrl serve` with the environment as given; yields once it answers."""
    port = free_port()
    env = {name: value for name, value in os.environ.items() if name != "OPENRL_API_KEY"} | environment
    with log.open("ab") as out:
        process = subprocess.Popen(
            [openrl_command(), "serve", "--port", str(port), *arguments], env=env, stdout=out, stderr=out
        )
    try:
        until_it_answers(process, f"{scheme}://127.0.0.1:{port}/api/v1/healthz", log)
        yield Endpoint(f"{scheme}://127.0.0.1:{port}", environment.get("OPENRL_API_KEY", ""))
    finally:
        process.terminate()
        process.wait(60)


def until_it_answers(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        assert process.poll() is None, log.read_text()
        try:
            httpx.get(url, verify=False, timeout=5)
            return
        except httpx.HTTPError:
            time.sleep(0.05)
    raise AssertionError(log.read_text())


def keys(*arguments: str, **environment: str) -> Any:
    """`openrl keys ARGUMENTS`, as a program would call it."""
    done = subprocess.run(
        [openrl_command(), "keys", *arguments],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout) if "--json" in arguments else done.stdout.strip()


def client(endpoint: Endpoint, key: str) -> tinker.ServiceClient:
    return tinker.ServiceClient(base_url=endpoint.base_url, api_key=key)


def a_step(training: tinker.TrainingClient) -> float:
    backward = training.forward_backward([datum([1, 2, 3, 4])], "cross_entropy")
    training.optim_step(types.AdamParams(learning_rate=1e-3)).result()
    return float(backward.result().metrics["loss:sum"])


def test_two_users_of_one_server(tiny_arguments: Arguments, tmp_path: Path) -> None:
    """Made without a server and with one; each trains, sees its own, and shares by publishing or by its key."""
    where = ["--data-dir", str(tmp_path / "data")]
    alices = keys("create", "--owner", "alice", *where)
    with served(tiny_arguments("--host", "0.0.0.0"), tmp_path / "log") as endpoint:
        bobs = keys("create", "--owner", "bob", "--runs", "1", *where, "--json")
        alice, bob = client(endpoint, alices), client(endpoint, bobs["api_key"])
        training = alice.create_lora_training_client(MODEL, rank=4).result()
        a_step(training)
        path = training.save_state("mine").result().path
        rest, alices_rest = (
            tinker.RestClient(base_url=endpoint.base_url, api_key=key) for key in (bobs["api_key"], alices)
        )
        assert alices_rest.whoami().result().user_urn == "tml:user:alice"
        assert rest.whoami().result().user_urn == "tml:user:bob"
        assert rest.list_training_runs().result().training_runs == []
        with pytest.raises(tinker.NotFoundError):
            rest.get_training_run_by_tinker_path(path).result()
        with pytest.raises((tinker.NotFoundError, tinker.RequestFailedError)):
            bob.create_training_client_from_state(path).result()
        shared = bob.create_training_client_from_state_with_optimizer(path, weights_access_token=alices).result()
        a_step(shared)
        with pytest.raises(tinker.RequestFailedError, match="quota"):
            bob.create_lora_training_client(MODEL, rank=4).result()
        alices_rest.publish_checkpoint_from_tinker_path(path).result()
        sampling = bob.create_sampling_client(model_path=path).result()
        drawn = sampling.sample(ints([1, 2]), 1, types.SamplingParams(max_tokens=2)).result()
        assert len(drawn.sequences[0].tokens) == 2
        for service in (alice, bob):
            service.close("success")
        keys("revoke", bobs["id"], *where)
        with pytest.raises(tinker.AuthenticationError):
            tinker.RestClient(base_url=endpoint.base_url, api_key=bobs["api_key"]).get_server_capabilities().result()


def test_a_key_revoked_under_load_ends_its_user_and_nobody_else(tiny_arguments: Arguments, tmp_path: Path) -> None:
    """In the middle of training and sampling; what was accepted is still done, and the other user notices nothing."""
    where = ["--data-dir", str(tmp_path / "data")]
    with served(tiny_arguments(), tmp_path / "log", OPENRL_API_KEY=ADMIN) as endpoint:
        made = {name: keys("create", "--owner", name, *where, "--json", OPENRL_API_KEY=ADMIN) for name in ("eve", "al")}
        steps: dict[str, list[float]] = {"eve": [], "al": []}
        errors: dict[str, Exception] = {}

        def work(name: str) -> None:
            service = client(endpoint, made[name]["api_key"])
            training = service.create_lora_training_client(MODEL, rank=4).result()
            sampling = training.save_weights_and_get_sampling_client().result()
            try:
                while len(steps[name]) < 400 and not done.is_set():
                    drawn = [sampling.sample(ints([1]), 1, types.SamplingParams(max_tokens=8)) for _ in range(4)]
                    steps[name].append(a_step(training))
                    for one in drawn:
                        one.result()
            except Exception as error:  # noqa: BLE001 - what the user sees is what is looked at
                errors[name] = error

        done = threading.Event()
        threads = [threading.Thread(target=work, args=(name,), daemon=True) for name in steps]
        for thread in threads:
            thread.start()
        deadline = time.monotonic() + 60
        while min(map(len, steps.values())) < 3 and not errors and time.monotonic() < deadline:
            time.sleep(0.05)
        keys("revoke", made["eve"]["id"], *where, OPENRL_API_KEY=ADMIN)
        threads[0].join(20)
        assert not threads[0].is_alive(), "eve's calls hang"
        assert "401" in str(errors["eve"]) or isinstance(errors["eve"], tinker.AuthenticationError), errors["eve"]
        before = len(steps["al"])
        while len(steps["al"]) < before + 3 and "al" not in errors and time.monotonic() < deadline + 30:
            time.sleep(0.05)
        done.set()
        threads[1].join(30)
        assert "al" not in errors, errors["al"]
        assert len(steps["al"]) >= before + 3


def test_keys_from_a_mounted_file_in_a_pod(tiny_arguments: Arguments, tmp_path: Path) -> None:
    """No command was ever run there; a key that leaves the file ends within seconds."""
    file = tmp_path / "keys.toml"
    alices, scrapers = "tml-" + "b" * 40, "tml-" + "c" * 40
    scraper = f'[[key]]\nowner = "prometheus"\nkey = "{scrapers}"\nscopes = ["read"]\n'
    file.write_text(f'{scraper}[[key]]\nowner = "alice"\nkey = "{alices}"\nruns = 1\n')
    with served(tiny_arguments("--host", "0.0.0.0"), tmp_path / "log", OPENRL_KEYS_FILE=str(file)) as endpoint:
        assert a_step(client(endpoint, alices).create_lora_training_client(MODEL, rank=4).result()) > 0
        metrics = f"{endpoint.base_url}/metrics"
        assert httpx.get(metrics, headers={"authorization": f"Bearer {scrapers}"}).status_code == 200
        assert httpx.get(metrics, headers={"x-api-key": alices}).status_code == 403
        file.write_text(scraper)
        deadline = time.monotonic() + 15
        sessions = f"{endpoint.base_url}/api/v1/sessions"
        while httpx.get(sessions, headers={"x-api-key": alices}).status_code != 401:
            assert time.monotonic() < deadline
            time.sleep(0.2)
        assert httpx.get(metrics, headers={"authorization": f"Bearer {scrapers}"}).status_code == 200


def test_a_server_without_keys_does_not_listen_beyond_this_machine(tiny_arguments: Arguments, tmp_path: Path) -> None:
    env = {name: value for name, value in os.environ.items() if name != "OPENRL_API_KEY"}
    command = [openrl_command(), "serve", "--port", str(free_port()), "--host", "0.0.0.0", *tiny_arguments()]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert "--allow-shared-key" in done.stderr
    with served(tiny_arguments("--host", "0.0.0.0", "--allow-shared-key"), tmp_path / "log") as endpoint:
        assert httpx.get(f"{endpoint.base_url}/api/v1/healthz").status_code == 200


def test_https(tiny_arguments: Arguments, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands of this machine trust the data folder's certificate, whatever its name; others need the authority."""
    authority = trustme.CA()
    issued = authority.issue_cert("cluster.example", "127.0.0.1")
    cert, key, ca = (tmp_path / name for name in ("cert.pem", "key.pem", "ca.pem"))
    issued.cert_chain_pems[0].write_to_path(cert)
    issued.private_key_pem.write_to_path(key)
    authority.cert_pem.write_to_path(ca)
    where = ["--data-dir", str(tmp_path / "data")]
    tls = ["--tls-cert", str(cert), "--tls-key", str(key)]
    with served(tiny_arguments(*tls), tmp_path / "log", "https", OPENRL_API_KEY=ADMIN) as endpoint:
        alices = keys("create", "--owner", "alice", *where, OPENRL_API_KEY=ADMIN)
        context = ssl.create_default_context(cafile=str(ca))
        with httpx.Client(verify=context, base_url=f"{endpoint.base_url}/api/v1/") as trusting:
            made = trusting.post("create_session", json={"sdk_version": "1"}, headers={"x-api-key": alices})
            assert made.status_code == 200
            export = f"sessions/{made.json()['session_id']}/trace_export"
            url = trusting.get(export, headers={"x-api-key": alices}).json()["url"]
            assert url.startswith("https://")
            assert trusting.get(url).status_code == 200
        for trust, code in ((["--url", endpoint.base_url, "--ca", str(ca)], 0), (["--url", endpoint.base_url], 1)):
            done = subprocess.run(
                [openrl_command(), "status", *where, *trust, "--json"],
                env=os.environ | {"OPENRL_API_KEY": ADMIN},
                capture_output=True,
                text=True,
                check=False,
            )
            assert done.returncode == code, done.stderr
        with pytest.raises(httpx.HTTPError):
            httpx.get(endpoint.base_url.replace("https", "http"), timeout=5)

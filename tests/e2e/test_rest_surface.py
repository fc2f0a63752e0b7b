"""The REST surface with the real SDK and the `tinker` command: sessions, runs, traces, audit, bills and keys."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import tinker
from tinker import types

from openrl_recipes.local_server import Endpoint
from support.proxied import local_server
from support.real_server import client, datum, ints

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.timeout(300),
    # Clients without a session stay open for the life of the process.
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore:.*search_sessions is experimental"),
]

MODEL = "local/tiny"
TEXT = [1, 5, 9, 11, 40, 41]
PRICES = {"OPENRL_PRICE_TRAIN": "2", "OPENRL_PRICE_PREFILL": "0.5", "OPENRL_PRICE_STORAGE": "10"}


@dataclass(frozen=True)
class Work:
    """What one client did: three trained datums, a step, a save, four samples of one prompt."""

    session: str
    run: str
    path: str
    sampler: str


@pytest.fixture(scope="module")
def server(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Endpoint]:
    folder = tmp_path_factory.mktemp("rest")
    arguments = ["--data-dir", str(folder / "data"), "--model", str(tiny_model), "--dtype", "float32"]
    with local_server(folder / "server.log", arguments, PRICES) as endpoint:
        yield endpoint


@pytest.fixture(scope="module")
def work(server: Endpoint) -> Work:
    service = tinker.ServiceClient(
        base_url=server.base_url,
        api_key=server.api_key,
        user_metadata={"step": 3, "who": "e2e"},  # type: ignore[arg-type]  # T24: not a string
        project_id="proj-a",
        display_name="First Try",
    )
    trainer = service.create_lora_training_client(MODEL, rank=4, user_metadata={"lr": 0.5}).result()  # type: ignore[arg-type]
    trainer.forward_backward([datum(TEXT)] * 2, "cross_entropy").result()
    trainer.forward([datum(TEXT)], "cross_entropy").result()
    trainer.optim_step(types.AdamParams(learning_rate=1e-3)).result()
    path = trainer.save_state("step-1").result().path
    sampler = trainer.save_weights_and_get_sampling_client().result()
    params = types.SamplingParams(max_tokens=3, stop=[], seed=1)
    sampler.sample(ints(TEXT), num_samples=4, sampling_params=params).result()
    session = service.holder.get_session_id()
    # The session is finished at once, as the tests below see. What then may hang, now and then, is the client's own
    # clean-up: on Python 3.11 `wait_for` can swallow the cancelling of its telemetry task, which goes on for ever.
    with contextlib.suppress(TimeoutError):
        service.close("success").result(timeout=30)
    return Work(session, f"{session}:train:0", path, f"{session}:sample:0")


@pytest.fixture(scope="module")
def rest(server: Endpoint) -> tinker.RestClient:
    return tinker.RestClient(base_url=server.base_url, api_key=server.api_key)


@pytest.fixture(scope="module")
def admin(server: Endpoint) -> tinker.AdminClient:
    return tinker.AdminClient(base_url=server.base_url, api_key=server.api_key)


@pytest.fixture
def cli(server: Endpoint, tmp_path: Path) -> Cli:
    return Cli(server, tmp_path)


class Cli:
    """The `tinker` command with a home of its own."""

    def __init__(self, server: Endpoint, home: Path, **environment: str) -> None:
        self.home = home
        self._environment = {**os.environ, **server.environment(), "HOME": str(home), **environment}

    def run(self, *arguments: str, text: str = "") -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-W", "ignore", "-m", "tinker.cli", *arguments]
        return subprocess.run(
            command, env=self._environment, cwd=self.home, input=text, capture_output=True, text=True, check=False
        )

    def json(self, *arguments: str) -> Any:
        done = self.run("-f", "json", *arguments)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)


def this_hour() -> tuple[str, str]:
    now = datetime.now(UTC).replace(minute=0, second=0, microsecond=0)
    return (now - timedelta(hours=1)).isoformat(), (now + timedelta(hours=1)).isoformat()


# ---- sessions and runs ----


def test_t24_sessions_and_runs_through_the_sdk(rest: tinker.RestClient, work: Work) -> None:
    """T24, E38-E40, E23: what went in as numbers comes back as strings, and nothing fails to parse."""
    assert work.session in rest.list_sessions(limit=5).result().sessions
    session = rest.get_session(work.session).result()
    assert session.user_metadata == {"step": "3", "who": "e2e"}
    assert session.display_name == "First Try"
    assert session.training_run_ids == [work.run]
    assert session.sampler_ids == [work.sampler]
    run = rest.get_training_run(work.run).result()
    assert (run.base_model, run.lora_rank, run.user_metadata) == (MODEL, 4, {"lr": "0.5"})
    assert run.last_checkpoint is not None
    assert run.last_checkpoint.tinker_path == work.path
    assert rest.get_training_run_by_tinker_path(work.path).result() == run
    sampler = rest.get_sampler(work.sampler).result()
    assert sampler.base_model == MODEL
    assert rest.list_training_runs(project_id="proj-a").result().cursor.total_count == 1
    assert rest.list_training_runs(project_id="nope").result().training_runs == []
    with pytest.raises(tinker.NotFoundError):
        rest.get_session("nope").result()


def test_t31_search_pages_and_projects_through_the_sdk(rest: tinker.RestClient, server: Endpoint, work: Work) -> None:
    """T31: the cursor of a page is accepted for the next; every session appears once."""
    for number in range(3):
        service = client(server)
        service.holder.get_session_id()
        service.close("errored", f"number {number}").result(timeout=30)
    request = types.SessionSearchRequest(limit=2)
    found: list[types.SessionSummary] = []
    while True:
        page = rest.search_sessions(request).result()
        found += page.sessions
        if page.next_cursor is None:
            break
        request = request.model_copy(update={"cursor": page.next_cursor})
    assert len({session.session_id for session in found}) == len(found) >= 4
    assert [s.created_at for s in found] == sorted((s.created_at for s in found), reverse=True)
    mine = rest.search_sessions(types.SessionSearchRequest(display_name="try FIRST")).result().sessions[0]
    assert (mine.session_id, mine.project_id, mine.checkpoints_count) == (work.session, "proj-a", 1)
    assert mine.status is not None
    assert mine.status.type == "client_finished"
    failed = types.ClientFinishedSessionStatusQuery(reasons=["errored"])
    assert len(rest.search_sessions(types.SessionSearchRequest(statuses=[failed])).result().sessions) == 3
    rest.assign_session_project(work.session, "proj-b").result()
    moved = rest.search_sessions(types.SessionSearchRequest(project_ids=["proj-b"])).result().sessions
    assert [session.session_id for session in moved] == [work.session]
    rest.assign_session_project(work.session, "proj-a").result()


def test_t25_the_cli_lists_and_shows_runs(cli: Cli, server: Endpoint, work: Work) -> None:
    """T25: pages as the CLI asks for them, over more runs than one of its pages holds."""
    service = client(server)
    created = [service.create_lora_training_client(MODEL, rank=1) for _ in range(102)]
    for future in created:
        future.result()
    service.close("success").result(timeout=30)
    runs = cli.json("run", "list", "--limit", "0")["runs"]
    assert len({run["training_run_id"] for run in runs}) == len(runs) >= 103
    assert runs[-1]["training_run_id"] == work.run, "newest first"
    table = cli.run("run", "list", "--limit", "3", "--columns", "id,model,lora,status,checkpoint")
    assert table.returncode == 0, table.stderr
    assert "more not shown" in table.stdout
    shown = cli.json("run", "info", work.run)
    assert shown["last_checkpoint"]["checkpoint_id"] == "weights/step-1"
    missing = cli.run("run", "info", "nope")
    assert missing.returncode != 0
    assert "not found" in missing.stderr


# ---- traces ----


def test_a_trace_is_exported_by_the_cli_and_its_times_are_in_order(cli: Cli, work: Work) -> None:
    """E43: fetched without a key; for each request accepted <= dispatched <= started <= done."""
    done = cli.run("session", "export-trace", work.session, "--output", "out.pftrace")
    assert done.returncode == 0, done.stderr
    events = json.loads((cli.home / "out.pftrace").read_text())["traceEvents"]
    requests = {e["args"]["request_id"]: e for e in events if e["ph"] == "b" and e["args"]}
    names = [event["name"] for event in requests.values()]
    assert sorted(names) == sorted(
        [
            "create_model",
            "forward_backward",
            "forward",
            "optim_step",
            "save_weights",
            "save_weights_for_sampler",
            "sample",
        ]
    )
    for event in requests.values():
        args = event["args"]
        times = [args["accepted_at"], args["dispatched_at"], args["started_at"], args["done_at"]]
        assert times == sorted(times)
        assert 0 < times[3] - times[0] < 120
    device = sorted((e["ts"], e["ts"] + e["dur"]) for e in events if e["ph"] == "X")
    assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(device)), "one run never overlaps itself"


def test_t46_the_url_of_a_trace_is_absolute_and_signed(rest: tinker.RestClient, work: Work) -> None:
    """T46."""
    url = rest.export_session_trace(work.session).result()
    with urllib.request.urlopen(url) as answer:
        assert int(answer.headers["content-length"]) == len(answer.read())
    with pytest.raises(urllib.error.HTTPError, match="403"):
        urllib.request.urlopen(re.sub("signature=.", "signature=_", url))
    with pytest.raises(tinker.NotFoundError):
        rest.export_session_trace("nope").result()


# ---- audit and bills ----


def test_the_audit_log_through_the_sdk(admin: tinker.AdminClient, work: Work) -> None:
    """E44."""
    log = admin.get_audit_log().result().entries
    mine = [entry for entry in log if entry.event_details.get("session_id") == work.session]
    events = [entry.event for entry in mine]
    assert events[:5] == ["session_create", "run_create", "checkpoint_create", "checkpoint_create", "session_finish"]
    assert mine[2].tinker_path == work.path
    checkpoints = admin.get_audit_log(event_type="checkpoints").result().entries
    assert {entry.event for entry in checkpoints} >= {"checkpoint_create"}
    assert admin.get_audit_log(day=datetime(2025, 1, 15).date()).result().entries == []


def test_the_bill_is_what_the_client_really_used(admin: tinker.AdminClient, work: Work) -> None:
    """E45: exact tokens of this session, at the prices of the settings."""
    bill = admin.get_billing_usage(*this_hour()).result()
    mine = [event for event in bill.data if event.session_id == work.session]
    tokens = {e.event_info.type: getattr(e.event_info, "token_count", None) for e in mine}
    trained = 3 * (len(TEXT) - 1)
    assert tokens == {
        "training": trained,
        "sampling_prefill": len(TEXT),  # once for four sequences
        "sampling_sample": 12,
        "checkpoint": None,
    }
    costs = {event.event_info.type: event.estimated_cost_usd for event in mine}
    assert costs["training"] == pytest.approx(2 * trained / 1e6)
    assert costs["sampling_prefill"] == pytest.approx(0.5 * len(TEXT) / 1e6)
    assert costs["sampling_sample"] == 0
    assert next(e.event_info.count for e in mine if e.event_info.type == "checkpoint") == 2
    assert {event.project_id for event in mine} == {"proj-a"}
    assert bill.sessions[work.session].user_metadata == {"step": "3", "who": "e2e"}
    storage = [event for event in bill.data if event.event_info.type == "storage"]
    assert sum(event.event_info.gigabyte_hours for event in storage) > 0


def test_storage_through_the_sdk_and_the_cli(admin: tinker.AdminClient, cli: Cli, work: Work) -> None:
    """E46."""
    now = admin.get_current_checkpoint_storage_usage(project_id="proj-a").result()
    assert now.effective_rate_usd_per_gigabyte_month == 10
    assert now.data[0].project_id == "proj-a"
    assert now.data[0].size_bytes > 1000
    assert now.data[0].estimated_monthly_cost_usd == pytest.approx(now.data[0].size_bytes / 1e9 * 10)
    shown = cli.json("billing", "checkpoint-storage", "--project-id", "proj-a")
    assert shown["data"][0]["size_bytes"] == now.data[0].size_bytes


def test_the_cli_shows_the_bill_in_all_its_forms(cli: Cli, work: Work) -> None:
    window = this_hour()
    shown = cli.json("billing", "usage", *window)
    assert work.session in shown["sessions"]
    table = cli.run("billing", "usage", *window)
    assert table.returncode == 0, table.stderr
    done = cli.run("billing", "usage", *window, "--csv", "usage.csv", "--sessions-csv", "sessions.csv")
    assert done.returncode == 0, done.stderr
    assert "sampling_prefill" in (cli.home / "usage.csv").read_text()
    assert work.session in (cli.home / "sessions.csv").read_text()


# ---- keys ----


def test_t44_t45_the_sdk_exchanges_its_key_once_and_again_when_refused(server: Endpoint) -> None:
    """T44: one exchange for many calls. T45: a token that the server refuses is replaced and the call repeated."""
    rest = tinker.RestClient(base_url=server.base_url, api_key=server.api_key)
    identity = rest.whoami().result()
    assert identity.user_urn == "tml:user:local"
    assert identity.org_urn == "tml:organization:local"
    provider = rest.holder._default_auth
    token = provider._token  # type: ignore[attr-defined]
    assert token.startswith("eyJ")
    rest.list_sessions().result()
    assert provider._token == token  # type: ignore[attr-defined]
    head, payload, _ = token.split(".")
    provider._token = f"{head}.{payload}.{'A' * 43}"  # type: ignore[attr-defined]
    assert rest.list_sessions().result().sessions is not None
    assert provider._token not in (token[:-1], f"{head}.{payload}.{'A' * 43}")  # type: ignore[attr-defined]


def test_a_wrong_key_is_refused_at_once_also_with_tokens(server: Endpoint) -> None:
    with pytest.raises(tinker.AuthenticationError):
        tinker.RestClient(base_url=server.base_url, api_key="tml-wrong-key").list_sessions().result(30)


def test_the_cli_logs_in_tells_who_it_is_and_logs_out(server: Endpoint, tmp_path: Path) -> None:
    """E03-E05, 2.10: `auth login`, `status`, `whoami`, `logout`, and `model list` with and without a match."""
    cli = Cli(server, tmp_path, TINKER_API_KEY="")
    refused = cli.run("auth", "login", text="tml-wrong\n")
    assert refused.returncode != 0
    assert "not this server's" in refused.stderr
    done = cli.run("auth", "login", text=f"{server.api_key}\n")
    assert done.returncode == 0, done.stderr
    assert "Logged in as local@localhost" in done.stdout
    status = cli.run("auth", "status")
    assert "Tinker accessible: yes" in status.stdout, status.stderr
    assert cli.json("auth", "whoami")["email"] == "local@localhost"
    models = cli.json("model", "list")["models"]
    assert [model["model_name"] for model in models] == [MODEL]
    none = cli.run("model", "list", "gpt-9")
    assert none.returncode != 0
    assert "tml:organization:local" in none.stderr
    assert cli.run("auth", "logout").returncode == 0
    assert cli.run("auth", "status").returncode != 0

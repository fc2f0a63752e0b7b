"""`/metrics`: the figures agree with what was done, survive a restart where they must, and cost next to nothing."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from pathlib import Path

from prometheus_client.openmetrics import parser as openmetrics
from prometheus_client.parser import text_string_to_metric_families

from openrl.server.measure import HttpMetrics, Measure, route_class
from openrl.server.routes import training
from openrl.workers.protocol import Process
from support.daemons import BASE, Harness
from support.scalar_worker import SECONDS
from support.wired import Wired, over_http, sample_body, train_body


class Scrape:
    """The samples of one answer, by name and labels."""

    def __init__(self, text: str) -> None:
        families = list(text_string_to_metric_families(text))
        self.kinds = {family.name: family.type for family in families}
        self._values = {
            (sample.name, frozenset(sample.labels.items())): sample.value
            for family in families
            for sample in family.samples
        }

    def __call__(self, name: str, **labels: str) -> float:
        return self._values[name, frozenset(labels.items())]

    def labels(self, name: str) -> list[Mapping[str, str]]:
        return [dict(labels) for given, labels in self._values if given == name]


async def scrape(w: Wired) -> Scrape:
    answer = await w._http.acall("GET", "//metrics")
    assert answer.status_code == 200, answer.text
    return Scrape(answer.text)


@over_http()
async def test_figures_agree_with_what_was_done(w: Wired) -> None:
    run = await w.open_run()
    await w.result(await w.train(run, 1, 3, 4))
    await w.result(await w.step(run, 2))
    await w.result(await w.promise("save_weights", {"model_id": run, "seq_id": 3, "path": "kept"}))
    sampler = await w.open_sampler()
    await w.result(await w.promise("asample", sample_body(sampler, 1)))
    seen = await scrape(w)
    assert seen("openrl_tokens_total", model=BASE, kind="train") == 2
    assert seen("openrl_tokens_total", model=BASE, kind="prefill") == 2
    assert seen("openrl_tokens_total", model=BASE, kind="sample") == 1
    assert seen("openrl_device_seconds_total", model=BASE, kind="train") == 2 * SECONDS
    assert seen("openrl_device_seconds_total", model=BASE, kind="sample") == SECONDS
    assert seen("openrl_checkpoints_written_total", model=BASE) == 1
    assert seen("openrl_checkpoints", model=BASE) == 1
    assert seen("openrl_checkpoint_bytes", model=BASE) > 0
    assert seen("openrl_runs", state="live") == seen("openrl_runs_on_device", model=BASE) == 1
    assert seen("openrl_samplers") == 1
    assert seen("openrl_ready") == seen("openrl_model_state", model=BASE, state="ready") == 1
    assert seen("openrl_worker_restarts_total", model=BASE) == 0
    assert seen("openrl_store_commit_seconds_count") > 5
    assert 0 < seen("openrl_disk_free_bytes") <= seen("openrl_disk_size_bytes")
    assert seen("openrl_resident_bytes", process="daemon", model="") > 1 << 20


@over_http()
async def test_queues_are_seen_while_the_device_is_busy(w: Wired) -> None:
    run = await w.open_run()
    w.h.worker.hold = asyncio.Event()
    first = await w.train(run, 1, 3)
    second = await w.step(run, 2)
    sampler = await w.open_sampler()
    sample = await w.promise("asample", sample_body(sampler, 1))
    seen = await scrape(w)
    assert (seen("openrl_queue_depth", kind="train"), seen("openrl_queue_depth", kind="sample")) == (2, 1)
    w.h.worker.hold.set()
    for request in (first, second, sample):
        await w.result(request)
    seen = await scrape(w)
    assert seen("openrl_queue_depth", kind="train") == seen("openrl_queue_depth", kind="sample") == 0


@over_http()
async def test_requests_count_by_class_and_status_whatever_the_path(w: Wired) -> None:
    run = await w.open_run()
    await w.result(await w.train(run, 1, 3))
    await w.post("forward_backward", train_body("nobody:train:0", 1, 3))
    for path in ("no/such/path", "another"):
        await w.get(path)
    seen = await scrape(w)
    assert seen("openrl_http_requests_total", route="training", status="200") == 1
    assert seen("openrl_http_requests_total", route="training", status="404") == 1
    assert seen("openrl_http_requests_total", route="refused", status="404") == 2
    assert seen("openrl_http_request_seconds_count", route="training") == 2
    assert seen("openrl_http_request_seconds_bucket", route="training", le="60.0") == 2
    await w._http.acall("GET", "//metrics", headers={"x-api-key": "tml-wrong-key"})
    assert (await scrape(w))("openrl_http_requests_total", route="refused", status="401") == 1


@over_http()
async def test_a_key_is_needed_and_a_bearer_is_one(w: Wired) -> None:
    """Prometheus sends what it is given as `Authorization: Bearer`."""
    key = w._http.headers.pop("x-api-key")
    assert (await w._http.acall("GET", "//metrics")).status_code == 401
    bearer = await w._http.acall("GET", "//metrics", headers={"authorization": f"Bearer {key}"})
    assert bearer.status_code == 200


@over_http()
async def test_both_formats_are_spoken(w: Wired) -> None:
    plain = await w._http.acall("GET", "//metrics")
    assert plain.headers["content-type"].startswith("text/plain; version=")
    accept = {"accept": "application/openmetrics-text; version=1.0.0"}
    answer = await w._http.acall("GET", "//metrics", headers=accept)
    assert answer.headers["content-type"].startswith("application/openmetrics-text")
    assert answer.text.endswith("# EOF\n")
    families = {family.name: family.type for family in openmetrics.text_string_to_metric_families(answer.text)}
    assert families["openrl_tokens"] == "counter"
    assert families["openrl_http_request_seconds"] == "histogram"


def test_sums_outlive_a_restart_and_old_hours_are_read_once(tmp_path: Path) -> None:
    async def main() -> None:
        h = await Harness(tmp_path).start()
        w = Wired(h)
        run = await w.open_run()
        await w.result(await w.train(run, 1, 3, 4, 5))
        await h.daemon._db.run(lambda db: db.execute("UPDATE usage SET hour = hour - 36000"))
        await w.result(await w.train(run, 2, 6))
        for _ in range(2):
            assert (await scrape(w))("openrl_tokens_total", model=BASE, kind="train") == 4
        await h.daemon._db.run(lambda db: db.execute("DELETE FROM usage WHERE hour < ?", (time.time() - 18000,)))
        assert (await scrape(w))("openrl_tokens_total", model=BASE, kind="train") == 4, "read from the store again"
        await h.daemon.stop()
        await h.start()
        assert (await scrape(Wired(h)))("openrl_tokens_total", model=BASE, kind="train") == 1, (
            "what the store still has"
        )
        await h.daemon.stop()

    asyncio.run(main())


def test_a_dead_worker_counts_and_only_real_processes_have_memory(tmp_path: Path) -> None:
    async def main() -> None:
        h = await Harness(tmp_path).start()
        assert not isinstance(h.worker, Process)
        h.worker.kill()
        while len(h.workers) < 2:
            await asyncio.sleep(0.01)
        seen = await scrape(Wired(h))
        assert seen("openrl_worker_restarts_total", model=BASE) == 1
        assert seen.labels("openrl_resident_bytes") == [{"process": "daemon", "model": ""}]
        await h.daemon.stop()

    asyncio.run(main())


def test_a_route_is_known_by_its_module_and_nothing_else() -> None:
    assert route_class(training.forward) == "training"
    assert route_class(None) == route_class(asyncio.run) == "refused"


def test_measuring_costs_a_request_under_50_microseconds() -> None:
    """The least of several rounds: what the code needs, not what the machine was busy with."""

    async def app(scope: object, receive: object, send: object) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})  # type: ignore[operator]

    async def nothing(message: object = None) -> None:
        return None

    async def round_of(target: object, n: int = 2000) -> float:
        scope = {"type": "http", "endpoint": training.forward}
        start = time.process_time()
        for _ in range(n):
            await target(scope, nothing, nothing)  # type: ignore[operator]
        return (time.process_time() - start) / n

    async def main() -> float:
        measured = Measure(app, HttpMetrics())  # type: ignore[arg-type]
        return min([await round_of(measured) - await round_of(app) for _ in range(5)])

    assert asyncio.run(main()) < 50e-6

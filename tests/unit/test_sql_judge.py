"""Scoring in worker processes: the same scores as in this process, in order, whatever the answers do to a worker."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from openrl_recipes.text_to_sql.generator import make_items
from openrl_recipes.text_to_sql.item import Item
from openrl_recipes.text_to_sql.judge import Judge, JudgeError, measure
from openrl_recipes.text_to_sql.sandbox import Database
from openrl_recipes.text_to_sql.scoring import Reference
from openrl_recipes.text_to_sql.worker import pack, unpack


@pytest.fixture(scope="module")
def judge() -> Iterator[Judge]:
    with Judge() as judge:
        yield judge


@pytest.fixture(scope="module")
def items() -> list[Item]:
    return make_items("train", 24, seed=0)


def test_scores_come_in_order_and_equal_those_of_this_process(judge: Judge, items: list[Item]) -> None:
    answers = ["", "SELECT FROM", "SELECT 1", "SELECT id FROM nowhere", "SELECT \ud800\0", "DROP TABLE x"]
    pairs = [(item, answer) for item in items for answer in (item.gold, *answers, f"SELECT * FROM {item.domain}")]
    scores = judge.score(pairs)
    assert [score.match for score in scores] == [answer == item.gold for item, answer in pairs]
    for (item, answer), score in zip(pairs, scores, strict=True):
        with Reference(item.gold, item.databases) as reference:
            assert score == reference.score(answer)


def test_submitting_does_not_wait(judge: Judge, items: list[Item]) -> None:
    slow = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT COUNT(*) FROM n"
    sent = time.monotonic()
    future = judge.submit([(items[0], slow)] * 6)
    waited = time.monotonic() - sent
    assert not future.done()
    assert waited < 0.1
    assert [score.error for score in future.result(timeout=60)] == ["interrupted"] * 6


def test_no_answers_give_no_scores(judge: Judge) -> None:
    assert judge.score([]) == []


def test_many_threads_may_ask_at_once(judge: Judge, items: list[Item]) -> None:
    results: dict[int, list[bool]] = {}

    def ask(i: int) -> None:
        scores = judge.score([(item, item.gold if (k + i) % 2 else "SELECT 0") for k, item in enumerate(items)])
        results[i] = [score.match for score in scores]

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {i: [bool((k + i) % 2) for k in range(len(items))] for i in range(4)}


def test_a_reference_that_fails_gives_scores_not_exceptions(judge: Judge, items: list[Item]) -> None:
    broken = Item("x", 0, "", "", "SELECT x FROM nowhere", items[0].databases)
    score, other = judge.score([(broken, "SELECT 1"), (items[0], items[0].gold)])
    assert not score.match
    assert "the reference fails: no such table" in score.error
    assert other.match


@pytest.mark.skipif(sys.platform == "win32", reason="kills by signal")
def test_a_worker_that_was_killed_is_replaced(items: list[Item]) -> None:
    with Judge(1) as judge:
        assert judge.score([(items[0], items[0].gold)])[0].match
        (before,) = judge.process_ids
        os.kill(before, signal.SIGKILL)
        scores = [judge.score([(items[0], items[0].gold)])[0] for _ in range(3)]
        assert [score.match for score in scores[1:]] == [True, True]
        assert judge.process_ids != [before]


@pytest.mark.skipif(sys.platform == "win32", reason="needs a FIFO")
def test_a_worker_that_hangs_is_replaced_and_only_its_answer_is_wrong(items: list[Item], tmp_path: Path) -> None:
    """Opening a FIFO that nobody writes to waits for ever: no limit of SQLite or of CPU time ends that."""
    os.mkfifo(tmp_path / "pipe.sqlite")
    stuck = Item("x", 0, "", "", "SELECT 1", (Database(file=str(tmp_path / "pipe.sqlite")),))
    pairs = [(items[0], items[0].gold), (stuck, "SELECT 1"), (items[1], items[1].gold), (items[2], "SELECT 0")]
    with Judge(1, hang_seconds=1.0) as judge:
        judge.score(pairs[:1])
        before = judge.process_ids
        scores = judge.score(pairs)
        assert [score.match for score in scores] == [True, False, True, False]
        assert "died or hung" in scores[1].error
        assert judge.process_ids != before


FAKE_WORKER = """
import json, os, sys, time
print("ready", flush=True)
for item in sys.stdin:
    for answer in json.loads(sys.stdin.readline()):
        if answer == "die":
            os._exit(1)
        if answer == "hang":
            time.sleep(600)
        print("hello" if answer == "lie" else json.dumps([True, True, True, 1.0, 1.0, ""]), flush=True)
"""


@pytest.mark.parametrize("bad", ["die", "hang", "lie"])
def test_the_rest_of_a_batch_goes_on_in_a_new_worker(items: list[Item], bad: str) -> None:
    with Judge(1, hang_seconds=1.0, command=(sys.executable, "-c", FAKE_WORKER)) as judge:
        scores = judge.score([(items[0], answer) for answer in ("good", bad, "good", bad, "good")])
        assert [score.match for score in scores] == [True, False, True, False, True]


GREEDY_WORKER = """
import json, sys
from openrl_recipes.text_to_sql.worker import limit_cpu, limit_process
limit_process()
print("ready", flush=True)
for item in sys.stdin:
    for answer in json.loads(sys.stdin.readline()):
        limit_cpu()
        while answer == "spin":
            pass
        kept = bytearray(2**30) if answer == "eat" else b""
        if answer == "write":
            with open("full.txt", "w") as file:
                file.write("x" * 100)
        print(json.dumps([True, True, True, 1.0, 1.0, ""]), flush=True)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="macOS does not enforce a limit of the address space")
def test_the_operating_system_ends_a_worker_that_spins_or_eats_memory_or_writes_a_file(
    items: list[Item], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with Judge(1, hang_seconds=120.0, command=(sys.executable, "-c", GREEDY_WORKER)) as judge:
        scores = judge.score([(items[0], answer) for answer in ("good", "spin", "eat", "good", "write", "good")])
        assert [score.match for score in scores] == [True, False, False, True, False, True]
    assert (tmp_path / "full.txt").stat().st_size == 0


def test_a_judge_that_nobody_started_says_so(items: list[Item]) -> None:
    with pytest.raises(JudgeError, match="with block"):
        Judge(1).submit([(items[0], "SELECT 1")])


def test_a_worker_that_cannot_start_is_an_error(items: list[Item]) -> None:
    with Judge(1, command=(sys.executable, "-c", "raise SystemExit(1)")) as judge, pytest.raises(JudgeError):
        judge.score([(items[0], "SELECT 1")])


@pytest.mark.skipif(sys.platform == "win32", reason="limits of POSIX")
def test_the_process_has_limits_of_its_own(items: list[Item]) -> None:
    with Judge(1) as judge:
        judge.score([(items[0], items[0].gold)])
        limits = Path(f"/proc/{judge.process_ids[0]}/limits")
        if not limits.exists():
            pytest.skip("no /proc on this platform")
        soft = {line[:25].strip(): line[25:].split()[0] for line in limits.read_text().splitlines()[1:]}
    assert soft["Max address space"] == str(512 * 2**20)
    assert soft["Max file size"] == "0"
    assert int(soft["Max cpu time"]) < 60


def test_the_processes_end_with_the_judge(items: list[Item]) -> None:
    with Judge(2) as judge:
        judge.score([(item, item.gold) for item in items])
        assert len(judge.process_ids) == 2
    assert judge.process_ids == []


def test_items_survive_the_way_to_the_worker(items: list[Item]) -> None:
    for item in items:
        assert unpack(pack(item.gold, item.databases)) == (item.gold, list(item.databases))
    other = [Database(script="CREATE TABLE t(x); INSERT INTO t VALUES ('é');", thin=2), Database(file="/x/y.sqlite")]
    assert unpack(pack("SELECT 1", other)) == ("SELECT 1", other)


def test_scoring_is_fast() -> None:
    """The aim is 2 ms and 1,000 answers a second on two quiet cores; a busy machine gets ten times that."""
    speed = measure(items=40)
    assert speed.p50 < 20
    assert speed.per_second > 100
    assert "answers/s" in str(speed)

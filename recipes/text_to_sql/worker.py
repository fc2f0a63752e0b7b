"""The worker process of `judge.py`: reads items and answers from stdin, writes a score for each answer to stdout.

It is started as `python -m openrl_recipes.text_to_sql.worker` and imports nothing but SQLite's module and this
recipe's scoring, so that it starts in a moment and has nothing in memory that is worth stealing. Both directions
speak JSON, a line each: what comes back from a process that ran hostile text must not be a pickle.

A task is two lines, the item (reference and databases) and the list of answers; a reply is one line an answer.
"""

from __future__ import annotations

import dataclasses
import json
import math
import sqlite3
import sys
import time
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

from openrl_recipes.text_to_sql.sandbox import Database, QueryError, Table
from openrl_recipes.text_to_sql.scoring import Reference, Score

MEMORY_BYTES = 512 * 2**20  # address space of the process
HEAP_BYTES = 128 * 2**20  # what SQLite may allocate in all
CPU_SECONDS = 2  # for one task, as the operating system counts
OPEN_ITEMS = 32  # items whose databases and reference results are kept
READY = "ready"


def main() -> None:
    """Serve tasks until stdin closes."""
    limit_process()
    kept: OrderedDict[str, Reference] = OrderedDict()
    write(READY)
    for item in sys.stdin:
        answers: list[str] = json.loads(sys.stdin.readline())
        limit_cpu()
        for answer in answers:
            write(json.dumps(dataclasses.astuple(judge(kept, item, answer))))


def judge(kept: OrderedDict[str, Reference], item: str, answer: str) -> Score:
    """Score one answer; an item met before has its databases open and its reference run."""
    try:
        if item not in kept:
            kept[item] = Reference(*unpack(item))
            if len(kept) > OPEN_ITEMS:
                kept.popitem(last=False)[1].close()
    except QueryError as error:
        return Score(error=f"the reference fails: {error}")
    kept.move_to_end(item)
    return kept[item].score(answer)


def write(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


# ------------------------------------------------------------------------------------------------------------------
# Limits of the process, where the platform has them


def limit_process() -> None:
    """No files, no core dumps, bounded memory. SQLite's heap limit answers with an error before the process dies."""
    sqlite3.connect(":memory:").execute(f"PRAGMA hard_heap_limit = {HEAP_BYTES}").connection.close()
    if sys.platform != "win32":
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def limit_cpu() -> None:
    """Let the process be killed if it works more than `CPU_SECONDS` from now on."""
    if sys.platform != "win32":
        import resource

        _, hard = resource.getrlimit(resource.RLIMIT_CPU)
        resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(time.process_time()) + CPU_SECONDS, hard))


# ------------------------------------------------------------------------------------------------------------------
# Items as lines


def pack(gold: str, databases: Sequence[Database]) -> str:
    """One line of JSON with the reference and its databases."""
    packed = [
        [[[table.name, table.create, table.rows] for table in d.tables], d.script, d.file, d.thin] for d in databases
    ]
    return json.dumps([gold, packed])


def unpack(line: str) -> tuple[str, list[Database]]:
    """What `pack` packed."""
    gold, packed = json.loads(line)
    return gold, [_database(*fields) for fields in packed]


def _database(tables: Sequence[Any], script: str, file: str, thin: int) -> Database:
    made = tuple(Table(name, create, tuple(map(tuple, rows))) for name, create, rows in tables)
    return Database(made, script, file, thin)


if __name__ == "__main__":
    main()

"""Where the questions come from: the generator, a data set of the Hugging Face hub, or a folder.

    generated                      questions from a seed, no data needed (the default)
    hub:DATASET[:CONFIG]           a set that the `datasets` package can load (pip install datasets)
    folder:PATH                    Spider's layout (train*.json, dev.json, database/<db_id>/<db_id>.sqlite), WikiSQL's
                                   (train.jsonl, train.tables.jsonl), or JSONL with question, sql and context

What columns a row may have: `records.py`.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from openrl_recipes.shared.options import OptionError
from openrl_recipes.text_to_sql import generator
from openrl_recipes.text_to_sql.item import Item
from openrl_recipes.text_to_sql.records import LeftOut, Record, group_of, make_item


class Source(Protocol):
    """Questions for training, for choosing a checkpoint, and for the final figures, about disjoint tables."""

    def train(self, seed: int) -> Iterator[Item]:
        """Questions without end, always the same ones for the same seed."""
        ...

    def validation(self, count: int) -> list[Item]:
        """At most `count` questions to choose a checkpoint by."""
        ...

    def held_out(self, count: int) -> list[Item]:
        """At most `count` questions for the figures that one reports."""
        ...

    @property
    def left_out(self) -> Mapping[str, int]:
        """How many rows of the data set were met so far that cannot be used, by reason."""
        ...


class SourceError(OptionError):
    """A source that cannot be used. The message says what to give instead."""


def open_source(text: str, seed: int) -> Source:
    """The source that `text` names; `seed` draws its validation and held-out questions. Raises `SourceError`."""
    kind, _, name = text.partition(":")
    if text == "generated":
        return Generated(seed)
    if kind == "hub" and name:
        dataset, _, config = name.partition(":")
        return RecordSource(text, *_hub(dataset, config or None), seed=seed)
    if kind == "folder" and name:
        return RecordSource(text, *_folder(Path(name).expanduser()), seed=seed)
    raise SourceError(f"source: {text!r} is none of: generated, hub:DATASET[:CONFIG], folder:PATH")


@dataclass(frozen=True, slots=True)
class Generated:
    """The generator as a source."""

    seed: int

    def train(self, seed: int) -> Iterator[Item]:
        return generator.items("train", seed)

    def validation(self, count: int) -> list[Item]:
        return generator.make_items("validation", count, self.seed)

    def held_out(self, count: int) -> list[Item]:
        return generator.make_items("held-out", count, self.seed)

    @property
    def left_out(self) -> Mapping[str, int]:
        return {}


class RecordSource:
    """Rows of a data set. They become items, and the useless ones are left out, when they are first asked for.

    `databases` is the folder of SQLite files, if the rows name theirs.
    """

    def __init__(
        self, name: str, train: Sequence[Record], dev: Sequence[Record], databases: Path | None, *, seed: int
    ) -> None:
        self._name, self._databases, self._seed = name, databases, seed
        self._train, self._validation, self._held_out = split(train, dev)
        self._made: dict[int, Item | None] = {}
        self._left_out: Counter[str] = Counter()

    def train(self, seed: int) -> Iterator[Item]:
        for epoch in range(10**9):
            order = list(self._train)
            random.Random(f"{seed}/{epoch}").shuffle(order)
            yield from self._usable(order, "train")

    def validation(self, count: int) -> list[Item]:
        return self._first(self._validation, count, "validation")

    def held_out(self, count: int) -> list[Item]:
        return self._first(self._held_out, count, "held-out")

    @property
    def left_out(self) -> Mapping[str, int]:
        return dict(self._left_out)

    def _first(self, records: Sequence[Record], count: int, part: str) -> list[Item]:
        order = list(records)
        random.Random(f"{self._seed}/{part}").shuffle(order)
        return [item for item, _ in zip(self._usable(order, part), range(count), strict=False)]

    def _usable(self, records: Sequence[Record], part: str) -> Iterator[Item]:
        """Items of the rows that can be used. Raises `SourceError` if none can."""
        empty = True
        for record in records:
            item = self._item(record)
            if item is not None:
                empty = False
                yield item
        if empty:
            reasons = ", ".join(f"{reason} ({count})" for reason, count in self._left_out.most_common())
            raise SourceError(f"source {self._name}: no {part} row can be used: {reasons or 'there are no rows'}")

    def _item(self, record: Record) -> Item | None:
        key = id(record)  # the rows live as long as this object
        if key not in self._made:
            try:
                self._made[key] = make_item(record, self._databases)
            except LeftOut as reason:
                self._made[key] = None
                self._left_out[str(reason)] += 1
        return self._made[key]


def split(train: Sequence[Record], dev: Sequence[Record]) -> tuple[list[Record], list[Record], list[Record]]:
    """Rows for training, validation and held-out figures, no database or context in two of them.

    The data set's own dev rows are the held-out ones; without any, a tenth of the groups is. Another tenth is for
    validation. Where all rows are about fewer groups than parts, the questions are divided instead. The same rows
    are always divided in the same way, whatever the seed of a run.
    """
    held_groups = {group_of(record) for record in dev}
    rows = [record for record in train if group_of(record) not in held_groups] or list(train)
    parts = 2 if dev else 3
    by_group = len({group_of(record) for record in rows}) >= parts
    keys = [group_of(record) if by_group else str(i) for i, record in enumerate(rows)]
    order = sorted(set(keys))
    random.Random("text-to-sql/split").shuffle(order)
    share = max(1, len(order) // 10)
    validation = set(order[:share])
    held_out = set() if dev else set(order[share : 2 * share])
    pairs = list(zip(keys, rows, strict=True))
    return (
        [row for key, row in pairs if key not in validation and key not in held_out],
        [row for key, row in pairs if key in validation],
        list(dev) or [row for key, row in pairs if key in held_out],
    )


# ------------------------------------------------------------------------------------------------------------------
# Reading


def _hub(dataset: str, config: str | None) -> tuple[list[Record], list[Record], None]:
    """Training and held-out rows of a data set of the hub, or of a local folder that `datasets` can read."""
    try:
        from datasets import load_dataset
    except ImportError:
        raise SourceError("source hub:... needs the package datasets: pip install datasets") from None
    try:
        splits: Any = load_dataset(dataset, config)
    except (OSError, ValueError, RuntimeError) as error:
        raise SourceError(f"source hub:{dataset}: {error}") from error
    train = "train" if "train" in splits else next(iter(splits))
    held = next((name for name in ("validation", "dev", "test") if name in splits and name != train), None)
    return splits[train].to_list(), splits[held].to_list() if held else [], None


def _folder(folder: Path) -> tuple[list[Record], list[Record], Path]:
    """Training and held-out rows of the JSON and JSONL files in a folder, and where its databases are."""
    if not folder.is_dir():
        raise SourceError(f"source folder:{folder}: there is no such folder")
    files = [f for f in sorted(folder.iterdir()) if f.suffix in (".json", ".jsonl") and "tables" not in f.stem]
    held = [f for f in files if f.stem.startswith(("dev", "valid", "test"))]
    train = [f for f in files if f not in held]
    if not train:
        raise SourceError(f"source folder:{folder}: there is no train*.json or *.jsonl in it")
    held = [f for f in held if f.stem.startswith(held[0].stem[:3])]  # dev, or else test, not both
    return _rows(train), _rows(held), folder / "database"


def _rows(files: Sequence[Path]) -> list[Record]:
    return [row for file in files for row in _with_tables(file, _read(file))]


def _read(file: Path) -> list[dict[str, Any]]:
    """The objects of a JSON array, or of a file with one a line."""
    try:
        text = file.read_text(encoding="utf-8")
        rows = json.loads(text) if file.suffix == ".json" else [json.loads(line) for line in text.splitlines() if line]
    except ValueError as error:
        raise SourceError(f"source file {file}: not JSON: {error}") from error
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise SourceError(f"source file {file}: not a list of objects")
    return rows


def _with_tables(file: Path, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """WikiSQL keeps the tables of train.jsonl in train.tables.jsonl and names them by `table_id`."""
    beside = file.with_name(f"{file.stem}.tables.jsonl")
    if not beside.is_file():
        return rows
    tables = {table["id"]: table for table in _read(beside)}
    return [row | {"table": tables[row["table_id"]]} for row in rows if row.get("table_id") in tables]

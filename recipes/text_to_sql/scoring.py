"""Is a query right? Run it beside the reference on several databases and compare what comes back.

One small table lets wrong queries through by luck, so an answer must agree on all of an item's databases: three,
drawn independently, where they are generated. `Reference` scores answers in this process; `judge.py` does it in
worker processes.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType

from openrl_recipes.text_to_sql.sandbox import Database, QueryError, Row, Sandbox, is_query, normal, same_result


@dataclass(frozen=True, slots=True)
class Score:
    """What one answer is worth. Only `match` says that it is right; the rest tells how near it came.

    `columns` is how well the number of columns agrees (smaller over larger) and `values` the overlap (F1) of the
    cells, both 0..1, means over the databases, and 0 for an answer that does not run.
    """

    match: bool = False
    parses: bool = False  # SQLite's grammar accepts it as a query, whether or not its names exist
    runs: bool = False  # without error, on every database
    columns: float = 0.0
    values: float = 0.0
    error: str = ""


class Reference:
    """A reference query, run once on its databases, which stay open for the answers to be compared with it.

    Raises `QueryError` where a database or the reference itself fails.
    """

    def __init__(self, gold: str, databases: Sequence[Database]) -> None:
        self._sandboxes: list[Sandbox] = []
        self.ordered = orders(gold)
        try:
            for database in databases:
                self._sandboxes.append(Sandbox(database))
            self.results = self.run(gold)
        except QueryError:
            self.close()
            raise

    def __enter__(self) -> Reference:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        for sandbox in self._sandboxes:
            sandbox.close()

    def run(self, sql: str) -> list[list[Row]]:
        """The results of a query, one a database. Raises `QueryError`."""
        return [sandbox.run(sql) for sandbox in self._sandboxes]

    def solved_by(self, answer: str) -> bool:
        """Whether `answer` gives the reference's result everywhere; stops at the first database where it does not."""
        try:
            return bool(self._sandboxes) and all(
                same_result(wanted, sandbox.run(answer), ordered=self.ordered)
                for wanted, sandbox in zip(self.results, self._sandboxes, strict=True)
            )
        except QueryError:
            return False

    def score(self, answer: str) -> Score:
        """Everything about `answer`; an error of any kind gives a score, never an exception."""
        try:
            results = self.run(answer)
        except QueryError as error:
            return Score(parses=parses(answer, str(error)), error=str(error))
        pairs = list(zip(self.results, results, strict=True))
        return Score(
            match=bool(pairs) and all(same_result(wanted, got, ordered=self.ordered) for wanted, got in pairs),
            parses=True,
            runs=True,
            columns=_mean([column_agreement(wanted, got) for wanted, got in pairs]),
            values=_mean([value_overlap(wanted, got) for wanted, got in pairs]),
        )


def column_agreement(wanted: Sequence[Row], got: Sequence[Row]) -> float:
    """The smaller number of columns over the larger; 0 if either result is empty."""
    if not wanted or not got:
        return 0.0
    a, b = len(wanted[0]), len(got[0])
    return min(a, b) / max(a, b)


def value_overlap(wanted: Sequence[Row], got: Sequence[Row]) -> float:
    """F1 of the two multisets of cells, wherever in the result they stand."""
    left = Counter(value for row in wanted for value in normal(row))
    right = Counter(value for row in got for value in normal(row))
    total = left.total() + right.total()
    return 2 * (left & right).total() / total if total else 0.0


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


# ------------------------------------------------------------------------------------------------------------------
# The text of a query

_TOKEN = re.compile(
    r"""(?P<skip> \s+ | --[^\n]* | /\*.*?(?:\*/|\Z) )
      | (?P<quoted> '(?:[^']|'')*' | "(?:[^"]|"")*" | `[^`]*` | \[[^\]]*\] )
      | (?P<word> \w+ )
      | (?P<sign> . )""",
    re.VERBOSE | re.DOTALL,
)


def tokens(sql: str) -> list[str]:
    """The words, quoted texts and signs of a query, without space and comments."""
    return [match.group() for match in _TOKEN.finditer(sql) if match.lastgroup != "skip"]


def orders(sql: str) -> bool:
    """Whether the query orders its result: an ORDER BY outside of all parentheses. One in a subquery does not."""
    depth, before = 0, ""
    for token in tokens(sql):
        depth += (token == "(") - (token == ")")
        if depth == 0 and token.upper() == "BY" and before == "ORDER":
            return True
        before = token.upper()
    return False


def one_line(sql: str) -> str:
    """The query on one line, without comments and without a closing semicolon, quoted texts left as they are."""
    pieces: list[str] = []
    for match in _TOKEN.finditer(sql):
        pieces.append(" " if match.lastgroup == "skip" else match.group())
    outside = "".join(pieces).strip().removesuffix(";").rstrip()
    kept = [m.group() if m.lastgroup == "quoted" else re.sub(r"\s+", " ", m.group()) for m in _TOKEN.finditer(outside)]
    return "".join(kept)


# SQLite reads the whole text before it looks up names, so any other message means that the grammar was content.
_SYNTAX = re.compile(
    r"syntax error|incomplete input|unrecognized token|one statement|no query|null character|surrogate|"
    r"too large|too big|stack overflow|too long|too many"
)


def parses(answer: str, error: str) -> bool:
    """Whether an answer that failed with `error` was at least a query in SQLite's grammar."""
    return is_query(answer) and not _SYNTAX.search(error)


def answer_query(completion: str) -> str:
    """The query in a completion of a prompt that ends in `SELECT`: its first line, put behind that word.

    A completion without a word in it has no query, so it gives an empty string rather than a bare `SELECT`.
    """
    line = completion.split("\n", 1)[0].strip()
    return f"SELECT {line}" if line else ""

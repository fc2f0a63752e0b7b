"""A question with all that is needed to ask it, to show its answer, and to judge other answers."""

from __future__ import annotations

from dataclasses import dataclass

from openrl_recipes.text_to_sql.sandbox import Database, QueryError
from openrl_recipes.text_to_sql.scoring import Reference


@dataclass(frozen=True, slots=True)
class Item:
    """A question about the tables of one domain (a generated world, or a database of a data set)."""

    domain: str
    level: int  # 1 easy .. 3 hard; 0 where nobody said
    schema: str  # the tables as the prompt shows them, a line each
    question: str
    gold: str  # the reference: one whole query on one line
    databases: tuple[Database, ...]  # what answers run on; a right one is right on all of them

    @property
    def prompt(self) -> str:
        """What the model reads. It ends in SELECT: after a bare `SQL:` small models first write a newline."""
        return f"{self.schema}\nQuestion: {self.question}\nSQL: SELECT"

    @property
    def answer(self) -> str:
        """What the model should write; the newline ends it."""
        return self.gold[len("SELECT") :] + "\n"

    def solved_by(self, query: str) -> bool:
        """Whether `query` gives the reference's result on every database. Runs it in this process."""
        try:
            with Reference(self.gold, self.databases) as reference:
                return reference.solved_by(query)
        except QueryError:
            return False

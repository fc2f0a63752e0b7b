"""Writes the table of docs/backends.md: the suite on every backend that this machine has.

    PYTHONPATH=tests python -m contract.table [VARIANT ...]

Columns of other backends stay as they are: what was run elsewhere is not lost.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from openrl.errors import ModelError
from openrl.selftest.case import run_case
from openrl.selftest.models import FAMILIES
from openrl.selftest.report import FamilyResult, Report, overview
from openrl.selftest.suite import CASES
from support.variants import VARIANTS, Subjects, Variant

PAGE = Path(__file__).parents[2] / "docs" / "backends.md"
BEGIN, END = "<!-- table: begin (make backends) -->\n", "<!-- table: end -->\n"

Cells = dict[str, dict[str, str]]  # by row, then by column


def cells(text: str | None = None) -> Cells:
    """The cells of the page's tables."""
    text = PAGE.read_text() if text is None else text
    inside = text.partition(BEGIN)[2].partition(END)[0]
    found: Cells = {}
    head: list[str] = []
    for line in inside.splitlines():
        first, *rest = (cell.strip() for cell in line.strip("|").split("|")) if line.startswith("|") else [""]
        if not line.startswith("|"):
            head = []
        elif not head:
            head = rest
        elif set(first) != {"-"}:
            found[first] = dict(zip(head, rest, strict=True))
    return found


def titles() -> list[str]:
    return list(cells())


def columns() -> list[str]:
    return list(next(iter(cells().values())))


def try_out(variant: Variant, subjects: Subjects) -> Report:
    report = Report(variant.backend, CASES)
    for family in FAMILIES:
        result = report.families[family] = FamilyResult(family)
        try:
            subject = subjects.get(variant, family)
        except ModelError as error:
            result.refusal = str(error)
            continue
        result.device, result.info = subject.backend.report, subject.backend.info
        for case in CASES:
            result.outcomes[case.name] = outcome = run_case(case, subject)
            print(variant.name, family, case.name, outcome.state, outcome.message, file=sys.stderr, flush=True)
    return report


def merged(old: Cells, new: Cells) -> str:
    """Both tables, in the order of the new one; columns of the old one that the new one lacks stay."""
    names = [v.name for v in VARIANTS if any(v.name in row for table in (old, new) for row in table.values())]

    def lines(rows: list[str]) -> list[str]:
        body = [[row, *(new[row].get(n, old.get(row, {}).get(n, "not tried")) for n in names)] for row in rows]
        every = [["", *names], ["---"] * (len(names) + 1), *body]
        return ["| " + " | ".join(cells) + " |" for cells in every]

    features = [case.title for case in CASES]
    return "\n".join([*lines(features), "", *lines([row for row in new if row not in features])]) + "\n"


def main(given: list[str]) -> None:
    chosen = [variant for variant in VARIANTS if variant.available and (not given or variant.name in given)]
    with tempfile.TemporaryDirectory() as root:
        subjects = Subjects(Path(root))
        reports = {variant.name: try_out(variant, subjects) for variant in chosen}
        subjects.close()
    text = PAGE.read_text()
    new = cells(BEGIN + overview(reports, CASES) + END)
    before, _, rest = text.partition(BEGIN)
    PAGE.write_text(before + BEGIN + merged(cells(text), new) + END + rest.partition(END)[2])


if __name__ == "__main__":
    main(sys.argv[1:])

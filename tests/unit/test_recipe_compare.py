"""Runs side by side: table, page and picture from their folders alone."""

from __future__ import annotations

import json
import re
from pathlib import Path

from rich.console import Console

from openrl_recipes.shared.compare import Compared, show_comparison, write_comparison


def run(folder: Path, lr: float, losses: list[float], held_out: list[float]) -> Path:
    folder.mkdir(parents=True)
    records = [{"stage": "before", "step": 0, "at": 1.0, "held_out": held_out[0]}]
    records += [{"stage": "sft", "step": s, "at": 2.0 + s, "loss": loss} for s, loss in enumerate(losses)]
    records += [{"stage": "after", "step": 1, "at": 63.0, "held_out": score} for score in held_out[1:]]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(each) + "\n" for each in records))
    (folder / "config.json").write_text(json.dumps({"lr": lr, "seed": 0, "out": str(folder)}))
    return folder


def compared(tmp_path: Path) -> list[Compared]:
    return [
        Compared("lr=1e-3", run(tmp_path / "lr=1e-3", 1e-3, [2.0, 1.0], [0.1, 0.5])),
        Compared("lr=<b>", run(tmp_path / "lr=b", 3e-3, [2.0, 0.5], [0.1, 0.7, 0.6])),
        Compared("lr=9", tmp_path / "absent", "failed"),
    ]


def test_a_page_with_a_row_and_a_colour_a_run(tmp_path: Path) -> None:
    page = write_comparison(compared(tmp_path), tmp_path)
    text = page.read_text()
    assert page == tmp_path / "compare.html"
    assert (tmp_path / "compare.png").read_bytes().startswith(b"\x89PNG")
    rows = [re.findall("<t[dh][^>]*>(.*?)</t[dh]>", row) for row in re.findall("<tr>(.*?)</tr>", text)]
    assert rows[1][:5] == ["lr=1e-3", "done", "10.0% → 50.0%", "", "1"]
    assert rows[2][:3] == ["lr=&lt;b&gt;", "done", "10.0% → 60.0%"]
    assert rows[2][7] == "70.0%"
    assert rows[3][:3] == ["lr=9", "failed", ""]
    assert re.findall("<figcaption>(.*?)</figcaption>", text) == ["Held-out score", "Loss (nats a token)"]
    assert not re.search(r"https?://|<script|<b>lr", text)
    assert rows[4:6] == [["run", "lr"], ["lr=1e-3", "0.001"]]  # the seed is the same, and out differs in every run


def test_a_table_that_fits_a_terminal(tmp_path: Path) -> None:
    with (tmp_path / "out").open("w") as file:
        show_comparison(compared(tmp_path), Console(file=file, width=80))
    lines = (tmp_path / "out").read_text().splitlines()
    assert any(line.split() == ["lr=1e-3", "done", "10.0%", "→", "50.0%", "1", "1", "min", "03", "s"] for line in lines)
    assert any("failed" in line for line in lines)

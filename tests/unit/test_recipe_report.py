"""The report of a run: made from its files alone, safe to open, and true."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from openrl_recipes.shared.measured import measured, positions, speed
from openrl_recipes.shared.plots import running_mean
from openrl_recipes.shared.report import clock, sample_rows, show, summary, write_report

HOSTILE = "<script>alert('x')</script> & \"quoted\" <img src=http://evil/x onerror=y> $a_1$ ]]>"


def write(folder: Path, records: list[dict[str, Any]], samples: list[dict[str, Any]], **config: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    (folder / "samples.jsonl").write_text("".join(json.dumps(sample) + "\n" for sample in samples))
    return folder


def record(stage: str, step: int, at: float, **values: Any) -> dict[str, Any]:
    return {"stage": stage, "step": step, "at": at, **values}


def whole_run(folder: Path) -> Path:
    records = [record("before", 0, 1.0, held_out=0.05, held_out_level_1=0.1)]
    records += [record("sft", s, 2.0 + s, seconds=1.5, loss=2 / (s + 1), train_tokens=100) for s in range(4)]
    records += [record("evaluate", 4, 6.5, held_out=0.36)]
    for s in range(30):
        more = {"kl_v2": 10 ** -(3 + s % 3), "entropy": 0.4, "completion_tokens": 12.5, "mixed_groups": 0.5}
        tokens = {"train_tokens": 300, "sampled_tokens": 90, "seconds": 2.0}
        records.append(record("grpo", s, 8.0 + s, reward=s / 30, **more, **tokens))
    records += [record("after", 30, 40.0, held_out=0.67)]
    samples = [
        {"stage": "before", "prompt": "q1", "completion": "no", "score": 0.0, "wanted": "yes"},
        {"stage": "before", "prompt": "q2", "completion": "no", "score": 0.0, "wanted": "maybe"},
        {"stage": "after", "prompt": "q1", "completion": "nope", "score": 0.0, "wanted": "yes"},
        {"stage": "after", "prompt": "q2", "completion": "maybe", "score": 1.0, "wanted": "maybe"},
    ]
    return write(folder, records, samples, model="some/model", lr=1e-3, seed=3)


class Tags(HTMLParser):
    """Collects what a browser would act on."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.links: list[str] = []
        self.handlers: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links += [str(value) for name, value in attrs if name in ("src", "href", "xlink:href", "srcset", "action")]
        self.handlers += [name for name, _ in attrs if name.startswith("on")]


def test_hostile_text_is_shown_and_not_obeyed(tmp_path: Path) -> None:
    records = [record(HOSTILE, s, s + 1.0, loss=1.0, held_out=0.5) for s in range(3)]
    sample = {"stage": HOSTILE, "prompt": HOSTILE, "completion": HOSTILE, "score": 0.5, "wanted": HOSTILE}
    folder = write(tmp_path / "run", records, [sample], model=HOSTILE, **{HOSTILE: HOSTILE})
    page = write_report(folder).read_text()
    seen = Tags(page)
    assert not {"script", "img", "iframe", "object", "embed"} & set(seen.tags)
    assert seen.handlers == []
    assert page.count("&lt;script&gt;") >= 6
    assert "alert('x')" not in page  # the quotes are escaped, too


def test_the_page_asks_for_nothing_and_the_picture_lies_beside_it(tmp_path: Path) -> None:
    file = write_report(whole_run(tmp_path / "run"))
    page = file.read_text()
    assert file == tmp_path / "run" / "report.html"
    assert all(link.startswith(("data:", "#")) for link in Tags(page).links)
    assert not re.search(r"https?://|@import|url\((?!#)", page)
    assert "default-src 'none'" in page
    assert (tmp_path / "run" / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_only_the_curves_that_the_run_has_are_drawn(tmp_path: Path) -> None:
    captions = re.findall("<figcaption>(.*?)</figcaption>", write_report(whole_run(tmp_path / "rl")).read_text())
    assert captions == [
        "Held-out score",
        "Reward, mean of all rollouts",
        "Groups whose rewards differ",
        "Loss (nats a token)",
        "KL v2, sampler to trainer (nats)",
        "Entropy (nats a token)",
        "Completion length (tokens)",
        "Speed (tokens/s)",
    ]
    sft = write(tmp_path / "sft", [record("sft", s, s + 1.0, loss=1.0) for s in range(3)], [])
    assert re.findall("<figcaption>(.*?)</figcaption>", write_report(sft).read_text()) == ["Loss (nats a token)"]


def test_a_stage_has_one_colour_in_all_charts_light_and_dark(tmp_path: Path) -> None:
    page = write_report(whole_run(tmp_path / "run")).read_text()
    legend = re.findall(r"<li><i style=\"color: (var\(--c\d\))\"[^>]*></i>(\w+)", page)
    assert legend[:2] == [("var(--c0)", "sft"), ("var(--c1)", "grpo")]
    charts = dict(re.findall("<figcaption>(.*?)</figcaption>(.*?)</figure>", page, flags=re.DOTALL))
    assert "var(--c0)" in charts["Loss (nats a token)"]
    assert "var(--c1)" in charts["Reward, mean of all rollouts"]
    assert "var(--c0)" not in charts["Reward, mean of all rollouts"]
    assert "prefers-color-scheme: dark" in page
    assert not re.search("(?i)(fill|stroke): #(?!000000)", "".join(charts.values()))


def test_a_folder_without_measurements_gives_a_page_too(tmp_path: Path) -> None:
    assert "<h1>empty</h1>" in write_report(write(tmp_path / "empty", [], [])).read_text()
    with (tmp_path / "out").open("w") as file:
        show(tmp_path / "empty", Console(file=file))
    assert (tmp_path / "out").read_text().startswith("Report: ")


def test_the_summary_tells_ends_extremes_and_speed(tmp_path: Path) -> None:
    tiles = {tile.name: (tile.value, tile.remark) for tile in summary(measured(whole_run(tmp_path)))}
    assert tiles["Held-out score"] == ("5.0% → 67.0%", "3 evaluations, best 67.0%")
    assert tiles["Reward"] == ("0.07 → 0.90", "first and last 5 of 30 steps")  # means of 0..4 and 25..29, over 30
    assert tiles["Duration"] == ("40 s", "34 training steps")
    assert tiles["KL v2, worst"] == ("1.0e-03", "median 1.0e-04; below 0.01 is well")
    # SFT: 0.5 to 5 s; GRPO: 6 to 37 s, as its records overlap by half.
    assert tiles["Tokens/s trained"][0] == f"{(400 + 9000) / (4.5 + 31):,.0f}"
    assert tiles["Tokens/s sampled"][0] == f"{2700 / 31:,.0f}"


def test_overlapping_records_share_their_time() -> None:
    records = [
        {"at": 4.0, "seconds": 4.0, "n": 100},
        {"at": 6.0, "seconds": 4.0, "n": 100},  # from 2 to 6
        {"at": 5.0, "seconds": 1.0, "n": 50},  # within
        {"at": 10.0, "seconds": 1.0, "n": 50},  # apart
    ]
    assert speed(records, "n") == pytest.approx(300 / 7)
    assert speed([{"at": 3.0, "n": 5}], "n") == 0.0


def test_stages_follow_one_another_on_the_axis_of_steps() -> None:
    stages = [("before", 0), ("sft", 0), ("sft", 1), ("evaluate", 2), ("grpo", 5), ("evaluate", 6), ("grpo", 6)]
    stages += [("after", 99)]
    found = positions([record(stage, step, 0.0) for stage, step in stages])
    assert found == [0, 1, 2, 2, 3, 3, 4, 4]


def test_the_score_of_another_model_is_in_the_table_and_not_in_the_runs_curve(tmp_path: Path) -> None:
    records = [record("before", 0, 1.0, held_out=0.1), record("evaluate teacher", 0, 2.0, held_out=0.9)]
    run = measured(write(tmp_path, [*records, record("after", 0, 3.0, held_out=0.5)], []))
    assert run.values("held_out") == [0.1, 0.5]
    assert [stage for stage, _ in run.evaluations()] == ["before", "evaluate teacher", "after"]
    assert summary(run)[0].value == "10.0% → 50.0%"


def test_samples_stand_side_by_side_by_prompt_the_most_improved_first(tmp_path: Path) -> None:
    stages, rows = sample_rows(measured(whole_run(tmp_path)))
    assert stages == ["before", "after"]
    assert [(prompt, wanted) for prompt, wanted, _ in rows] == [("q2", "maybe"), ("q1", "yes")]
    assert [[answer.text for answer in of_stage] for of_stage in rows[0][2]] == [["no"], ["maybe"]]


def test_show_prints_scores_samples_and_speed(tmp_path: Path) -> None:
    with (tmp_path / "out").open("w") as file:
        show(whole_run(tmp_path / "run"), Console(file=file, width=100))
    text = (tmp_path / "out").read_text()
    for expected in ("before", "67.0%", "level 1", "maybe", "Tokens/s trained", "report.html"):
        assert expected in text


def test_markup_in_samples_is_printed_as_it_is(tmp_path: Path) -> None:
    sample = {"stage": "after", "prompt": "[bold]p[/]", "completion": "[/red]", "score": 0.0}
    with (tmp_path / "out").open("w") as file:
        show(write(tmp_path / "run", [], [sample]), Console(file=file, width=100))
    assert "[bold]p[/]" in (tmp_path / "out").read_text()
    assert "[/red]" in (tmp_path / "out").read_text()


def test_values_that_are_no_numbers_do_not_break_the_report(tmp_path: Path) -> None:
    records = [record("grpo", s, s + 1.0, loss=float("nan"), kl_v2=[0.0, float("inf")][s % 2]) for s in range(30)]
    write_report(write(tmp_path / "run", records, []))


def test_a_running_mean_keeps_a_constant_and_its_length() -> None:
    assert running_mean([2.0] * 9, 5) == [2.0] * 9
    assert running_mean([0.0, 3.0, 6.0], 3) == [1.5, 3.0, 4.5]


@pytest.mark.parametrize(("seconds", "text"), [(41.6, "42 s"), (185, "3 min 05 s"), (3720, "1 h 02 min")])
def test_durations_are_for_people(seconds: float, text: str) -> None:
    assert clock(seconds) == text

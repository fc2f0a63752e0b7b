"""A page in one file: style, tiles, charts and tables as HTML. Every text that comes from outside is escaped here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from openrl_recipes.shared.plots import COLOURS, Panel, svg

_DARK = ("#7ab0ff", "#ff9f57", "#3fcfb4", "#bd97ff", "#ff7fae", "#bfce4a", "#4cc9ee", "#d4a675")
_STYLE = """
:root { color-scheme: light dark; --page: #f6f7f9; --card: #fff; --ink: #1f2430; --muted: #667085; --grid: #d9dde5;
  --good: #17803d; --bad: #c62f2f; LIGHT }
@media (prefers-color-scheme: dark) { :root { --page: #12141a; --card: #1b1e27; --ink: #e8eaf0; --muted: #9aa3b5;
  --grid: #333947; --good: #4fc47a; --bad: #ff7b72; DARK } }
* { box-sizing: border-box }
body { margin: 0 auto; max-width: 1240px; padding: 24px 16px 48px; background: var(--page); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; overflow-wrap: break-word }
h1 { font-size: 26px; line-height: 1.2; margin: 0 0 4px } h2 { font-size: 18px; margin: 32px 0 12px }
p { margin: 0 0 8px } .muted { color: var(--muted) }
.card, .tiles > div, figure { background: var(--card); border: 1px solid var(--grid); border-radius: 10px }
.tiles { display: grid; gap: 12px; grid-template-columns: repeat(auto-fit, minmax(175px, 1fr)); margin: 20px 0 0 }
.tiles > div { padding: 12px 14px } .tiles b { display: block; font-size: 18px; line-height: 1.35; font-weight: 650 }
.tiles small { color: var(--muted); display: block }
.legend { display: flex; flex-wrap: wrap; gap: 4px 18px; margin: 0 0 12px; padding: 0; list-style: none }
.legend i { display: inline-block; width: 18px; border-top: 3px solid; margin-right: 7px; vertical-align: middle }
.legend i.dashed { border-top-style: dashed }
.charts { display: grid; gap: 12px; grid-template-columns: repeat(auto-fill, minmax(min(350px, 100%), 1fr)) }
figure { margin: 0; padding: 10px 10px 4px } figcaption { font-weight: 600; padding: 0 4px 4px }
figcaption small { font-weight: 400; color: var(--muted) }
svg { width: 100%; height: auto; display: block } svg text { font-family: inherit !important }
.card { overflow-x: auto } table { border-collapse: collapse; width: 100% }
th { text-align: left; font-weight: 600; color: var(--muted) }
th, td { padding: 8px 12px; border-top: 1px solid var(--grid); vertical-align: top }
tr:first-child > * { border-top: 0 } td.number, th.number { text-align: right; white-space: nowrap;
  font-variant-numeric: tabular-nums }
table.samples { table-layout: fixed } td.text, pre { overflow-wrap: anywhere }
pre { margin: 0; white-space: pre-wrap; font: 13px/1.45 ui-monospace, SFMono-Regular, Menlo, Consolas, monospace;
  max-height: 16em; overflow-y: auto }
.answer { border-left: 4px solid var(--grid); padding-left: 9px; margin-bottom: 8px }
.answer:last-child { margin-bottom: 0 } .answer small { color: var(--muted) }
.answer small { white-space: nowrap }
.scored { border-color: color-mix(in oklab, var(--good) calc(var(--score) * 100%), var(--bad)) }
.scored small { color: color-mix(in oklab, var(--good) calc(var(--score) * 100%), var(--bad)); font-weight: 600 }
details > summary { cursor: pointer; margin: 12px 0 }
@media (max-width: 700px) {
  .tiles { grid-template-columns: 1fr 1fr } .tiles b { font-size: 16px } th, td { padding: 7px 8px }
  table.samples tr:first-child { display: none } table.samples tr { display: block; border-top: 6px solid var(--page) }
  table.samples td { display: block; border: 0; padding: 6px 12px }
  table.samples td::before { content: attr(data-name); color: var(--muted); font-size: 12px; display: block } }
"""


@dataclass(frozen=True, slots=True)
class Tile:
    """One figure of the summary: what it is, its value, and a remark below."""

    name: str
    value: str
    remark: str = ""


@dataclass(frozen=True, slots=True)
class Answer:
    """What the model wrote, and its score if it has one."""

    text: str
    score: float | None


@dataclass(frozen=True, slots=True)
class Key:
    """An entry of the legend."""

    name: str
    colour: int
    dashed: bool = False


def page(title: str, parts: Sequence[str]) -> str:
    """The whole document. It asks the network for nothing: style and charts are inside, and the icon is empty."""
    light = "; ".join(f"--c{i}: {colour}" for i, colour in enumerate(COLOURS))
    dark = "; ".join(f"--c{i}: {colour}" for i, colour in enumerate(_DARK))
    style = _STYLE.replace("LIGHT", light).replace("DARK", dark)
    head = (
        f'<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'; "
        f'img-src data:"><link rel="icon" href="data:,"><title>{escape(title)}</title><style>{style}</style>'
    )
    return f'<!doctype html>\n<html lang="en"><head>{head}</head>\n<body>\n' + "\n".join(parts) + "\n</body></html>\n"


def heading(title: str, below: str) -> str:
    """The page's heading and a line below it."""
    return f'<h1>{escape(title)}</h1><p class="muted">{escape(below)}</p>'


def section(title: str, *parts: str) -> str:
    """A part of the page; nothing if all of `parts` are empty."""
    return f"<h2>{escape(title)}</h2>" + "\n".join(parts) if any(parts) else ""


def tiles(entries: Sequence[Tile]) -> str:
    """The figures of the summary."""
    made = [f"<div>{escape(t.name)}<b>{escape(t.value)}</b><small>{escape(t.remark)}</small></div>" for t in entries]
    return f'<div class="tiles">{"".join(made)}</div>' if made else ""


def legend(keys: Sequence[Key]) -> str:
    """What the colours mean."""
    made = [
        f'<li><i style="color: var(--c{key.colour % len(COLOURS)})"{" class=dashed" if key.dashed else ""}></i>'
        f"{escape(key.name)}</li>"
        for key in keys
    ]
    return f'<ul class="legend">{"".join(made)}</ul>' if made else ""


def charts(panels: Sequence[Panel]) -> str:
    """The charts side by side, as many as the screen has room for."""
    made = [f"<figure><figcaption>{escape(p.title)}</figcaption>{svg(p)}</figure>" for p in panels]
    return f'<div class="charts">{"".join(made)}</div>' if made else ""


def table(names: Sequence[str], rows: Sequence[Sequence[str]], numbers: bool = False) -> str:
    """A plain table; with `numbers`, all columns but the first stand to the right."""
    mark = [f' class="{"number" if numbers else "text"}"' if i else "" for i in range(len(names))]
    lines = ["".join(f"<th{mark[i]}>{escape(name)}</th>" for i, name in enumerate(names))]
    lines += ["".join(f"<td{mark[i]}>{escape(cell)}</td>" for i, cell in enumerate(row)) for row in rows]
    return f'<div class="card"><table>{"".join(f"<tr>{line}</tr>" for line in lines)}</table></div>'


def sample_table(stages: Sequence[str], rows: Sequence[tuple[str, str, Sequence[Sequence[Answer]]]]) -> str:
    """Rows of (prompt, wanted answer or "", answers a stage), side by side; one below the other on a phone."""
    wanted = any(text for _, text, _ in rows)
    names = ["prompt", *(["wanted"] if wanted else []), *stages]
    lines = ["".join(f"<th>{escape(name)}</th>" for name in names)]
    for prompt, text, answers in rows:
        cells = [f"<pre>{escape(prompt)}</pre>", *([f"<pre>{escape(text)}</pre>"] if wanted else [])]
        cells += ["".join(_answer(answer) for answer in of_stage) for of_stage in answers]
        named = zip(names, cells, strict=True)
        lines.append("".join(f'<td data-name="{escape(name)}">{cell}</td>' for name, cell in named))
    return f'<div class="card"><table class="samples">{"".join(f"<tr>{line}</tr>" for line in lines)}</table></div>'


def folded(summary: str, content: str) -> str:
    """Something to be opened with a click."""
    return f"<details><summary>{escape(summary)}</summary>{content}</details>"


def _answer(answer: Answer) -> str:
    text = f"<pre>{escape(answer.text) or ' '}</pre>"
    if answer.score is None:
        return f'<div class="answer">{text}</div>'
    share = min(1.0, max(0.0, answer.score))
    return f'<div class="answer scored" style="--score: {share:.3f}"><small>{_mark(answer.score)}</small>{text}</div>'


def _mark(score: float) -> str:
    """Not by colour alone."""
    return "✓ right" if score == 1 else "✗ wrong" if score == 0 else f"score {score:.2g}"

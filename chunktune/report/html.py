"""A record as one HTML file that needs no network, no script and no other file. Pure.

Every text of the record is escaped, and the page's own policy lets no browser load or run anything.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from chunktune.report import is_chosen, plain
from chunktune.report.charts import memory_chart, throughput_chart
from chunktune.report.limit import why_not
from chunktune.report.terminal import head_line, verdict_line, verdict_rows
from chunktune.report.trials import trial_cells
from chunktune.results import Record

_POLICY = "default-src 'none'; style-src 'unsafe-inline'"
_STYLE = """
:root { color-scheme: light dark; --ink: #1c2026; --paper: #fff; --soft: #5d6673; --edge: #d9dde3;
  --dot: #6f8fb8; --mark: #0b62c4; --short: #c0392b; --budget: #b7791f; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6e9ee; --paper: #15181d; --soft: #9aa4b2; --edge: #333a44;
    --dot: #5b7ca6; --mark: #6db1ff; --short: #ff7b6b; --budget: #e0b252; } }
body { margin: 0 auto; padding: 1rem; max-width: 70rem; color: var(--ink); background: var(--paper);
  font: 16px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.35rem; margin: 0.3rem 0; overflow-wrap: anywhere; }
h2 { font-size: 1.05rem; margin: 1.8rem 0 0.5rem; }
p, dd { overflow-wrap: anywhere; }
.facts { color: var(--soft); margin: 0; }
dl { display: grid; grid-template-columns: max-content minmax(0, 1fr); gap: 0.3rem 1rem; margin: 0; }
dt { color: var(--soft); }
dd { margin: 0; }
@media (max-width: 34rem) { dl { grid-template-columns: minmax(0, 1fr); gap: 0; } dd { margin-bottom: 0.5rem; } }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; white-space: nowrap; }
th, td { padding: 0.25rem 0.7rem; text-align: right; border-bottom: 1px solid var(--edge); }
td.reason { text-align: left; white-space: normal; min-width: 28rem; }
tr.chosen td { font-weight: 600; color: var(--mark); }
svg { display: block; width: 100%; height: auto; font: 12px system-ui, sans-serif; }
svg text { fill: var(--soft); }
.tick { text-anchor: end; }
.value { text-anchor: middle; }
.grid { stroke: var(--edge); }
.line { fill: none; stroke: var(--dot); stroke-width: 1.5; }
.whisker { stroke: var(--dot); stroke-width: 2; }
.dot { fill: var(--dot); }
.chosen { fill: var(--mark); }
.short { fill: none; stroke: var(--short); stroke-dasharray: 3 3; }
.budget { stroke: var(--budget); stroke-width: 2; stroke-dasharray: 5 4; }
.capacity { stroke: var(--short); stroke-width: 2; }
.key { font-weight: 600; }
.key-chosen { color: var(--mark); }
.key-budget { color: var(--budget); }
.key-capacity { color: var(--short); }
"""


def to_html(record: Record) -> str:
    """The page: what ran, the answer, the charts, every trial, the verdict with its reasons."""
    title = f"{plain(verdict_line(record)).partition('. Limit: ')[0]}"
    body = "\n".join([_head(record, title), _charts(record), _table(record), _verdict(record)])
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>chunktune: {escape(title)}</title>\n<style>{_STYLE}</style>\n</head>\n"
        f"<body>\n{body}\n</body>\n</html>\n"
    )


def _head(record: Record, title: str) -> str:
    limit = dict(verdict_rows(record)).get("limit", "")
    facts = f"{head_line(record)}; started {plain(record.started_at)}; status {record.status}"
    return f'<p class="facts">{escape(facts)}</p>\n<h1>{escape(title)}</h1>\n<p>Limit: {escape(limit)}</p>'


def _verdict(record: Record) -> str:
    rows = "\n".join(f"<dt>{escape(label)}</dt><dd>{escape(text)}</dd>" for label, text in verdict_rows(record))
    return f"<h2>Verdict</h2>\n<dl>\n{rows}\n</dl>"


def _charts(record: Record) -> str:
    if not record.trials:
        return ""
    rates, sizes = throughput_chart(record), memory_chart(record)
    chosen = '<span class="key key-chosen">chosen</span>'
    sections = [_section("Throughput, samples/s", f"{chosen}; an upright line is the interval of a point", rates)]
    if sizes:
        lines = '<span class="key key-budget">what it may use</span>, <span class="key key-capacity">capacity</span>'
        needed = ", dashed: needed and not there" if 'class="short"' in sizes else ""
        sections.append(_section("Peak memory of the fullest rank", f"{chosen}, {lines}{needed}", sizes))
    return "\n".join(sections)


def _section(title: str, legend: str, chart: str) -> str:
    return f"<h2>{title}</h2>\n<p>{legend}</p>\n{_wide(chart)}"


def _table(record: Record) -> str:
    headings, rows = trial_cells(record)
    if not rows:
        return "<h2>Trials</h2>\n<p>no value of M was tried</p>"
    failed = any(not trial.fits for trial in record.trials)
    lines = [_row("th", [*headings, *(["reason"] if failed else [])])]
    for trial, row in zip(record.trials, rows, strict=True):
        reason = ["" if trial.fits else why_not(trial)] if failed else []
        lines.append(_row("td", row, reason, chosen=is_chosen(record, trial)))
    table = "\n".join(["<table>", *lines, "</table>"])
    return f"<h2>Trials</h2>\n{_wide(table)}"


def _row(tag: str, cells: Sequence[str], reason: Sequence[str] = (), *, chosen: bool = False) -> str:
    inside = "".join(f"<{tag}>{escape(plain(cell))}</{tag}>" for cell in cells)
    inside += "".join(f'<td class="reason">{escape(plain(text))}</td>' for text in reason)
    return f'<tr class="chosen">{inside}</tr>' if chosen else f"<tr>{inside}</tr>"


def _wide(inside: str) -> str:
    """A block that scrolls by itself where the screen is narrow."""
    return f'<div class="wide">{inside}</div>'

"""A report as one HTML page that needs nothing else: no scripts, no fonts, no network."""

from collections.abc import Sequence
from html import escape

from kvstitch.evaluation.report.charts import budget_charts, needle_maps
from kvstitch.evaluation.report.pictures import sample_pictures
from kvstitch.evaluation.report.runs import Problem
from kvstitch.evaluation.report.sections import Entry, Section
from kvstitch.evaluation.report.tables import cell, cost_rows, grid, quality_measures

_STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; max-width: 1180px; margin: 2em auto; padding: 0 1em; color: #111; }
h1 { font-size: 1.5em; } h2 { font-size: 1.25em; border-bottom: 1px solid #bbb; margin-top: 2.2em; } h3 { font-size: 1.05em; }
table { border-collapse: collapse; margin: .6em 0 1.2em; font-variant-numeric: tabular-nums; }
caption { text-align: left; font-weight: bold; padding-bottom: .3em; white-space: nowrap; }
th, td { padding: .25em .7em; border-bottom: 1px solid #ddd; text-align: right; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; }
.best { font-weight: bold; } .dense td { color: #444; font-style: italic; }
.scroll { overflow-x: auto; } .pictures { display: flex; flex-wrap: wrap; gap: 1em; }
figure { margin: 0; break-inside: avoid; } svg { max-width: 100%; height: auto; } svg text { font-family: system-ui, sans-serif; }
.warning { border-left: 4px solid #D55E00; padding-left: .8em; } ul.warning { padding-left: 2em; }
@media print { body { max-width: none; margin: 0; font-size: 11pt; } h2 { break-before: page; } h2:first-of-type { break-before: auto; }
  table { break-inside: avoid; } }
"""


def page(sections: Sequence[Section], problems: Sequence[Problem], title: str) -> str:
    """The page, complete."""
    body = [f"<h1>{escape(title)}</h1>"]
    body.append(_problems(problems))
    for section in sections:
        body.append(_section(section))
    body.append(_needles(sections))
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{escape(title)}</title>'
    # Without an icon of its own the browser would ask a server for one.
    head += f'<link rel="icon" href="data:,"><style>{_STYLE}</style>'
    return (
        f'<!doctype html>\n<html lang="en"><head>{head}</head>\n<body>\n'
        + "\n".join(filter(None, body))
        + "\n</body></html>\n"
    )


def _problems(problems: Sequence[Problem]) -> str:
    if not problems:
        return ""
    lines = "".join(
        f"<li><code>{escape(problem.path.name)}</code>: {escape(problem.reason)}</li>" for problem in problems
    )
    return f'<div class="warning"><p>Not in this report:</p><ul>{lines}</ul></div>'


def _section(section: Section) -> str:
    parts = [f"<h2>{escape(section.title)}</h2>", f"<p>{escape(_samples(section))}</p>"]
    parts += [_warnings(section)]
    parts += [_grid_table(section, measure) for measure in quality_measures(section)]
    parts.append(_pictures(budget_charts(section), "Against the budget; bars are standard errors over the samples"))
    titles, rows = cost_rows(section)
    if titles:
        parts.append(
            _table("Memory and speed, as measured: means over the samples", ["method", "budget", *titles], rows)
        )
    for entry in _shown(section):
        drawn = sample_pictures(entry.runs[0].path)
        if drawn:
            parts.append(_pictures(drawn, f"{entry.method}, {entry.budget}: the caches of the first sample"))
    return "\n".join(filter(None, parts))


def _samples(section: Section) -> str:
    counts = sorted({sum(len(run.records) for run in entry.runs) for entry in section.entries})
    seeds = sorted({run.config["seed"] for entry in section.entries for run in entry.runs})
    many = str(counts[0]) if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
    return f"{many} samples an entry; seed {', '.join(map(str, seeds))}."


def _warnings(section: Section) -> str:
    lines = []
    for entry in section.entries:
        for run in entry.runs:
            if run.summary["budget_bound"] is False:
                lines.append(f"{entry.method}, {entry.budget}: the budget never bound, so the press was not tested")
            if run.summary["failed_samples"]:
                names = ", ".join(run.summary["failed_samples"])
                lines.append(f"{entry.method}, {entry.budget}: failed samples count in no figure ({names})")
    items = "".join(f"<li>{escape(line)}</li>" for line in dict.fromkeys(lines))
    return f'<ul class="warning">{items}</ul>' if items else ""


def _grid_table(section: Section, measure) -> str:
    head = "".join(f"<th>{escape(words)}</th>" for words in ("method", *(text for _, text in section.budgets)))
    rows = []
    for method, values in grid(section, measure):
        cells = [
            f'<td class="best">{escape(cell(measure, value))} ★</td>'
            if top
            else f"<td>{escape(cell(measure, value))}</td>"
            for value, top in values
        ]
        rows.append(f"<tr><td>{escape(method)}</td>{''.join(cells)}</tr>")
    dense = section.dense(measure.metric)
    if dense is not None:
        same = f"<td>{escape(cell(measure, dense))}</td>" * len(section.budgets)
        rows.append(f'<tr class="dense"><td>dense</td>{same}</tr>')
    caption = f"{measure.title}: mean ± standard error, ★ the best at a budget"
    return _framed(caption, head, rows)


def _table(caption: str, titles: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{escape(words)}</th>" for words in titles)
    lines = ["<tr>" + "".join(f"<td>{escape(words)}</td>" for words in row) + "</tr>" for row in rows]
    return _framed(caption, head, lines)


def _framed(caption: str, head: str, rows: Sequence[str]) -> str:
    inner = f"<caption>{escape(caption)}</caption><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody>"
    return f'<div class="scroll"><table>{inner}</table></div>'


def _pictures(drawn: Sequence[str], caption: str) -> str:
    if not drawn:
        return ""
    figures = "".join(f"<figure>{svg}</figure>" for svg in drawn)
    return f'<h3>{escape(caption)}</h3><div class="pictures">{figures}</div>'


def _needles(sections: Sequence[Section]) -> str:
    maps = needle_maps(sections)
    places = dict.fromkeys(place for place, _ in maps)
    return "\n".join(
        f"<h2>Needles · {escape(place)}</h2>"
        + _pictures([svg for where, svg in maps if where == place], "By depth and length")
        for place in places
    )


def _shown(section: Section) -> list[Entry]:
    """One entry a method, at its middle budget: more would make the page heavy, and the folders hold the others."""
    chosen = []
    for method in section.methods:
        entries = [entry for entry in section.pressed if entry.method == method]
        chosen.append(entries[len(entries) // 2])
    return chosen

"""A report as one HTML page that needs nothing else: no scripts, no fonts, no network."""

from collections.abc import Sequence
from html import escape

from kvstitch.evaluation.paper_tables import PaperTable
from kvstitch.evaluation.records import RunError
from kvstitch.evaluation.report.charts import budget_charts, needle_maps
from kvstitch.evaluation.report.notes import warnings
from kvstitch.evaluation.report.overviews import sample_overviews
from kvstitch.evaluation.report.pictures import read_arrays, sample_pictures
from kvstitch.evaluation.report.runs import Problem, grouped
from kvstitch.evaluation.report.sections import Section
from kvstitch.evaluation.report.sheets import Sheet, other_sheets, published_sheets, quality_sheets
from kvstitch.evaluation.report.tables import LEFT_OUT

_STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; max-width: 1180px; margin: 2em auto; padding: 0 1em; color: #111; }
h1 { font-size: 1.5em; } h2 { font-size: 1.25em; border-bottom: 1px solid #bbb; margin-top: 2.2em; } h3 { font-size: 1.05em; }
h2, h3, p, li { overflow-wrap: anywhere; }
table { border-collapse: collapse; margin: .2em 0 1.2em; font-variant-numeric: tabular-nums; }
.caption { font-weight: bold; margin: 1.2em 0 0; break-after: avoid; } .caption small { font-weight: normal; }
th, td { padding: .25em .7em; border-bottom: 1px solid #ddd; text-align: right; vertical-align: bottom; }
td { white-space: nowrap; } th.words, td.words { text-align: left; } td:first-child { white-space: normal; min-width: 8em; }
.best { font-weight: bold; } .dense td { color: #444; font-style: italic; }
.scroll { overflow-x: auto; } .pictures { display: flex; flex-wrap: wrap; gap: 1em; }
summary { cursor: pointer; margin: .6em 0; } figure { margin: 0; break-inside: avoid; } svg { max-width: 100%; height: auto; } svg text { font-family: system-ui, sans-serif; }
.warning { border-left: 4px solid #D55E00; padding-left: .8em; } ul.warning { padding-left: 2em; }
@media print { body { max-width: none; margin: 0; font-size: 9pt; } h2 { break-before: page; } h2:first-of-type { break-before: auto; }
  h2, h3 { break-after: avoid; } table { break-inside: avoid; font-size: 8pt; } th, td { padding: .2em .4em; }
  .scroll { overflow-x: visible; } svg, .best { print-color-adjust: exact; -webkit-print-color-adjust: exact; } }
"""


def page(
    sections: Sequence[Section], problems: Sequence[Problem], title: str, papers: Sequence[PaperTable] = ()
) -> str:
    """The page, complete."""
    body = [f"<h1>{escape(title)}</h1>"]
    if problems:
        folders = len({problem.path for problem in problems})
        many = "1 run is" if folders == 1 else f"{folders} runs are"
        body.append(f'<p class="warning">{many} not in this report, or not all of it; see its end.</p>')
    for section in sections:
        body.append(_section(section, papers))
    body.append(_needles(sections))
    body.append(_problems(problems))
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
        f"<li>{escape(reason)}: {', '.join(f'<code>{escape(name)}</code>' for name in names)}</li>"
        for reason, names in grouped(problems)
    )
    return f"<h2>{LEFT_OUT}</h2><ul>{lines}</ul>"


def _section(section: Section, papers: Sequence[PaperTable]) -> str:
    parts = [f"<h2>{escape(section.title)}</h2>", f"<p>{escape(section.samples)}</p>"]
    parts += [f"<p>Options: {escape(section.options)}</p>"] if section.options else []
    parts += [_warnings(section)]
    parts += map(_table, quality_sheets(section))
    parts.append(_pictures(budget_charts(section), "Against the budget; bars are standard errors over the samples"))
    parts += map(_table, (*other_sheets(section), *published_sheets(section, papers)))
    parts += [_caches(section, method) for method in section.methods]
    return "\n".join(filter(None, parts))


def _caches(section: Section, method: str) -> str:
    """All layers and heads at every budget, folded up but for the middle one, of which some layers are shown in detail."""
    entries = [entry for entry in section.pressed if entry.method == method]
    middle = entries[len(entries) // 2]
    parts = []
    for entry in [middle, *(entry for entry in entries if entry is not middle)]:
        title = f"{entry.method}, {entry.budget}: the caches of the first sample"
        try:
            arrays = read_arrays(entry.runs[0].path)
        except RunError as error:
            parts.append(f'<p class="warning">{escape(f"{title}: {error}")}</p>')
            continue
        overviews = sample_overviews(arrays)
        if entry is middle:
            parts.append(_pictures([*overviews, *sample_pictures(arrays)], title))
        elif overviews:
            parts.append(f"<details><summary>{escape(title)}</summary>{_figures(overviews)}</details>")
    return "\n".join(filter(None, parts))


def _warnings(section: Section) -> str:
    items = "".join(f"<li>{escape(line)}</li>" for line in warnings(section))
    return f'<ul class="warning">{items}</ul>' if items else ""


def _table(sheet: Sheet) -> str:
    head = "".join(f"<th{_kind(sheet, place)}>{escape(words)}</th>" for place, words in enumerate(sheet.columns))
    rows = []
    for line, row in enumerate(sheet.rows):
        cells = "".join(
            f'<td class="best">{escape(words)} ★</td>'
            if (line, place) in sheet.best
            else f"<td{_kind(sheet, place)}>{escape(words)}</td>"
            for place, words in enumerate(row)
        )
        rows.append(f'<tr class="dense">{cells}</tr>' if line in sheet.dense else f"<tr>{cells}</tr>")
    note = f"{sheet.note}; ★ the best at a budget" if sheet.best else sheet.note
    # Not a <caption>: that would be no wider than its table.
    caption = f'<p class="caption">{escape(sheet.caption)} <small>{escape(note)}</small></p>'
    body = f"<thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody>"
    return f'{caption}<div class="scroll"><table aria-label="{escape(sheet.caption)}">{body}</table></div>'


def _kind(sheet: Sheet, place: int) -> str:
    return ' class="words"' if place < sheet.text_columns else ""


def _pictures(drawn: Sequence[str], caption: str) -> str:
    if not drawn:
        return ""
    return f"<h3>{escape(caption)}</h3>{_figures(drawn)}"


def _figures(drawn: Sequence[str]) -> str:
    return f'<div class="pictures">{"".join(f"<figure>{svg}</figure>" for svg in drawn)}</div>'


def _needles(sections: Sequence[Section]) -> str:
    maps = needle_maps(sections)
    places = dict.fromkeys(place for place, _ in maps)
    return "\n".join(
        f"<h2>Needles · {escape(place)}</h2>"
        + _pictures([svg for where, svg in maps if where == place], "By depth and length")
        for place in places
    )

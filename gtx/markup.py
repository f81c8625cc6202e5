"""The pieces of an HTML page that stands alone: tables, figures, folded parts, and the page around them.

Not here: what a page says (`page.py`) and its figures (`figures.py`). Texts are escaped here, so callers pass plain
ones; only what is called `body` or `svg` is markup already. The page fetches nothing and runs no script.
"""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence

from gtx.words import counted

MAX_ROWS = 20  # of a table that is open; the rest folds


def document(title: str, sections: Mapping[str, str]) -> str:
    """A page. sections: the body of each by its heading."""
    anchors = {heading: heading.lower().replace(" ", "-") for heading in sections}
    links = "".join(f'<a href="#{anchor}">{html.escape(heading)}</a>' for heading, anchor in anchors.items())
    parts = "\n".join(
        f'<section aria-labelledby="{anchors[heading]}"><h2 id="{anchors[heading]}">{html.escape(heading)}</h2>\n'
        f"{body}\n</section>"
        for heading, body in sections.items()
    )
    name = html.escape(title)
    return (
        f'<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{name}: strategy report</title>\n<style>{_CSS}</style>\n</head>\n<body>\n<header><h1>{name}</h1>\n"
        f'<nav aria-label="Sections">{links}</nav></header>\n<main>\n{parts}\n</main>\n</body>\n</html>\n'
    )


def tiles(facts: Mapping[str, str]) -> str:
    """A few facts, large."""
    boxes = "".join(f"<div><dt>{html.escape(k)}</dt><dd>{html.escape(v)}</dd></div>" for k, v in facts.items())
    return f'<dl class="tiles">{boxes}</dl>'


def say(text: str) -> str:
    """A paragraph."""
    return f"<p>{html.escape(text)}</p>"


def empty(text: str) -> str:
    """Why a section has no data, in one line."""
    return f'<p class="empty">{html.escape(text[:1].upper() + text[1:])}.</p>'


def table(caption: str, columns: Sequence[str], rows: Sequence[Sequence[str]], words: int = 1) -> str:
    """A table whose first `words` columns are words and whose others are numbers; many rows fold.

    A column that ends in `*` is words as well; the first cell of a row is its header.
    """
    texts = [index < words or column.endswith("*") for index, column in enumerate(columns)]
    longest = [max((len(row[index]) for row in rows), default=0) for index in range(len(columns))]
    kinds = [("long" if n > 24 else "short") if text else "number" for text, n in zip(texts, longest, strict=True)]
    head = "".join(
        f'<th scope="col" class="{kind}">{html.escape(column.rstrip("*"))}</th>'
        for column, kind in zip(columns, kinds, strict=True)
    )

    def line(row: Sequence[str]) -> str:
        cells = [f'<td class="{kind}">{html.escape(cell)}</td>' for cell, kind in zip(row[1:], kinds[1:], strict=True)]
        return f'<tr><th scope="row">{html.escape(row[0])}</th>{"".join(cells)}</tr>'

    def part(caption: str, rows: Sequence[Sequence[str]]) -> str:
        label = html.escape(caption)
        return (
            f'<div class="scroll" role="region" tabindex="0" aria-label="{label}"><table><caption>{label}</caption>'
            f"<thead><tr>{head}</tr></thead><tbody>{''.join(map(line, rows))}</tbody></table></div>"
        )

    made = part(caption, rows[:MAX_ROWS])
    if len(rows) > MAX_ROWS:
        made += folded(counted(len(rows) - MAX_ROWS, "more row"), part(f"{caption}, the rest", rows[MAX_ROWS:]))
    return made


def folded(summary: str, body: str) -> str:
    """Markup that opens on a click on its summary."""
    return f"<details><summary>{html.escape(summary)}</summary>{body}</details>"


def drawn(svg: str, caption: str) -> str:
    """A figure and what it says."""
    label = "A figure; it scrolls sideways on small screens"
    return (
        f'<figure><div class="scroll" role="region" tabindex="0" aria-label="{label}">{svg}</div>'
        f"<figcaption>{html.escape(caption)}</figcaption></figure>"
    )


_CSS = """
:root { color-scheme: light dark; --ink: #1d2530; --paper: #fff; --soft: #5a6675; --line: #d5dbe3; --box: #f3f5f8;
  --link: #1f5fae; }
@media (prefers-color-scheme: dark) { :root { --ink: #e3e8ee; --paper: #14181d; --soft: #9aa7b6; --line: #343d48;
  --box: #1d232a; --link: #82b4f0; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 0 1rem 3rem; max-width: 1000px; background: var(--paper); color: var(--ink);
  font: 15px/1.5 system-ui, sans-serif; }
h1 { margin: 1.5rem 0 .5rem; overflow-wrap: anywhere; }
h2 { margin: 2.5rem 0 .75rem; padding-top: .75rem; border-top: 1px solid var(--line); font-size: 1.3rem; }
nav { display: flex; flex-wrap: wrap; gap: .25rem 1rem; }
a { color: var(--link); }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(9rem, 1fr)); gap: .75rem; margin: 0 0 1.25rem; }
.tiles div { padding: .6rem .8rem; border-radius: 6px; background: var(--box); }
dt { color: var(--soft); font-size: .8rem; }
dd { margin: 0; font-size: 1.25rem; font-weight: 600; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; margin: .5rem 0 1rem; font-size: .87rem; }
caption { padding-bottom: .3rem; text-align: left; font-weight: 600; }
th, td { padding: .25rem .7rem .25rem 0; border-bottom: 1px solid var(--line); text-align: left; vertical-align: top; }
thead th { color: var(--soft); font-weight: 600; vertical-align: bottom; }
tbody th { font-weight: 500; white-space: nowrap; }
th.number, td.number { text-align: right; white-space: nowrap; font-variant-numeric: tabular-nums; }
td.short { white-space: nowrap; }
td.long { overflow-wrap: anywhere; min-width: 11rem; }
figure { margin: .5rem 0 1rem; }
figure svg { display: block; width: 100%; min-width: 680px; height: auto; font-family: system-ui, sans-serif; }
svg * { stroke-linejoin: round; stroke-linecap: butt; }
figcaption, .empty { color: var(--soft); font-size: .9rem; }
details { margin: .25rem 0 1rem; }
summary { cursor: pointer; color: var(--link); }
"""

"""A report as one self-contained HTML page of tables and pictures.

The page needs no network: plotly's script is inside. Text is escaped, whoever wrote it.
"""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from orchestrator.durable import whole_file

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

# Okabe and Ito's colours, which colour-blind people can tell apart.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 1100px; padding: 0 1rem; color: #222; }
table { border-collapse: collapse; font-size: 13px; width: 100%; } th { text-align: right; border-bottom: 2px solid #888; }
td { text-align: right; border-bottom: 1px solid #ddd; padding: 3px 6px; }
td:first-child, td:nth-child(2), th:first-child, th:nth-child(2) { text-align: left; }
.notes, .timing { color: #555; font-size: 13px; } h2 { margin-top: 2.5rem; border-bottom: 1px solid #ddd; }
table.text td, table.text th { text-align: left; vertical-align: top; } table.text td:nth-child(3) { overflow-wrap: anywhere; }
"""


def write_document(path: Path, title: str, parts: Iterable[str]) -> None:
    """The page with its title and `parts`, pieces of HTML; whole or not at all."""
    from plotly.offline import get_plotlyjs

    head = (
        f"<!doctype html><html lang='en'><head><meta charset='utf-8'><title>{html.escape(title)}</title>"
        f"<style>{STYLE}</style><script>{get_plotlyjs()}</script></head><body><h1>{html.escape(title)}</h1>"
    )
    with whole_file(path) as file:
        file.write("".join([head, *parts, "</body></html>"]).encode())


def element(tag: str, text: str, kind: str = "") -> str:
    """`text` as an element of class `kind`."""
    return f"<{tag}{f' class={kind!r}' if kind else ''}>{html.escape(text)}</{tag}>"


def table(headings: Sequence[str], rows: Iterable[Sequence[str]], *, text: bool = False) -> str:
    """A table of figures, or of `text`, which is aligned to the left."""
    head = "".join(element("th", heading) for heading in headings)
    body = "".join(f"<tr>{''.join(element('td', cell) for cell in row)}</tr>" for row in rows)
    return (
        f"<table{' class=' + repr('text') if text else ''}><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
    )


def figure(title: str, x: str, y: str, **layout: object) -> Figure:
    """An empty picture in the house's style, with titles of its axes."""
    from plotly.graph_objects import Figure

    empty = Figure()
    empty.update_layout(
        title=title,
        xaxis_title=x,
        yaxis_title=y,
        template="plotly_white",
        height=360,
        margin={"l": 60, "r": 20, "t": 50, "b": 50},
        colorway=COLOURS,
        **layout,
    )
    return empty


def picture(drawn: Figure) -> str:
    from plotly.io import to_html

    return str(to_html(drawn, include_plotlyjs=False, full_html=False, config={"displaylogo": False}))

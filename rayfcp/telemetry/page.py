"""Self-contained HTML pages: the style sheet and the chart renderer are part of each, and nothing is loaded."""

import base64
import functools
import hashlib
import json
from collections.abc import Mapping, Sequence
from html import escape
from importlib.resources import files
from typing import Any

from rayfcp.telemetry.summary import finite

Chart = Mapping[str, Any]
"""Data of one chart as `data/charts.js` draws it: `kind`, `title`, `note`, and what that kind needs."""

RENDERER, STYLE = "charts.js", "style.css"


@functools.cache
def asset(name: str) -> str:
    """Return the text of a file in the package's data folder."""
    return (files("rayfcp.telemetry") / "data" / name).read_text(encoding="utf-8")


def html_page(
    title: str, body: str, *, scripts: Sequence[str] = (), styles: Sequence[str] = (), policy: str = ""
) -> str:
    """Return a page that draws the charts of its body.

    The content security policy permits only the page's own script, and no connection unless `policy` adds one.
    `title` is escaped; `body` is markup. `scripts` and `styles` are data files that follow the common ones.
    """
    script = "".join(asset(name) for name in (RENDERER, *scripts))
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    icon = '<link rel="icon" href="data:,">' if policy else ""  # a server would be asked for one
    allowed = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; base-uri 'none'; {policy}"
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{allowed}">'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">{icon}'
        f"<title>{escape(title)}</title><style>{''.join(asset(name) for name in (STYLE, *styles))}</style></head>"
        f"<body><main>{body}</main><noscript><p>The charts need JavaScript; the tables do not.</p></noscript>"
        f"<script>{script}</script></body></html>\n"
    )


def data_script(data: Any, *, attributes: str = "") -> str:
    """Return data for the page's script. Non-finite numbers become null."""
    text = json.dumps(finite(data), separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    return f'<script type="application/json"{attributes}>{text}</script>'


def figure(chart: Chart) -> str:
    """Return a figure with its caption and data, which the page's script draws."""
    caption = f"<h3>{escape(chart['title'])}</h3><p>{escape(chart['note'])}</p>"
    return f"<figure data-chart><figcaption>{caption}</figcaption>{data_script(chart)}</figure>"


def table(
    heads: Sequence[str], rows: Sequence[Sequence[str]], *, row_class: Sequence[str] = (), titles: Sequence[str] = ()
) -> str:
    """Return a table of text. `row_class` and `titles` (shown when pointing at the first field) go by row."""
    head = "".join(f'<th scope="col">{escape(text)}</th>' for text in heads)
    lines = []
    for at, (first, *others) in enumerate(rows):
        mark = f' class="{row_class[at]}"' if row_class and row_class[at] else ""
        title = f' title="{escape(titles[at])}"' if titles else ""
        fields = "".join(f"<td>{escape(text)}</td>" for text in others)
        lines.append(f"<tr{mark}><td{title}>{escape(first)}</td>{fields}</tr>")
    return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(lines)}</tbody></table>"

"""HTML for the results that a notebook shows (`_repr_html_`). Every text is escaped."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape


def html_table(title: str, rows: Iterable[Sequence[object]], header: Sequence[str] = ()) -> str:
    """A table under a title in bold; cells are texts or numbers."""

    def row(cells: Sequence[object], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{escape(str(cell))}</{tag}>" for cell in cells) + "</tr>"

    lines = [row(header, "th")] if header else []
    return f"<p><b>{escape(title)}</b></p><table>{''.join([*lines, *(row(each, 'td') for each in rows)])}</table>"

"""The look of tables that the verbs print."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

from rich.table import Table


def plain_table(
    heads: Sequence[str], rows: Iterable[Sequence[str]], *, justify: Literal["left", "right"] = "left"
) -> Table:
    """A table without lines and folded cells; `justify` aligns all columns but the first."""
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for index, head in enumerate(heads):
        table.add_column(head, justify=justify if index else "left", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    return table

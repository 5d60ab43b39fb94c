"""HTML as values: text is escaped unless it is already `Markup`, so forgetting to escape cannot happen.

The page holds what a stranger's script printed: names, arguments, reasons, logs. Every one of them passes
through `escape` on its way into an element, because `element` escapes each child and attribute that is a
plain string.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Union

# Control characters, bidirectional overrides, and halves of surrogate pairs (an argument that was no UTF-8):
# shown as their code, since a browser would drop them, reorder the line by them, or refuse the file for
# them.
_UNPRINTABLE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff\ufffe\uffff]"
)
_VOID = frozenset({"br", "img", "link", "meta", "wbr"})


class Markup(str):
    """A string that is HTML already; only this module and files shipped with the package make one."""

    __slots__ = ()


Child = Union[str, int, float, None, Iterable["Child"]]  # noqa: UP007  (evaluated, and names itself)


def escape(text: object) -> Markup:
    """Any text as HTML that shows exactly this text, in an element or in a quoted attribute.

    >>> escape("</script><b a='1'>")
    '&lt;/script&gt;&lt;b a=&#39;1&#39;&gt;'
    """
    if isinstance(text, Markup):
        return text
    shown = printable(str(text))
    for raw, entity in (("&", "&amp;"), ("<", "&lt;"), (">", "&gt;"), ('"', "&quot;"), ("'", "&#39;")):
        shown = shown.replace(raw, entity)
    return Markup(shown)


def printable(text: str) -> str:
    """The text with what a browser would drop, obey or refuse shown as its code: for values that a script reads.

    >>> printable("a\\x00b")
    'a\\\\x00b'
    """
    return _UNPRINTABLE.sub(_code, text.replace("\r\n", "\n"))


def _code(match: re.Match[str]) -> str:
    code = ord(match.group())
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"


def element(name: str, /, *children: Child, **attributes: str | int | float | bool | None) -> Markup:
    """One element: children escaped and joined, attributes escaped and quoted.

    ``class_`` is written ``class`` and ``stroke_width`` ``stroke-width``; an attribute of None or False is
    left out and one of True is written without a value. A child of None is nothing; an iterable is its
    members.

    >>> element("p", "a < b", class_="note", hidden=True)
    '<p class="note" hidden>a &lt; b</p>'
    """
    words = [name]
    for key, value in attributes.items():
        if value is None or value is False:
            continue
        key = key.rstrip("_").replace("_", "-")
        words.append(key if value is True else f'{key}="{escape(value)}"')
    opening = f"<{' '.join(words)}>"
    return Markup(opening if name in _VOID else f"{opening}{join(children)}</{name}>")


def prose(text: str) -> list[Markup | str]:
    """A sentence whose parts in backquotes are code.

    >>> prose("`bf16`, or a < `b`")
    ['<code>bf16</code>', ', or a < ', '<code>b</code>']
    """
    parts: list[Markup | str] = []
    for place, part in enumerate(re.split(r"`([^`\n]+)`", text)):
        if part:
            parts.append(element("code", part) if place % 2 else part)
    return parts


def join(children: Iterable[Child], between: str = "") -> Markup:
    """Children escaped where they are text and set one after another, with ``between`` (text) in the gaps."""
    return Markup(escape(between).join(_flat(children)))


def _flat(children: Iterable[Child]) -> Iterable[str]:
    for child in children:
        if child is None:
            continue
        if isinstance(child, (str, int, float)):
            yield escape(child)
        else:
            yield from _flat(child)

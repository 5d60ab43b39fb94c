"""The page as a file: head, sections in the order given, and the policy that keeps it self-contained.

A content policy in the head forbids every request and every script but the one shipped here, named by its
hash: should an escape ever be missed, what slipped through would still be inert.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable
from importlib.resources import files

from mezzo.core.version import VERSION
from mezzo.report.markup import Markup, element

Section = tuple[str, str, Markup]
"""An anchor, a heading, and what stands below it."""
_SCRIPTS = ("script.js", "ranges.js")


def document(*, title: str, kicker: str, heading: str, facts: str, sections: Iterable[Section | None]) -> str:
    """The whole file as text.

    Args:
        title: of the window.
        kicker: the line above the heading: what kind of page it is.
        heading: whose page it is.
        facts: the line below it.
        sections: in the order in which a reader asks; None is left out.
    """
    style, script = _packaged("style.css"), Markup("".join(_packaged(name) for name in _SCRIPTS))
    policy = (
        f"default-src 'none'; img-src data:; style-src '{_hash(style)}'; script-src '{_hash(script)}'; "
        "base-uri 'none'; form-action 'none'"
    )
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", http_equiv="Content-Security-Policy", content=policy),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", name="color-scheme", content="light dark"),
        element("meta", name="referrer", content="no-referrer"),
        # An icon of nothing: without one a browser would ask a server for /favicon.ico.
        element("link", rel="icon", href="data:,"),
        element("title", title),
        element("style", style),
    )
    kept = [section for section in sections if section is not None]
    links = [element("a", name, href=f"#{anchor}") for anchor, name, _ in kept]
    toggle = element("button", "Dark", type="button", id="theme", hidden=True)
    body = element(
        "body",
        element(
            "header",
            element(
                "div",
                element("p", kicker, class_="kicker"),
                element("h1", heading),
                element("p", facts, class_="facts-line"),
            ),
            element("nav", links, toggle, aria_label="Sections"),
            class_="top",
        ),
        element(
            "main",
            [element("section", element("h2", name), content, id=anchor) for anchor, name, content in kept],
        ),
        element(
            "footer", element("p", f"Made by Mezzo {VERSION} from the run records in this file's folder.")
        ),
        element("script", script),
    )
    return "<!doctype html>\n" + element("html", head, body, lang="en") + "\n"


def maybe(anchor: str, name: str, content: Markup | None) -> Section | None:
    """A section, or None where there is nothing to show in it."""
    return None if content is None else (anchor, name, content)


def plots(figures: Iterable[Markup | None]) -> Markup | None:
    """Figures beside one another as far as the page's width goes; None where there is none."""
    kept = [figure for figure in figures if figure is not None]
    return element("div", kept, class_="plots") if kept else None


def empty(text: str) -> Markup:
    """A sentence in place of what is not there."""
    return element("p", text, class_="note")


def _packaged(name: str) -> Markup:
    """A file shipped beside this one; it must not hold what would end its own element."""
    text = files("mezzo.report").joinpath(name).read_text(encoding="utf-8")
    if "</" in text:
        raise ValueError(f"{name} holds '</', which would end its element in the page")
    return Markup(text)


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()

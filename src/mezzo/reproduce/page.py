"""One page with every figure and what was expected and seen: HTML that needs no other file and no network.

It shares the look of `mezzo.report`, and its rule: text is escaped because `element` escapes it.
"""

from __future__ import annotations

import base64
import hashlib
from importlib.resources import files
from typing import Any

from mezzo.core.version import VERSION
from mezzo.reproduce.expected import WORDS, tally
from mezzo.reproduce.markup import Markup, element

TONES = {
    "holds": "p-equivalent",
    "lost": "p-divergent",
    "known": "p-inconclusive",
    "gained": "p-consistent",
    "unlisted": "p-inconclusive",
}
_OWN_STYLE = """
.figure { display: block; width: 100%; max-width: 900px; height: auto; background: #fff; border-radius: 6px; }
.cards { margin-top: 18px; }
.card p { margin: 8px 0 0; }
"""


def render(records: dict[str, dict[str, Any]], figures: dict[str, bytes], crashed: dict[str, str]) -> str:
    """The whole page as text.

    Args:
        records: name -> what its ``numbers.json`` holds.
        figures: name -> its ``figure.svg``, where there is one.
        crashed: name -> why it has no result.
    """
    style = Markup(files("mezzo.report").joinpath("style.css").read_text(encoding="utf-8") + _OWN_STYLE)
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    title = "The original experiments, run again"
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element(
            "meta",
            http_equiv="Content-Security-Policy",
            content=f"default-src 'none'; img-src data:; style-src 'sha256-{digest}'; base-uri 'none'; "
            "form-action 'none'",
        ),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", name="color-scheme", content="light dark"),
        element("link", rel="icon", href="data:,"),
        element("title", title),
        element("style", style),
    )
    links = [element("a", name, href=f"#{name}") for name in (*records, *crashed)]
    body = element(
        "body",
        element(
            "header",
            element("p", "Micikevicius et al. 2017, at a size for one small machine", class_="kicker"),
            element("h1", title),
            element("p", _tally(records, crashed), class_="facts-line"),
            element("nav", links, aria_label="Experiments"),
            class_="top",
        ),
        element(
            "main",
            [_experiment(name, record, figures.get(name)) for name, record in records.items()],
            [_crash(name, reason) for name, reason in crashed.items()],
        ),
        element(
            "footer", element("p", f"Made by Mezzo {VERSION} from the numbers.json files beside this page.")
        ),
    )
    return "<!doctype html>\n" + element("html", head, body, lang="en") + "\n"


def _tally(records: dict[str, dict[str, Any]], crashed: dict[str, str]) -> str:
    findings = [finding for record in records.values() for finding in record["findings"]]
    return tally(findings, sum(len(record["missing"]) for record in records.values()), len(crashed))


def _experiment(name: str, record: dict[str, Any], figure: bytes | None) -> Markup:
    machine = record["machine"]
    facts = (
        record["source"], f"{record['effort']} size", f"{record['seconds']:.0f} s",
        str(machine["gpu"]["name"] if machine.get("gpu") else machine.get("cpu")), str(record["finished"])[:10],
    )  # fmt: skip
    picture = None
    if figure is not None:
        source = "data:image/svg+xml;base64," + base64.b64encode(figure).decode()
        said = " ".join(finding["seen"] for finding in record["findings"])
        image = element("img", src=source, alt=f"{record['title']}. {said}", class_="figure")
        picture = element("div", image, class_="plot")
    missing = [
        element("p", f"{one}: {WORDS['lost']}; the experiment says nothing of it")
        for one in record["missing"]
    ]
    return element(
        "section",
        element("h2", record["title"]),
        element("p", " · ".join(facts), class_="note"),
        picture,
        element("div", [_finding(finding) for finding in record["findings"]], missing, class_="cards"),
        id=name,
    )


def _finding(finding: dict[str, Any]) -> Markup:
    fate = finding["fate"]
    return element(
        "article",
        element(
            "header",
            element("h4", finding["name"].replace("-", " ")),
            element("span", WORDS[fate], class_="badge"),
        ),
        element("p", element("b", "Expected: "), finding["expected"]),
        element("p", element("b", "Seen: "), finding["seen"]),
        element("p", finding["why"], class_="note") if finding["why"] else None,
        class_=f"card {TONES[fate]}",
    )


def _crash(name: str, reason: str) -> Markup:
    return element(
        "section", element("h2", name), element("p", f"It did not come to its end: {reason}"), id=name
    )

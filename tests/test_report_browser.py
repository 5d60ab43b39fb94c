"""The report as a browser shows it: what is drawn, inert, fits a phone, light, dark and on paper."""

from __future__ import annotations

import json
import re
from html import unescape
from pathlib import Path

import pytest

import chromium
import comparisons
from mezzo.report import build

pytestmark = [pytest.mark.browser, chromium.needs_chromium]

# Run inside the page, after its own script: what a reader would meet, as JSON in an element of its own.
PROBE = """
<pre id="probe"></pre><script>
addEventListener("load", () => {
  const all = (query) => [...document.querySelectorAll(query)];
  const shown = (e) => { const box = e.getBoundingClientRect(); return box.width > 0 && box.height > 0; };
  const wide = all("body *").filter((e) => !e.closest(".scroll, svg, pre, .sr") &&
    e.getBoundingClientRect().right > document.documentElement.clientWidth + 1);
  const out = {
    width: document.documentElement.clientWidth,
    scroll: document.documentElement.scrollWidth,
    wide: wide.map((e) => e.tagName + "." + e.className),
    stolen: window.stolen === undefined ? "no" : "yes",
    images: document.images.length,
    requests: performance.getEntriesByType("resource").map((e) => e.name),
    script: document.documentElement.dataset.script,
    cards: all(".card").filter(shown).map((e) => e.querySelector("h3").textContent + " " +
      (e.querySelector(".badge")?.textContent ?? "")),
    curves: all("figure .chart path:is(.line, .under)").map((e) =>
      [e.getBoundingClientRect().width > 50, getComputedStyle(e).stroke]),
    charts: all("svg.chart").map((e) => Math.round(e.getBoundingClientRect().width)),
    labels: all("svg.chart text").map((e) => getComputedStyle(e).fontSize),
    outside: all("svg.chart text").filter((e) => {
      const box = e.getBoundingClientRect(), card = e.closest("figure").getBoundingClientRect();
      return box.left < card.left || box.right > card.right + 1;
    }).map((e) => e.textContent),
    overlaps: all(".stats b").filter((e) => e.scrollWidth > e.closest(".stats").clientWidth).length,
    ground: getComputedStyle(document.body).backgroundColor,
    ink: getComputedStyle(document.body).color,
    readouts: all(".readout").map((e) => e.textContent),
    buttons: all("button").filter(shown).map((e) => e.textContent),
  };
  PLAY
  document.getElementById("probe").textContent = JSON.stringify(out);
});
</script></body>
"""


def probe(page: Path, *, play: str = "", width: int = 0, **window: int | bool) -> dict[str, object]:
    """What the browser makes of a page, on a copy without the content policy, which would forbid the probe.

    ``width`` puts the page into a frame of so many pixels, since Chromium's own windows end at 500.
    """
    text = page.read_text(encoding="utf-8")
    text, policies = re.subn(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", text)
    assert policies == 1
    copy = page.with_name("probed.html")
    copy.write_text(text.replace("</body>", PROBE.replace("PLAY", play)), encoding="utf-8")
    if width:
        frame = page.with_name("frame.html")
        frame.write_text(
            f'<body><iframe id="f" src="probed.html" style="width:{width}px;height:3000px;border:0"></iframe>'
            '<pre id="probe"></pre><script>addEventListener("load", () => {'
            'const inner = document.getElementById("f").contentDocument;'
            'document.getElementById("probe").textContent = inner.getElementById("probe").textContent;'
            "});</script></body>"
        )
        dom = chromium.dom(frame, "--allow-file-access-from-files", **window)
    else:
        dom = chromium.dom(copy, **window)
    found = re.search(r'<pre id="probe">(.+?)</pre>', dom, re.DOTALL)
    assert found, dom[-2000:]
    values: dict[str, object] = json.loads(unescape(found[1]))
    return values


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return comparisons.healthy(tmp_path_factory.mktemp("report") / "run")


@pytest.fixture(scope="module")
def page(folder: Path) -> Path:
    return build(folder)


def test_the_page_under_its_own_policy(page: Path) -> None:
    """The file itself, unchanged: its script runs, named by its hash, and its style applies."""
    dom = chromium.dom(page)
    assert 'data-script="on"' in dom
    assert re.search(r'<button type="button" id="theme">Dark</button>', dom)
    assert dom.count('class="card p-') == 2
    assert dom.count('class="readout"') == 4


def test_light_and_wide(page: Path) -> None:
    seen = probe(page)
    assert seen["script"] == "on"
    assert seen["requests"] == []
    assert seen["cards"] == ["bf16 equivalent", "fp16 consistent"]
    assert seen["scroll"] == seen["width"] == 1200
    assert seen["wide"] == seen["outside"] == []
    assert seen["ground"] == "rgb(246, 247, 248)"
    curves = seen["curves"]
    assert isinstance(curves, list)
    assert len(curves) == 2 * (2 + 1)  # FP32, the candidate and their difference, for each
    assert all(wide for wide, _ in curves)
    assert {colour for _, colour in curves} == {"rgb(74, 85, 96)", "rgb(11, 98, 196)", "rgb(177, 72, 10)"}
    readouts = seen["readouts"]
    assert isinstance(readouts, list)
    assert re.fullmatch(r"step 299 · FP32 0\.\d+ · bf16 0\.\d+", readouts[0])


def test_dark_and_switched_back(page: Path) -> None:
    seen = probe(
        page,
        dark=True,
        play="""
          const press = () => {
            document.getElementById("theme").click();
            return getComputedStyle(document.body).backgroundColor;
          };
          out.pressed = [press(), press()];
        """,
    )
    assert seen["ground"] == "rgb(18, 21, 25)"
    assert seen["ink"] == "rgb(231, 234, 238)"
    assert seen["pressed"] == ["rgb(246, 247, 248)", "rgb(18, 21, 25)"]


def test_a_phone(page: Path) -> None:
    seen = probe(page, width=400)
    assert seen["width"] == seen["scroll"] == 400
    assert seen["wide"] == seen["outside"] == []
    assert seen["overlaps"] == 0
    charts = seen["charts"]
    assert isinstance(charts, list)
    assert min(charts) > 250
    assert set(seen["labels"]) == {"12px"}  # type: ignore[call-overload]


@pytest.mark.parametrize("width", [0, 400])
def test_hostile_text_is_inert_even_without_the_policy(width: int, tmp_path: Path) -> None:
    seen = probe(build(comparisons.hostile(tmp_path / "run")), width=width)
    assert seen["stolen"] == "no"
    assert seen["images"] == 0
    assert seen["script"] == "on"
    assert seen["scroll"] == seen["width"]
    assert seen["wide"] == []


def test_the_probe_sees_an_injected_script(tmp_path: Path) -> None:
    """The check above can fail: the same text, unescaped, does run."""
    page = build(comparisons.one_step(tmp_path / "run"))
    text = page.read_text(encoding="utf-8")
    page.write_text(text.replace("</main>", '<img src=x onerror="window.stolen=1"></main>'), encoding="utf-8")
    assert probe(page)["stolen"] == "yes"


def test_reading_sorting_and_printing(tmp_path: Path) -> None:
    page = build(comparisons.many_ops(tmp_path / "run"))
    seen = probe(
        page,
        play="""
          const chart = document.querySelector("svg.chart");
          const line = chart.previousElementSibling;
          chart.dispatchEvent(new KeyboardEvent("keydown", { key: "ArrowLeft" }));
          out.left = line.textContent;
          out.cursor = chart.querySelector(".cursor").getAttribute("visibility");
          const box = chart.getBoundingClientRect();
          chart.dispatchEvent(new PointerEvent("pointermove", { clientX: box.left + 1 }));
          out.pointed = line.textContent;
          chart.dispatchEvent(new PointerEvent("pointerleave"));
          out.rested = [line.textContent, chart.querySelector(".cursor").getAttribute("visibility")];
          const table = all("table.sortable")[1];
          const first = () => table.tBodies[0].rows[0].cells[0].textContent;
          const calls = all("thead button").find((e) => table.contains(e) && e.textContent === "Calls");
          calls.click(); out.up = first();
          calls.click(); out.down = first();
          out.sort = calls.parentElement.getAttribute("aria-sort");
          const open = () => all("details").map((e) => e.open);
          out.before = open(); dispatchEvent(new Event("beforeprint"));
          out.during = open(); dispatchEvent(new Event("afterprint"));
          out.after = open();
        """,
    )
    assert str(seen["left"]).startswith("step 48 · ")
    assert seen["cursor"] == "visible"
    assert str(seen["pointed"]).startswith("step 0 · ")
    rested = seen["rested"]
    assert isinstance(rested, list)
    assert rested[0].startswith("step 49 · ")
    assert rested[1] == "hidden"
    assert (seen["up"], seen["down"], seen["sort"]) == ("op_00", "op_59", "descending")
    # The figures' tables stay folded on paper; the list of ops unfolds and folds again.
    assert (seen["before"], seen["during"], seen["after"]) == (
        [False, False, False],
        [False, False, True],
        [False, False, False],
    )


@pytest.mark.parametrize("name", ["failed", "one_step", "bare", "one_seed"])
def test_what_went_wrong_still_makes_a_page_that_fits(name: str, tmp_path: Path) -> None:
    seen = probe(build(comparisons.FOLDERS[name](tmp_path / name)), width=360)
    assert seen["scroll"] == seen["width"] == 360
    assert seen["wide"] == seen["outside"] == []


def test_paper(page: Path, tmp_path: Path) -> None:
    """Printed from a dark system, the page is on white, and takes a handful of sheets."""
    target = tmp_path / "report.pdf"
    chromium.run(page, f"--print-to-pdf={target}", "--no-pdf-header-footer", dark=True)
    data = target.read_bytes()
    assert data.startswith(b"%PDF-")
    assert 2 <= len(re.findall(rb"/Type\s*/Page\b", data)) <= 9

"""The report as a browser shows it: drawn, inert, on a phone, light, dark and on paper; what its script computes."""

from __future__ import annotations

import json
import re
from html import unescape
from pathlib import Path
from typing import Any

import pytest

import chromium
import comparisons
import run_records
from mezzo.report import build, build_any
from mezzo.report.numbers import share_text
from mezzo.report.ranges import FORMATS, together
from mezzo.report.run import read_run

pytestmark = [pytest.mark.browser, chromium.needs_chromium]

# Run inside the page, after its own script: what a reader would meet, as JSON in an element of its own.
PROBE = """
<pre id="probe"></pre><script>
addEventListener("load", () => {
  const all = (query) => [...document.querySelectorAll(query)];
  const shown = (e) => { const box = e.getBoundingClientRect(); return box.width > 0 && box.height > 0; };
  const wide = all("body *").filter((e) => !e.closest(".scroll, svg, pre") &&
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
  };
  PLAY
  document.getElementById("probe").textContent = JSON.stringify(out);
});
</script></body>
"""


def probe(page: Path, *, play: str = "", width: int = 0, **window: int | bool) -> dict[str, Any]:
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
    values: dict[str, Any] = json.loads(unescape(found[1]))
    return values


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The page of a comparison, of a watched run, and of hostile text in each."""
    place = tmp_path_factory.mktemp("report")
    run_records.write(place / "run" / "runs" / "run.jsonl", run_records.records())
    run_records.write(place / "hostile run" / "runs" / "run.jsonl", run_records.hostile())
    comparisons.healthy(place / "comparison")
    comparisons.hostile(place / "hostile comparison")
    return {folder.name: build_any(folder) for folder in place.iterdir()}


def test_the_page_under_its_own_policy(pages: dict[str, Path]) -> None:
    """The file itself, unchanged: its script runs, named by its hash, and its style applies."""
    dom = chromium.dom(pages["comparison"])
    assert 'data-script="on"' in dom
    assert dom.count('class="card p-') == 2
    assert dom.count('class="readout"') == 4


def test_light_and_wide(pages: dict[str, Path]) -> None:
    seen = probe(pages["comparison"])
    assert seen["script"] == "on"
    assert seen["requests"] == []
    assert seen["cards"] == ["bf16 proven equal", "fp16 no harm found"]
    assert seen["scroll"] == seen["width"] == 1200
    assert seen["wide"] == seen["outside"] == []
    assert seen["ground"] == "rgb(246, 247, 248)"
    assert len(seen["curves"]) == 2 * (2 + 1)  # FP32, the candidate and their difference, for each
    assert all(wide for wide, _ in seen["curves"])
    colours = {"rgb(74, 85, 96)", "rgb(11, 98, 196)", "rgb(177, 72, 10)"}
    assert {colour for _, colour in seen["curves"]} == colours
    assert re.fullmatch(r"step 299 · FP32 0\.\d+ · bf16 0\.\d+", seen["readouts"][0])


def test_dark(pages: dict[str, Path]) -> None:
    seen = probe(pages["comparison"], dark=True)
    assert seen["ground"] == "rgb(18, 21, 25)"
    assert seen["ink"] == "rgb(231, 234, 238)"


@pytest.mark.parametrize("name", ["comparison", "run"])
def test_a_phone(name: str, pages: dict[str, Path]) -> None:
    seen = probe(pages[name], width=400)
    assert seen["width"] == seen["scroll"] == 400
    assert seen["wide"] == seen["outside"] == []
    assert seen["overlaps"] == 0
    assert min(seen["charts"]) > 250
    assert set(seen["labels"]) == {"12px"}


@pytest.mark.parametrize("width", [pytest.param(0, marks=pytest.mark.nightly), 400])
@pytest.mark.parametrize("name", ["hostile comparison", "hostile run"])
def test_hostile_text_is_inert_even_without_the_policy(name: str, width: int, pages: dict[str, Path]) -> None:
    seen = probe(pages[name], width=width)
    assert seen["stolen"] == "no"
    assert seen["images"] == 0
    assert seen["script"] == "on"
    assert seen["scroll"] == seen["width"]
    assert seen["wide"] == []


def test_values_under_the_pointer(pages: dict[str, Path]) -> None:
    seen = probe(
        pages["comparison"],
        play="""
          const chart = document.querySelector("svg.chart");
          const cursor = chart.querySelector(".cursor");
          const state = () => [chart.previousElementSibling.textContent, cursor.getAttribute("visibility")];
          const box = chart.getBoundingClientRect();
          chart.dispatchEvent(new PointerEvent("pointermove", { clientX: box.left + 1 }));
          out.pointed = state();
          chart.dispatchEvent(new PointerEvent("pointerleave"));
          out.rested = state();
        """,
    )
    assert seen["pointed"][0].startswith("step 0 · ")
    assert seen["rested"][0].startswith("step 299 · ")
    assert (seen["pointed"][1], seen["rested"][1]) == ("visible", "hidden")


NIGHTLY = [pytest.param(name, marks=pytest.mark.nightly) for name in ("one_step", "bare", "one_seed")]


@pytest.mark.parametrize("name", ["failed", *NIGHTLY])
def test_what_went_wrong_still_makes_a_page_that_fits(name: str, tmp_path: Path) -> None:
    seen = probe(build(comparisons.FOLDERS[name](tmp_path / name)), width=360)
    assert seen["scroll"] == seen["width"] == 360
    assert seen["wide"] == seen["outside"] == []


@pytest.mark.parametrize("name", ["comparison", "run"])
def test_paper(name: str, pages: dict[str, Path], tmp_path: Path) -> None:
    """Printed from a dark system, the page is on white, and takes a handful of sheets."""
    assert 2 <= sheets(pages[name], tmp_path, dark=True) <= 10


def test_a_folded_list_is_printed(tmp_path: Path) -> None:
    page = build(comparisons.many_ops(tmp_path / "run"))
    whole = sheets(page, tmp_path)
    text = page.read_text(encoding="utf-8").replace("::details-content", "::marker")
    page.write_text(text, encoding="utf-8")
    assert sheets(page, tmp_path) < whole


def sheets(page: Path, place: Path, *, dark: bool = False) -> int:
    target = place / "report.pdf"
    chromium.run(page, f"--print-to-pdf={target}", "--no-pdf-header-footer", dark=dark)
    data = target.read_bytes()
    assert data.startswith(b"%PDF-")
    return len(re.findall(rb"/Type\s*/Page\b", data))


def test_the_slider_computes_what_the_library_does(pages: dict[str, Path]) -> None:
    seen = probe(
        pages["run"],
        play="""
          const figure = (kind) => all("figure.exponents").find((e) => e.querySelector("h4").textContent === kind);
          const table = (kind) => Object.fromEntries([...figure(kind).querySelector(".shares").tBodies[0].rows].map(
            (row) => [row.cells[0].textContent, [...row.cells].slice(1).map((cell) => cell.textContent)]));
          const kinds = ["Activation gradient", "Weight gradient", "Activation", "Weight"];
          const slider = document.querySelector("input.scale");
          out.start = [slider.value, document.querySelector("output").textContent];
          out.at = {};
          for (const k of [0, 7, 11, 24, 32]) {
            slider.value = k;
            slider.dispatchEvent(new Event("input"));
            out.at[k] = Object.fromEntries(kinds.map((kind) => [kind, table(kind)]));
          }
          out.end = document.querySelector("output").textContent;
          out.caption = figure("Weight gradient").querySelector(".unit").textContent;
        """,
    )
    assert seen["start"] == ["11", "2¹¹"]
    assert seen["end"] == "2³²"
    assert str(seen["caption"]).endswith("Drawn at a loss scale of 2³².")
    ranges = read_run(pages["run"].parent / "runs" / "run.jsonl").ranges
    for k, kinds in seen["at"].items():
        for kind, table in kinds.items():
            total = together(ranges.of(kind.lower()))
            for name in FORMATS:
                shares = total.shares(name, int(k) if "gradient" in kind else 0)
                if name.startswith("e"):  # scaled by tensor, whatever the loss scale is
                    shares = together(ranges.of(kind.lower()), name).shares(name)
                assert shares is not None
                want = [shares.underflow, shares.subnormal, shares.normal, shares.overflow]
                assert table[name] == [share_text(one) for one in want], (k, kind, name)


def test_without_a_script_the_page_says_the_same(pages: dict[str, Path]) -> None:
    """What the script draws first is what the file holds."""
    text = pages["run"].read_text(encoding="utf-8")
    dom = chromium.dom(pages["run"]).replace("&nbsp;", "\u00a0")
    for pattern in (r'<path d="([^"]+)" class="fill s1 bins"', r"<td>([^<]*)</td>"):
        assert re.findall(pattern, text)
        assert re.findall(pattern, dom) == re.findall(pattern, text)

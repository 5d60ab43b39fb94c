"""A run's page as a browser shows it: the slider's arithmetic is the library's, maps redraw, and it fits a phone."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import chromium
import run_records
from mezzo.core.ranges import Histogram, RangeRow
from mezzo.core.records import LossRecord, RangesRecord, Record
from mezzo.report import build_run
from mezzo.report.numbers import share_text
from mezzo.report.ranges import FORMATS, together
from mezzo.report.run import read_run
from test_report_browser import probe

pytestmark = [pytest.mark.browser, chromium.needs_chromium]

SLIDE = """
  const kinds = ["Activation gradient", "Weight gradient", "Activation", "Weight"];
  const figure = (kind) => all("figure.exponents").find((e) => e.querySelector("h4").textContent === kind);
  const table = (kind) => Object.fromEntries([...figure(kind).querySelector(".shares").tBodies[0].rows].map(
    (row) => [row.cells[0].textContent, [...row.cells].slice(1).map((cell) => cell.textContent)]));
  const slider = document.querySelector("input.scale");
  const slide = (k) => { slider.value = k; slider.dispatchEvent(new Event("input")); };
"""


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("watched") / "run"
    return run_records.write(place / "runs" / "run.jsonl", run_records.records())


@pytest.fixture(scope="module")
def page(records: Path) -> Path:
    return build_run(records.parent.parent)


def test_the_page_under_its_own_policy(page: Path) -> None:
    dom = chromium.dom(page).replace("&nbsp;", "\u00a0")
    assert 'data-script="on"' in dom
    assert '<div class="controls">' in dom  # shown, where the file says hidden
    assert "<option" in dom


def test_the_slider_computes_what_the_library_does(records: Path, page: Path) -> None:
    seen = probe(
        page,
        play=SLIDE
        + """
          out.start = [slider.value, document.querySelector("output").textContent];
          out.at = {};
          for (const k of [0, 7, 11, 24, 32]) {
            slide(k);
            out.at[k] = Object.fromEntries(kinds.map((kind) => [kind, table(kind)]));
          }
          out.end = document.querySelector("output").textContent;
          out.caption = figure("Weight gradient").querySelector(".unit").textContent;
        """,
    )
    assert seen["start"] == ["11", "2¹¹"]
    assert seen["end"] == "2³²"
    assert str(seen["caption"]).endswith("Drawn at a loss scale of 2³².")
    ranges = read_run(records).ranges
    at = seen["at"]
    assert isinstance(at, dict)
    for k, kinds in at.items():
        for kind, table in kinds.items():
            total = together(ranges.of(kind.lower()))
            for name in FORMATS:
                shares = total.shares(name, int(k) if "gradient" in kind else 0)
                assert shares is not None
                want = [shares.underflow, shares.subnormal, shares.normal, shares.overflow]
                assert table[name] == [share_text(one) for one in want], (k, kind, name)


def test_without_a_script_the_page_says_the_same(page: Path) -> None:
    """What the script draws first is what the file holds."""
    text = page.read_text(encoding="utf-8")
    dom = chromium.dom(page).replace("&nbsp;", "\u00a0")
    for pattern in (r'<path d="([^"]+)" class="fill s1 bins"', r"<td>([^<]*)</td>"):
        assert re.findall(pattern, dom) == re.findall(pattern, text)
    shape = r'<path (?:d="([^"]+)" class="h(\w)"|class="h(\w)" d="([^"]+)")'
    drawn = [sorted(filter(None, found)) for found in re.findall(shape, dom)]
    assert drawn == [sorted(filter(None, found)) for found in re.findall(shape, text)]


def test_one_tensor_in_place_of_all(records: Path, page: Path) -> None:
    seen = probe(
        page,
        play=SLIDE
        + """
          const which = figure("Activation gradient").querySelector("select.which");
          const names = [...which.options].map((one) => one.textContent);
          out.count = names.length;
          which.value = names.indexOf("embedding");
          which.dispatchEvent(new Event("change"));
          slide(16);
          out.embedding = table("Activation gradient")["fp16"];
          out.told = figure("Activation gradient").querySelector(".told").textContent;
          out.other = table("Weight gradient")["fp16"];
        """,
    )
    ranges = read_run(records).ranges
    track = next(track for track in ranges.of("activation gradient") if track.label == "embedding")
    shares = track.total.shares("fp16", 16)
    both = together(ranges.of("weight gradient")).shares("fp16", 16)
    assert shares is not None
    assert both is not None
    embedding, other = seen["embedding"], seen["other"]
    assert isinstance(embedding, list)
    assert isinstance(other, list)
    assert seen["count"] == 15
    assert embedding[0] == share_text(shares.underflow)
    assert other[0] == share_text(both.underflow)
    assert str(seen["told"]).startswith("122,880 numbers: 0 of them zero")


def test_another_format_redraws_the_maps_and_a_cell_is_read(page: Path) -> None:
    seen = probe(
        page,
        play="""
          const heat = all("figure.heat")[0];
          const map = heat.querySelector(".heatmap");
          const area = () => Object.fromEntries([...map.querySelectorAll("path")].map((path) =>
            [path.getAttribute("class"), [...path.getAttribute("d").matchAll(/h(\\d+)v1/g)]
              .reduce((sum, found) => sum + Number(found[1]), 0)]));
          const pick = document.querySelector("select.format");
          out.first = [pick.value, heat.querySelector("h4").textContent];
          pick.value = "e4m3fn"; pick.dispatchEvent(new Event("change"));
          out.then = [area(), heat.querySelector("h4").textContent];
          const data = JSON.parse(heat.dataset.heat);
          out.want = data.levels.e4m3fn;
          const box = map.getBoundingClientRect();
          map.dispatchEvent(new PointerEvent("pointermove", { clientX: box.right - 1, clientY: box.top + 1 }));
          out.most = heat.querySelector(".most").textContent;
          out.cell = heat.querySelector(".readout").textContent;
          pick.value = "bf16"; pick.dispatchEvent(new Event("change"));
          out.bf16 = area();
          out.nothing = heat.querySelector(".most").textContent;
        """,
    )
    assert seen["first"] == ["fp16", "Activation gradient: lost in fp16"]
    then, want = seen["then"], seen["want"]
    assert isinstance(then, list)
    assert isinstance(want, list)
    levels = "".join(want)
    assert then[0] == {f"h{one}": levels.count(one) for one in sorted(set(levels))}
    assert then[1] == "Activation gradient: lost in e4m3fn"
    assert seen["cell"] == "embedding · update 232 · over 50 %"
    assert re.fullmatch(r"The most is [\d.]+\u00a0% of embedding, at update \d+[.]", str(seen["most"]))
    assert seen["nothing"] == "Nothing is lost in bf16."
    assert seen["bf16"] == {"h0": 14 * 30}


@pytest.mark.parametrize("width", [0, 400, 360])
def test_it_fits(page: Path, width: int) -> None:
    seen = probe(page, width=width)
    assert seen["scroll"] == seen["width"] == (width or 1200)
    assert seen["wide"] == seen["outside"] == []
    assert seen["requests"] == [] or width


@pytest.mark.parametrize("width", [0, 400])
def test_hostile_records_are_inert_even_without_the_policy(width: int, tmp_path: Path) -> None:
    run_records.write(tmp_path / "r" / "runs" / "run.jsonl", run_records.hostile())
    seen = probe(build_run(tmp_path / "r"), width=width)
    assert seen["stolen"] == "no"
    assert seen["images"] == 0
    assert seen["script"] == "on"
    assert seen["scroll"] == seen["width"]
    assert seen["wide"] == []


@pytest.mark.parametrize(("width", "stacked"), [(0, False), (1081, False), (1080, True), (400, True)])
def test_what_made_steps_fail_is_all_in_view(page: Path, width: int, stacked: bool) -> None:
    """Cause, inputs and remedies were off-screen to the right on a phone."""
    seen = probe(
        page,
        width=width,
        play="""
          const box = document.querySelector("#findings .scroll");
          out.fits = box.scrollWidth <= box.clientWidth + 1;
          out.cells = [...box.querySelector("tbody tr").cells].map((cell) => {
            const at = cell.getBoundingClientRect();
            return [getComputedStyle(cell, "::before").content, at.left >= 0 && at.right <= out.width, at.top];
          });
        """,
    )
    cells = seen["cells"]
    assert seen["fits"] is True
    assert isinstance(cells, list)
    columns = ("Update", "Module and line", "Operation", "Cause", "What went in", "What to try")
    assert [name for name, _, _ in cells] == [f'"{name}"' if stacked else "none" for name in columns]
    assert all(inside for _, inside, _ in cells)
    tops = [top for _, _, top in cells]
    assert len(set(tops)) == (6 if stacked else 1)


def test_paper(page: Path, tmp_path: Path) -> None:
    target = tmp_path / "report.pdf"
    chromium.run(page, f"--print-to-pdf={target}", "--no-pdf-header-footer", dark=True)
    data = target.read_bytes()
    assert data.startswith(b"%PDF-")
    assert 4 <= len(re.findall(rb"/Type\s*/Page\b", data)) <= 10


def test_the_script_says_what_is_not_finite_as_the_file_does(tmp_path: Path) -> None:
    kept, bad = Histogram(0, [4], largest=1.0), Histogram(0, [2], infinities=1, largest=1.0)
    rows = [RangeRow("fine", "activation", "fp16", kept), RangeRow("broken", "activation", "fp16", bad)]
    records: list[Record] = [LossRecord(0, 1.0, 0.0), RangesRecord(0, 0, 0.0, 1.0, rows)]
    page = build_run(run_records.write(tmp_path / "r.jsonl", records))
    seen = probe(
        page,
        play="""
          const bad = document.querySelector(".broken"), which = document.querySelector("select.which");
          const pick = (k) => {
            which.value = k; which.dispatchEvent(new Event("change"));
            return [which.options[k].textContent, bad.hidden, bad.textContent];
          };
          out.told = [0, 1, 2].map(pick);
        """,
    )
    file = re.search(r'class="note bad broken">(.*?)</p>', page.read_text(encoding="utf-8"))
    assert file
    told = seen["told"]
    assert isinstance(told, list)
    by_name = {name: (hidden, words) for name, hidden, words in told}
    assert by_name["all together"] == (False, file[1])
    assert by_name["broken"][1].startswith("1 of 3 numbers (33.3\u00a0%) is infinite or NaN already.")
    assert by_name["fine"][0] is True

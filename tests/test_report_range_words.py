"""What the report says of ranges is true: the scale that gradients are drawn at, and what is not finite."""

from __future__ import annotations

import re
from pathlib import Path

import run_records
from mezzo.core.ranges import Histogram, RangeRow
from mezzo.core.records import Record, UpdateRecord
from mezzo.report.range_figures import exponents, heat
from mezzo.report.run import read_run
from test_report import Outline, drawn
from test_report_ranges import gathered, record, section


def test_gradients_are_drawn_at_the_scale_that_the_run_ended_with(tmp_path: Path) -> None:
    """Not at the last watched step's, and however small: the slider reaches down to it."""
    histogram = Histogram(-3, [7], largest=0.125)
    rows = [RangeRow("m", "activation gradient", "fp16", histogram)]
    for name, scales, want in (
        ("sunk", [1.0, 2.0**-14], (-24, 32, -14)),
        ("later", [2.0**16, 2.0**14], (0, 32, 14)),
        ("deep", [2.0**-30, 2.0**-30], (-30, 32, -30)),
        ("high", [2.0**40, 2.0**34], (0, 40, 34)),
        ("never", [1.0, 1.0], (0, 32, 0)),
    ):
        made: list[Record] = [record(0, rows, scales[0])]
        made += [UpdateRecord(index, 0, True, False, scale, 0.1) for index, scale in enumerate(scales)]
        content = section(read_run(run_records.write(tmp_path / f"{name}.jsonl", made)))
        slider = re.search(r'type="range" min="(-?\d+)" max="(\d+)" step="1" value="(-?\d+)"', content)
        assert slider
        assert tuple(map(int, slider.groups())) == want, name
        power = str(want[2]).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))
        assert f'Drawn at a loss scale of <span class="scaled">2{power}</span>.' in content


def test_what_is_not_finite_is_said_before_any_share() -> None:
    """A "nothing is lost" above a map of infinities, or "overflow 0" beside them, is the opposite of the truth."""
    kept, bad = Histogram(0, [4], largest=1.0), Histogram(0, [2], infinities=5, nans=1, largest=1.0)
    lost = Histogram(-40, [2], nans=2, largest=2.0**-40)

    def figures(*histograms: Histogram) -> tuple[str, str, str]:
        seen = gathered(
            *(
                record(
                    4 * step,
                    [RangeRow("m", "activation", "fp16", one), RangeRow("n", "activation", "fp16", kept)],
                )
                for step, one in enumerate(histograms)
            )
        )
        map = drawn("heat", heat("activation", seen, "fp16"))
        bars = drawn("exponents", exponents("activation", seen.of("activation"), "fp16", 0))
        return Outline(map).text, Outline(bars).text, bars

    text, told, _ = figures(kept, bad)
    assert "6 of 20 elements are infinite or NaN, in 1 of 2 tensors, first at update 4." in text
    assert "Nothing is lost" not in text
    words = (
        "6 of 20 numbers (30.0\u00a0%) are infinite or NaN already. The shares below are of the finite ones."
    )
    assert " ".join(words.split()) in told
    assert told.index("infinite or NaN already") < told.index("overflow")
    text, _, _ = figures(kept, lost)
    assert "first at update 4. Of the finite ones the most is 100" in text
    assert "Nothing is lost" not in text
    text, _, bars = figures(kept, kept)
    assert "Nothing is lost in fp16." in text
    assert re.search(r'class="note bad broken" hidden>', bars)

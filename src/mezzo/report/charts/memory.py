"""Peak memory of a training step, in bytes, beside FP32's."""

from __future__ import annotations

from mezzo.report.charts.bars import Bar, bars
from mezzo.report.markup import Markup
from mezzo.report.numbers import finite, ratio, size
from mezzo.report.reading import Comparison


def memory(comparison: Comparison, colours: dict[str, str]) -> Markup | None:
    """The figure, or None where no run recorded its memory and no candidate has a ratio."""
    peaks = {name: comparison.peak(name) for name in (comparison.baseline, *comparison.candidates)}
    ratios = {name: finite(values.get("peak_memory_ratio")) for name, values in comparison.candidates.items()}
    base = peaks[comparison.baseline]
    if base is None or not any(peaks[name] for name in ratios):
        if not any(ratios.values()):
            return None
        # Ratios alone, from a folder whose run records are gone.
        rows = [Bar("FP32", "s0", 1.0, "1.00×")]
        rows += [Bar(name, colours[name], found, ratio(found)) for name, found in ratios.items()]
        return bars("Peak memory", "Times FP32; shorter is smaller.", rows, reference=1.0)
    rows = [Bar("FP32", "s0", base, size(base))]
    for name, found in ratios.items():
        rows.append(
            Bar(
                name,
                colours[name],
                peaks[name],
                size(peaks[name]),
                f"{ratio(found)} of FP32" if found else "",
            )
        )
    hows = sorted({run.memory.how for run in comparison.runs if run.memory})
    return bars(
        "Peak memory of a training step",
        f"By {' and '.join(hows)}; shorter is smaller.",
        rows,
        reference=base,
    )

"""The exponents of a kind of tensor: how often each occurs, over strips that show what each format can hold.

Drawn for all tensors together, and small for each in a table. A script picks one tensor, and moves gradients by
another loss scale; without one the figure shows all of them, gradients at the loss scale of the run's last update.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass

from mezzo.core.ranges import GRADIENTS, WHAT, Histogram
from mezzo.report.markup import Markup, element, printable, prose
from mezzo.report.numbers import count, counted, percent, significant
from mezzo.report.ranges import FORMATS, LIMITS, Track, together

ROWS = 150
"""Tensors listed under a figure; those with the most to lose come first."""
DECADES = 6
"""Shares from 10 to the minus this up to 1 have a height; a smaller one is a sliver."""
_PERCENT = {0: "100\u00a0%", 2: "1\u00a0%", 4: "0.01\u00a0%", 6: "10⁻⁴\u00a0%"}
_LEAST, _MOST = -72, 44
_STRIP = 17


@dataclass(frozen=True)
class Window:
    """The exponents from `low` up to and without `high`: what a figure shows. What lies beyond is at its edge."""

    low: int
    high: int

    def place(self, exponent: float) -> float:
        """Where it lies, between 0 and 1."""
        return min(1.0, max(0.0, (exponent - self.low) / (self.high - self.low)))

    def bins(self, histogram: Histogram, shift: int) -> list[int]:
        """A count for each exponent of the window, of numbers times ``2**shift``."""
        found = [0] * (self.high - self.low)
        for place, number in enumerate(histogram.counts):
            at = histogram.lowest + place + shift - self.low
            found[min(len(found) - 1, max(0, at))] += number
        return found


def exponents(what: str, tracks: Sequence[Track], format: str, shift: int, series: str) -> Markup | None:
    """The figure of one kind, or None where it has no tensor.

    Args:
        what: a key of `WHAT`.
        tracks: the tensors, in the model's order.
        format: the one whose ends are drawn, and by which the table is sorted.
        shift: log2 of the loss scale at which gradients are drawn.
        series: the class of the bars' colour.
    """
    if not tracks:
        return None
    moves = what in GRADIENTS
    shift = shift if moves else 0
    total = together(tracks)
    window = _window(total, shift)
    listed = sorted(tracks, key=lambda track: -_gone(track, format, shift))[:ROWS]
    data = {
        "low": window.low,
        "high": window.high,
        "moves": moves,
        "limits": {name: [one.zero, one.normal, one.overflow] for name, one in LIMITS.items()},
        "names": [printable(track.label) for track in listed],
        "rows": [_plain(total), *(_plain(track.total) for track in listed)],
    }
    title = what.capitalize()
    drawing = element(
        "svg",
        element("title", f"{title}: exponents"),
        element("desc", _described(total, shift)),
        _grid(window),
        element(
            "svg",
            element("path", d=bars(window.bins(total, shift)), class_=f"fill {series} bins"),
            viewBox="0 0 1000 1000",
            preserveAspectRatio="none",
            width="100%",
            height="100%",
        ),
        _ends(window, format),
        class_="chart middling",
        role="img",
    )
    scale = (
        [" Drawn at a loss scale of ", element("span", _power(shift), class_="scaled"), "."] if moves else []
    )
    return element(
        "figure",
        element(
            "figcaption",
            element("h4", title),
            element("p", prose(f"{_sentence(WHAT[what])}."), scale, class_="unit"),
        ),
        element("label", "Tensor ", element("select", class_="which"), class_="pick", hidden=True),
        drawing,
        _strips(window),
        element("p", _not_finite(total), class_="note bad broken", hidden=not _broken(total)),
        _shares(total, shift),
        element("p", _told(total), class_="note told"),
        _listed(listed, len(tracks), format, shift, window, series),
        class_="plot exponents",
        data_exponents=json.dumps(data, separators=(",", ":")),
    )


def bars(bins: Sequence[int]) -> str:
    """One path for all bars, in a drawing of 1000 by 1000: a bar's height is the logarithm of its share.

    >>> bars([0, 1])
    'M500 1000V0H1000V1000Z'
    """
    total = sum(bins)
    parts = []
    for place, number in enumerate(bins):
        if number:
            left, right = (_whole(1000 * edge / len(bins)) for edge in (place, place + 1))
            height = max(0.004, 1 + math.log10(number / total) / DECADES)
            parts.append(f"M{left} 1000V{_whole(1000 * (1 - height))}H{right}V1000Z")
    return "".join(parts)


def _whole(value: float) -> int:
    """Rounded half up, as the script's Math.round does."""
    return math.floor(value + 0.5)


def _window(total: Histogram, shift: int) -> Window:
    """Everything that occurs, and the ends of fp16 and the fp8 formats in any case."""
    first, last = total.lowest + shift, total.lowest + len(total.counts) + shift
    return Window(max(_LEAST, min(first - 1, -28)), min(_MOST, max(last + 1, 20)))


def _broken(histogram: Histogram) -> int:
    return histogram.infinities + histogram.nans


def _not_finite(histogram: Histogram) -> str:
    """What no share tells, since shares are of finite numbers."""
    broken, elements = _broken(histogram), histogram.elements
    share = share_text(broken / elements if elements else 0.0)
    are = "is" if broken == 1 else "are"
    return (
        f"{broken:,} of {counted(elements, 'number')} ({share}) {are} infinite or NaN already. "
        "The shares below are of the finite ones."
    )


def _plain(histogram: Histogram) -> list[float]:
    """A histogram for the script: lowest exponent, zeros, infinities and NaNs, largest, and the counts."""
    return [
        histogram.lowest,
        histogram.zeros,
        _broken(histogram),
        float(f"{histogram.largest:.4g}"),
        *histogram.counts,
    ]


def _gone(track: Track, format: str, shift: int) -> float:
    shares = track.total.shares(format, shift)
    return (shares.underflow + shares.overflow if shares else 0.0) + (1.0 if _broken(track.total) else 0.0)


def _described(total: Histogram, shift: int) -> str:
    words = []
    for name in FORMATS:
        shares = total.shares(name, shift)
        if shares:
            words.append(
                f"in {name} {percent(shares.underflow)} become zero and {percent(shares.overflow)} overflow"
            )
    told = ("Of all tensors together, " + "; ".join(words) + ".") if words else "No finite number but zero."
    return f"{_not_finite(total)} {told}" if _broken(total) else told


def _told(total: Histogram) -> str:
    return (
        f"{counted(total.elements, 'number')}: {count(total.zeros)} of them zero, "
        f"{count(_broken(total))} infinite or NaN, the largest {significant(total.largest, 3)}."
    )


def _grid(window: Window) -> list[Markup]:
    parts = []
    for decade in range(0, DECADES + 1, 2):
        top = f"{100 * decade / DECADES:.2f}%"
        parts.append(element("line", x1=0, x2="100%", y1=top, y2=top, class_="grid"))
        label = _PERCENT[decade]
        parts.append(element("text", label, x=-6, y=top, dy="0.32em", class_="label end"))
    every = 10 if window.high - window.low > 36 else 5
    for exponent in range(-(-window.low // every) * every, window.high + 1, every):
        left = f"{100 * window.place(exponent):.2f}%"
        parts.append(element("line", x1=left, x2=left, y1=0, y2="100%", class_="grid"))
        parts.append(element("text", _power(exponent), x=left, y="100%", dy="1.45em", class_="label middle"))
    parts.append(element("line", x1=0, x2="100%", y1="100%", y2="100%", class_="base"))
    return parts


def _ends(window: Window, format: str) -> list[Markup]:
    """Where numbers of the run's format begin and end."""
    limits = LIMITS.get(format)
    if limits is None:
        return []
    parts = []
    for edge, words in (
        (limits.zero, f"below: zero in {format}"),
        (limits.overflow, f"from here on: beyond {format}"),
    ):
        if window.low < edge < window.high:
            left = f"{100 * window.place(edge):.2f}%"
            parts.append(
                element(
                    "line", element("title", words), x1=left, x2=left, y1=0, y2="100%", class_="edge skip"
                )
            )
    return parts


def _strips(window: Window) -> Markup:
    """A strip for each format: pale where it has fewer bits, full where it has all."""
    parts = []
    for place, (name, limits) in enumerate(LIMITS.items()):
        top = place * _STRIP
        parts.append(element("text", name, x=-6, y=top + 9, dy="0.32em", class_="label end"))
        for start, stop, style in (
            (limits.zero, limits.normal, "subnormal"),
            (limits.normal, limits.overflow, "normal"),
        ):
            left, right = window.place(start), window.place(stop)
            if right > left:
                parts.append(
                    element(
                        "rect",
                        element("title", f"{name}: {style} from 2^{start} to 2^{stop}"),
                        x=f"{100 * left:.2f}%",
                        y=top + 2,
                        width=f"{100 * (right - left):.2f}%",
                        height=_STRIP - 4,
                        class_=f"strip {style}",
                    )
                )
    return element(
        "svg", parts, class_="strips", height=_STRIP * len(LIMITS), role="img", aria_label="What formats hold"
    )


def _shares(total: Histogram, shift: int) -> Markup:
    head = ("In", "to zero", "subnormal", "kept", "overflow")
    body = []
    for name in FORMATS:
        shares = total.shares(name, shift)
        cells = (
            [shares.underflow, shares.subnormal, shares.normal, shares.overflow] if shares else [math.nan] * 4
        )
        body.append(
            element(
                "tr",
                element("th", name, scope="row"),
                [element("td", share_text(cell)) for cell in cells],
            )
        )
    return element(
        "table",
        element("thead", element("tr", [element("th", word, scope="col") for word in head])),
        element("tbody", body),
        class_="figures shares",
    )


def share_text(share: float) -> str:
    """A share as a percentage that never rounds something to nothing: ``0``, ``<0.01 %``, ``3.2 %``."""
    if math.isnan(share):
        return "–"
    if share == 0:
        return "0"
    shown = 100 * share
    if shown < 0.01:
        return "<0.01\u00a0%"
    if shown >= 99.95:
        return "100\u00a0%" if share == 1 else ">99.9\u00a0%"
    return f"{shown:.2f}\u00a0%" if shown < 10 else f"{shown:.1f}\u00a0%"


def _listed(
    tracks: Sequence[Track], all_of_them: int, format: str, shift: int, window: Window, series: str
) -> Markup:
    """Each tensor with its own small histogram and what the format makes of it."""
    head = ("Tensor", "Exponents", f"to zero in {format}", "overflow", "largest", "not finite")
    body = []
    for track in tracks:
        shares = track.total.shares(format, shift)
        broken = _broken(track.total)
        body.append(
            element(
                "tr",
                element("th", element("code", track.label), scope="row"),
                element("td", _small(track.total, window, shift, format, series)),
                element("td", share_text(shares.underflow if shares else math.nan)),
                element("td", share_text(shares.overflow if shares else math.nan)),
                element("td", significant(track.total.largest, 3)),
                element("td", count(broken)),
                class_="departs" if broken else None,
            )
        )
    table = element(
        "table",
        element("thead", element("tr", [element("th", word, scope="col") for word in head])),
        element("tbody", body),
        class_="figures",
    )
    name = f"Each of {counted(all_of_them, 'tensor')}"
    if all_of_them > len(tracks):
        name = f"The {len(tracks):,} with the most to lose, of {all_of_them:,} tensors"
    return element(
        "details",
        element("summary", name),
        element("div", table, class_="scroll", tabindex=0, role="region", aria_label=name),
        class_="numbers",
    )


def _small(total: Histogram, window: Window, shift: int, format: str, series: str) -> Markup:
    """One outline in a unit for each exponent, from the first that occurs to the last."""
    bins = window.bins(total, shift)
    number = sum(bins)
    used = [place for place, one in enumerate(bins) if one]
    parts: list[Markup] = []
    if used:
        path = f"M{used[0]} 20"
        for place in range(used[0], used[-1] + 1):
            share = bins[place] / number
            height = max(0.02, 1 + math.log10(share) / DECADES) if share else 0.0
            path += f"V{20 - round(20 * height)}h1"
        parts.append(element("path", d=path + "V20Z", class_=f"fill {series}"))
    limits = LIMITS.get(format)
    for edge in (limits.zero, limits.overflow) if limits else ():
        if window.low < edge < window.high:
            parts.append(element("path", d=f"M{edge - window.low} 0V20", class_="edge skip"))
    return element(
        "svg",
        parts,
        viewBox=f"0 0 {len(bins)} 20",
        preserveAspectRatio="none",
        width=180,
        height=20,
        class_="small",
        aria_hidden="true",
    )


def _sentence(words: str) -> str:
    return words[0].upper() + words[1:]


def _power(exponent: int) -> str:
    return "2" + str(exponent).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))

"""A run's exponent histograms, gathered while its records are read: for each tensor their sum, and of each step only
the share that each format would lose. A run of 200 modules watched a thousand times writes over a million of them.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import reduce

from mezzo.core.formats import named
from mezzo.core.ranges import GRADIENTS, Histogram, Shares, label_of, limits_of, shift_of
from mezzo.core.records import RangesRecord

FORMATS = ("fp16", "bf16", "e4m3fn", "e5m2")
"""The formats that a report shows, whichever of them the run used."""
RATIO = "update ratio"


LIMITS = {form.name: limits_of(form) for form in map(named, FORMATS) if form.bits == 16}
"""Of the formats that have the run's loss scale. In the others each tensor has a scale of its own, as in fp8."""


@dataclass
class Track:
    """One tensor over the watched steps: arrays hold one value per step (`lost`: NaN without a finite number)."""

    label: str  # path of the module, with the parameter's name if it is a parameter's
    what: str  # a key of `mezzo.core.ranges.WHAT`
    format: str  # its format in the run
    total: Histogram = field(default_factory=Histogram)  # of all steps; of gradients without the loss scale
    columns: array[int] = field(default_factory=lambda: array("l"))  # steps, as places in `Ranges.updates`
    lost: dict[str, array[float]] = field(default_factory=lambda: {name: array("f") for name in FORMATS})
    broken: array[int] = field(default_factory=lambda: array("q"))  # elements infinite or NaN (ratios: NaN)

    def add(self, column: int, histogram: Histogram, shift: int) -> None:
        """One step's histogram, of numbers that the run multiplied by ``2**shift``."""
        self.total = self.total.plus(histogram)
        self.columns.append(column)
        # An infinite ratio is an update of a weight that was 0, which is not an error.
        self.broken.append(histogram.nans + (0 if self.what == RATIO else histogram.infinities))
        for name in FORMATS:
            if self.what == RATIO:
                share = histogram.lost(name)
            else:
                shares = shares_in(name, histogram, shift)
                share = shares.underflow + shares.overflow if shares else None
            self.lost[name].append(math.nan if share is None else share)

    def mean_lost(self, name: str) -> float:
        """Mean of the shares lost in a format over the steps that have one; NaN if none has."""
        shares = [share for share in self.lost[name] if not math.isnan(share)]
        return sum(shares) / len(shares) if shares else math.nan

    def worst_lost(self, name: str) -> tuple[float, int]:
        """The largest share lost in a format and its first column; -1 and -1 if there is none."""
        found = [(share, -at) for share, at in zip(self.lost[name], self.columns) if not math.isnan(share)]
        share, at = max(found, default=(-1.0, 1))
        return share, -at


@dataclass
class Ranges:
    """All tracks of a run, in the order in which they were first seen."""

    updates: list[int] = field(default_factory=list)  # index of the update of each watched step
    scales: list[float] = field(default_factory=list)  # the loss scale of each watched step
    tracks: dict[tuple[int, str, str, str], Track] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.tracks)

    def add(self, record: RangesRecord) -> None:
        column = len(self.updates)
        self.updates.append(record.update)
        self.scales.append(record.loss_scale)
        shift = shift_of(record.loss_scale)
        for row in record.rows:
            key = (record.optimizer, row.what, row.module, row.name)
            track = self.tracks.get(key)
            if track is None:
                label = label_of(row, record.optimizer)
                self.tracks[key] = track = Track(label, row.what, row.format)
            track.format = row.format
            track.add(column, row.histogram, shift if row.what in GRADIENTS else 0)

    def of(self, what: str) -> list[Track]:
        """The tracks of one kind, in the model's order: gradients, recorded backwards, take the activations' order."""
        found = [track for track in self.tracks.values() if track.what == what]
        if what == "activation gradient":
            forward = {track.label: place for place, track in enumerate(self.of("activation"))}
            found.sort(key=lambda track: forward.get(track.label, len(forward)))
        return found


def together(tracks: Sequence[Track], scaled_to: str = "") -> Histogram:
    """The sum of all tensors, each scaled to a format if one is given."""
    every = (track.total.scaled_to(scaled_to) if scaled_to else track.total for track in tracks)
    return reduce(Histogram.plus, every, Histogram())


def shares_in(name: str, histogram: Histogram, shift: int) -> Shares | None:
    """What a format makes of a tensor: at a loss scale of ``2**shift``, or with the tensor's own scale."""
    return histogram.shares(name, shift) if name in LIMITS else histogram.scaled_to(name).shares(name)

"""The search for a batch size, as a pure function: by table, and by property over every memory that only grows."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mezzo.core.byte_counts import parse_bytes, written_bytes
from mezzo.core.errors import UsageError
from mezzo.pytorch.batch_size import (
    BEYOND,
    OUT_OF_MEMORY,
    OVER,
    BatchSizeResult,
    NothingFitsError,
    Search,
    Trial,
    columns,
    predicted_bytes,
    unchanging,
)


def measured(memory: Callable[[int], int], limit: int) -> Callable[[int], Trial]:
    """A device that says what each size takes."""

    def attempt(size: int) -> Trial:
        peak = memory(size)
        fits = peak <= limit
        return Trial(size, fits, peak, size / 100 if fits else None, "" if fits else OVER)

    return attempt


def failing(largest: int) -> Callable[[int], Trial]:
    """A device that only fails, beyond `largest`."""
    return lambda size: Trial(size, size <= largest, why="" if size <= largest else OUT_OF_MEMORY)


def run(search: Search, attempt: Callable[[int], Trial]) -> BatchSizeResult:
    trials: list[Trial] = []
    while (size := search.next_size(trials, search.limit)) is not None:
        trials.append(attempt(size))
    return search.result(trials, search.limit, "cpu")


def sizes(result: BatchSizeResult) -> list[int]:
    return [trial.size for trial in result.trials]


def largest(result: BatchSizeResult) -> int:
    return result.largest if result.fits else 0


# settings, what a batch takes, the sizes that are tried in order
MEASURED = [
    ({"limit": 1000}, lambda n: 10 * n, [8, 16, 32, 64, 100, 101]),
    ({"limit": 1000}, lambda n: 500 + 10 * n, [8, 13, 26, 50, 51]),  # 13: all that a line through zero dares
    ({"limit": 1000, "multiple_of": 8}, lambda n: 10 * n, [8, 16, 32, 64, 96, 104]),
    ({"limit": 1000, "start": 100}, lambda n: 10 * n, [100, 101]),
    ({"limit": 1000, "start": 400}, lambda n: 10 * n, [400, 100, 250, 101]),
    ({"limit": 1000, "start": 1}, lambda n: 600 + 150 * n, [1, 2, 3]),
    ({"limit": 1000, "start": 1}, lambda n: 400 + 300 * n, [1, 2]),  # 3 would take 1300: never tried
    ({"limit": 1000, "start": 4}, lambda n: 2000, [4, 2, 1]),
    ({"limit": 1000, "start": 5, "max_size": 20}, lambda n: 10 * n, [5, 10, 20]),
    ({"limit": 1000, "start": 50, "max_size": 20}, lambda n: 10 * n, [20]),
    ({"limit": 1000, "max_size": 23, "multiple_of": 8}, lambda n: 10 * n, [8, 16]),
    ({"limit": 10**9, "start": 3, "multiple_of": 4}, lambda n: 10**8 * n, [4, 8]),
    ({"limit": 1000, "factor": 4.0}, lambda n: 10 * n, [8, 32, 100, 101]),
]


@pytest.mark.parametrize(("how", "memory", "tried"), MEASURED)
def test_the_sizes_that_are_tried_where_bytes_are_measured(
    how: dict[str, Any], memory: Callable[[int], int], tried: list[int]
) -> None:
    assert sizes(run(Search(**how), measured(memory, how["limit"]))) == tried


FAILING = [
    ({}, 20, [8, 16, 32, 24, 20, 22, 21]),
    ({"start": 8}, 3, [8, 4, 2, 3]),
    ({"start": 8}, 0, [8, 4, 2, 1]),
    ({"multiple_of": 8}, 20, [8, 16, 32, 24]),
    ({"multiple_of": 8, "start": 1}, 7, [8]),
    ({"start": 1, "max_size": 5}, 100, [1, 2, 4, 5]),
]


@pytest.mark.parametrize(("how", "most", "tried"), FAILING)
def test_the_sizes_that_are_tried_where_only_failure_tells(
    how: dict[str, Any], most: int, tried: list[int]
) -> None:
    result = run(Search(**how), failing(most))
    assert sizes(result) == tried
    multiple = how.get("multiple_of", 1)
    assert largest(result) == min(most, how.get("max_size", most)) // multiple * multiple


def test_the_size_that_is_not_tried_is_named() -> None:
    memory = measured(lambda n: 400 + 300 * n, 1000)
    result = run(Search(start=1, limit=1000), memory)
    assert result.refused == 3
    assert result.notes == ("size 3 was not tried: it is predicted to take 1.3 kB, far more than the limit",)
    assert Search(limit=1000).refused([], 1000) is None
    assert run(Search(start=1, limit=1000, max_size=2), memory).refused is None
    assert sizes(run(Search(start=1, limit=1000), measured(lambda n: 900 + 80 * n, 1000))) == [1, 2]


@st.composite
def searches(draw: st.DrawFn) -> Search:
    multiple = draw(st.integers(1, 64))
    return Search(
        start=draw(st.integers(1, 300)),
        multiple_of=multiple,
        factor=draw(st.sampled_from([1.2, 1.5, 2.0, 3.0])),
        max_size=draw(st.none() | st.integers(multiple, 20_000)),
    )


def naive(search: Search, memory: Callable[[int], int], limit: int, most: int = 20_000) -> int:
    most = min(most, search.max_size or most)
    fitting = [n for n in range(search.multiple_of, most + 1, search.multiple_of) if memory(n) <= limit]
    return max(fitting, default=0)


def bound(search: Search, answer: int) -> float:
    """Growth or shrinking by the factor, halving by turns with aiming, and a few."""
    span = max(answer, search.start, search.multiple_of) / min(max(answer, 1), search.start)
    growth = math.log(span) / math.log(search.factor) + math.log(search.multiple_of + 1) / math.log(
        search.factor
    )
    return growth + 2 * math.log2(max(answer, search.start, 2)) + 10


@settings(max_examples=150, deadline=None)
@given(searches(), st.integers(0, 20_000))
def test_where_failure_tells_the_answer_is_the_naive_one(search: Search, most: int) -> None:
    if search.max_size is None:
        search = replace(search, max_size=40_000 // search.multiple_of * search.multiple_of)
    found = run(search, failing(most))
    answer = naive(search, lambda n: int(n > most), 0)
    assert largest(found) == answer
    assert len(found.trials) <= bound(search, answer)
    assert len(set(sizes(found))) == len(found.trials)


@settings(max_examples=150, deadline=None)
@given(searches(), st.integers(0, 10**6), st.integers(1, 1000), st.integers(1, 3 * 10**6))
def test_on_a_line_the_answer_is_the_naive_one_and_nothing_far_beyond_is_tried(
    search: Search, fixed: int, each: int, limit: int
) -> None:
    def memory(n: int) -> int:
        return fixed + each * n

    search = replace(search, limit=limit, max_size=min(search.max_size or 20_000, 20_000))
    found = run(search, measured(memory, limit))
    answer = naive(search, memory, limit)
    assert largest(found) == answer
    assert len(found.trials) <= bound(search, answer)
    for before, trial in enumerate(found.trials):
        if before >= 2 and found.trials[0].fits:
            assert memory(trial.size) <= limit * (1 + BEYOND) + 1


@st.composite
def growing(draw: st.DrawFn) -> list[int]:
    """Bytes at sizes 1, 2, ... that never fall: lines, jumps, plateaus."""
    steps = draw(st.lists(st.integers(0, 50) | st.sampled_from([0, 0, 500]), min_size=1, max_size=40))
    total, table = draw(st.integers(1, 2000)), []
    for number in range(400):
        total += steps[number % len(steps)] + (number % 7 == 0)
        table.append(total)
    return table


@settings(max_examples=150, deadline=None)
@given(growing(), searches(), st.integers(1, 8000))
def test_whatever_grows_the_answer_fits_and_no_larger_one_was_seen_to(
    table: list[int], search: Search, limit: int
) -> None:
    def memory(n: int) -> int:
        return table[n - 1]

    most = min(search.max_size or 400, 400)
    if most < search.multiple_of:
        return
    search = replace(search, limit=limit, max_size=most)
    found = run(search, measured(memory, limit))
    assert len(found.trials) <= bound(search, naive(search, memory, limit, 400)) + 20
    if any("no longer grow" in note for note in found.notes):
        return
    if not found.fits:
        assert memory(search.multiple_of) > limit
        return
    size = found.largest
    assert memory(size) <= limit
    above = size + search.multiple_of
    proven = any(trial.size == above and not trial.fits for trial in found.trials)
    assert proven or found.refused == above or above > most


def test_data_that_holds_no_more_end_the_search() -> None:
    result = run(Search(limit=10**9), measured(lambda n: 100 * min(n, 50), 10**9))
    assert sizes(result) == [8, 16, 32, 64, 128, 256]
    assert "from size 64 on the bytes no longer grow" in result.notes[0]
    assert result.largest == 32  # 64 may be more than the data hold
    partial = {8: 80, 16: 160, 32: 320, 64: 200, 128: 200}  # a last batch, smaller than the others
    assert run(Search(limit=10**9), measured(partial.__getitem__, 10**9)).largest == 32


def test_bytes_that_never_change_end_the_search() -> None:
    result = run(Search(limit=1000), measured(lambda n: 500, 1000))
    assert sizes(result)[-1] == 512
    assert unchanging(result.trials)
    assert not result.notes
    assert not unchanging(run(Search(), failing(100)).trials)  # bytes that were not measured prove nothing


def test_bytes_are_predicted_on_the_line_through_the_nearest_sizes() -> None:
    trials = [Trial(8, True, 180), Trial(16, True, 260), Trial(64, False, 1240)]
    assert predicted_bytes(trials, 40) == 260 + 24 * (1240 - 260) / 48
    assert predicted_bytes(trials[:2], 32) == 420
    assert predicted_bytes(trials[:1], 16) == 360
    assert predicted_bytes([], 16) == 0


def test_the_fastest_is_among_those_that_fit() -> None:
    speeds = {8: 1.0, 16: 1.0, 32: 4.0, 64: None}
    result = BatchSizeResult(tuple(Trial(n, n < 64, n, s) for n, s in speeds.items()))
    assert (result.fastest, result.largest) == (16, 32)
    assert BatchSizeResult((Trial(8, True, 1),)).fastest == 8


WRONG = [
    ({"start": 0}, "start=0: give 1 or more"),
    ({"multiple_of": 0}, "multiple_of=0"),
    ({"factor": 1.0}, "a number above 1"),
    ({"factor": math.inf}, "a number above 1"),
    ({"factor": math.nan}, "a number above 1"),
    ({"limit": 0}, "give 1 byte or more"),
    ({"max_size": 7, "multiple_of": 8}, "raise max_size"),
]


@pytest.mark.parametrize(("how", "says"), WRONG)
def test_settings_out_of_range(how: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        Search(**how)


# what was found, the numbers that the sentence for the user names
SENTENCES: list[tuple[BatchSizeResult, list[str]]] = [
    (run(Search(limit=1000), measured(lambda n: 10 * n, 1000)),
     ["100 is the largest that fits", "1 kB of 1 kB", "100 samples"]),
    (run(Search(max_size=16), failing(100)), ["16 is the largest that was tried, and it fits"]),
    (run(Search(start=2), failing(0)), ["nothing fits", "1 does not run (out of memory)"]),
    (run(Search(limit=5), measured(lambda n: 10 * n, 5)), ["nothing fits", "1 takes 10 B", "limit is 5 B"]),
    (BatchSizeResult((Trial(8, True, 10, 1.0), Trial(16, True, 20, 4.0), Trial(17, False))),
     ["16 is the largest that fits (20 B)", "batch size 8 trains more", ": 8, against 4."]),
    (BatchSizeResult((Trial(8, True, 10, 4.0), Trial(16, True, 20, 0.004), Trial(17, False))),
     ["most samples per second: 4000."]),
]  # fmt: skip


@pytest.mark.parametrize(("result", "names"), SENTENCES)
def test_what_is_recommended(result: BatchSizeResult, names: list[str]) -> None:
    assert all(name in result.sentence() for name in names)
    assert str(result).endswith(result.sentence())
    if result.fits:
        assert f"--batch={result.largest} is" in result.sentence("--batch=")
        assert result.to_dict()["largest"] == result.largest
        assert result.fastest <= result.largest
    else:
        assert result.to_dict()["largest"] is None
        for which in ("largest", "fastest"):
            with pytest.raises(NothingFitsError, match="nothing fits"):
                getattr(result, which)


def test_a_result_is_a_table_of_all_sizes_in_order() -> None:
    result = replace(run(Search(limit=1000), measured(lambda n: 10 * n, 1000)), notes=("look here",))
    text = str(result).splitlines()
    assert text[0].split() == ["size", "peak", "steps/s", "samples/s", "fits"]
    assert [line.split()[0] for line in text[1:7]] == ["8", "16", "32", "64", "100", "101"]
    assert text[6].split(maxsplit=5)[5] == "no: over the limit"
    assert text[7] == "note: look here"
    assert columns([("a", "b"), ("100", "b")]) == ["  a  b", "100  b"]


BYTES = [
    ("4GiB", 4 * 2**30), ("4 gib", 4 * 2**30), ("1.5 GB", 1_500_000_000), ("7", 7), (7, 7), ("0.5kB", 500),
    ("3TiB", 3 * 2**40), (".5MiB", 2**19), ("12345678901234567", 12345678901234567),
]  # fmt: skip


@pytest.mark.parametrize(("text", "count"), BYTES)
def test_bytes_are_read(text: str | int, count: int) -> None:
    assert parse_bytes(text) == count


@pytest.mark.parametrize("text", ["", "GB", "4 PB", "-1", "4G", "1e9", "nan", "0", "0.1B", 0, -5])
def test_what_is_no_number_of_bytes(text: str | int) -> None:
    with pytest.raises(UsageError, match=r"is no number of bytes|leaves no byte"):
        parse_bytes(text)


WRITTEN = [
    (1, "1 B"), (999, "999 B"), (1000, "1 kB"), (999_499, "999 kB"), (999_500, "1 MB"), (581_234_567, "581 MB"),
    (4 * 2**30, "4.29 GB"), (5 * 10**15, "5e+03 TB"),
]  # fmt: skip


@pytest.mark.parametrize(("count", "text"), WRITTEN)
def test_bytes_are_written(count: int, text: str) -> None:
    assert written_bytes(count) == text

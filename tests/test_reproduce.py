"""The frame of `mezzo reproduce`: every way an experiment can end, what it leaves behind, and the table of findings."""

from __future__ import annotations

import html.parser
import itertools
import json
import math
import re
import struct
import xml.etree.ElementTree as ET
from importlib.resources import files
from pathlib import Path
from typing import Any

import matplotlib
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mezzo.core.errors import UnknownNameError, UsageError
from mezzo.reproduce import NAMES, chosen, expected, figures, load, outputs
from mezzo.reproduce.expected import Expected
from mezzo.reproduce.experiment import Experiment
from mezzo.reproduce.run import Result, run_all
from pretended_experiments import Heard, draw_plainly, experiment, finding

really_draw = figures.draw


@pytest.fixture(autouse=True)
def _quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(figures, "draw", draw_plainly)


def run(
    folder: Path, *experiments: Experiment, table: dict[str, Any] | None = None, **given: Any
) -> list[Result]:
    """Run experiments that are handed over, against a table that is."""
    found = {one.name: one for one in experiments}
    given.setdefault("watcher", Heard())
    tables = {name: {"quick": one, "full": one} for name, one in (table or {}).items()}
    return run_all(list(found), folder, find=found.__getitem__, table=tables, **{"quick": True, **given})


# what is listed, what holds -> the finding's fate, whether the run passes
FATES = [
    (Expected(("a",)), True, "holds", True),
    (Expected(("a",)), False, "lost", False),
    (Expected((), {"a": "too small"}), False, "known", True),
    (Expected((), {"a": "too small"}), True, "gained", True),
    (Expected(), True, "unlisted", True),
    (Expected(), False, "unlisted", True),
]


@pytest.mark.parametrize(("listed", "holds", "fate", "passed"), FATES, ids=lambda value: str(value))
def test_what_becomes_of_a_finding(
    listed: Expected, holds: bool, fate: str, passed: bool, tmp_path: Path
) -> None:
    (result,) = run(tmp_path, experiment("one", finding("a", holds=holds)), table={"one": listed})
    assert result.record is not None
    (found,) = result.record["findings"]
    assert (found["fate"], result.passed) == (fate, passed)
    assert found["why"] == listed.not_shown.get("a", "")
    assert result.lost == (() if passed else ("a",))


def test_a_finding_that_nothing_was_said_of_is_lost(tmp_path: Path) -> None:
    (result,) = run(tmp_path, experiment("one", finding("a")), table={"one": Expected(("a", "b"))})
    assert result.lost == ("b",)
    assert not result.passed


def test_the_table_of_the_effort_is_used(tmp_path: Path) -> None:
    one = experiment("one", finding("a", holds=False))
    table = {"one": {"quick": Expected((), {"a": "small"}), "full": Expected(("a",))}}
    passed = {
        quick: run_all(["one"], tmp_path, Heard(), quick=quick, find=lambda _: one, table=table)[0].passed
        for quick in (True, False)
    }
    assert passed == {True: True, False: False}


def test_what_is_left_behind(tmp_path: Path) -> None:
    heard = Heard()
    run(tmp_path, experiment("one", finding("a")), table={"one": Expected(("a",))}, watcher=heard)
    assert sorted(path.name for path in (tmp_path / "one").iterdir()) == [
        "figure.png",
        "figure.svg",
        "numbers.json",
    ]
    record = json.loads((tmp_path / "one" / "numbers.json").read_text())
    assert record["experiment"] == "one"
    assert record["source"] == "nowhere, section 1"
    assert record["effort"] == record["numbers"]["size"] == "quick"
    assert record["findings"][0] == {
        "name": "a",
        "expected": "a is so.",
        "seen": "a is 42.",
        "holds": True,
        "fate": "holds",
        "why": "",
    }
    assert record["seconds"] >= 0
    assert record["machine"]["cores"] >= 1
    assert record["versions"]["torch"].startswith(torch.__version__.partition("+")[0])
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert list(summary["experiments"]) == ["one"]
    assert "numbers" not in summary["experiments"]["one"]
    assert heard.told == [
        ("begin", "one", 1, 1),
        ("stage", "training, fp16", 0.25),
        ("stage", "training, bf16", 0.75),
        ("end", "one"),
    ]


def test_the_page_has_all_that_lies_in_the_folder(tmp_path: Path) -> None:
    run(tmp_path, experiment("one", finding("a")))
    run(tmp_path, experiment("two", finding("b")))
    assert list(json.loads((tmp_path / "summary.json").read_text())["experiments"]) == ["one", "two"]
    page = (tmp_path / "index.html").read_text()
    assert page.count("data:image/svg+xml;base64,") == 2
    assert "a is 42." in page
    assert "b is 42." in page


def test_a_file_that_is_no_record_is_passed_over(tmp_path: Path) -> None:
    for name, text in (("broken", "{"), ("list", "[]"), ("other", '{"schema": "theirs"}')):
        (tmp_path / name).mkdir()
        (tmp_path / name / "numbers.json").write_text(text)
    run(tmp_path, experiment("one", finding("a")))
    assert list(json.loads((tmp_path / "summary.json").read_text())["experiments"]) == ["one"]


def test_one_that_crashes_does_not_stop_the_others(tmp_path: Path) -> None:
    run(tmp_path, experiment("one", finding("of an earlier run")))
    first, second = run(
        tmp_path, experiment("one", ends=RuntimeError("no <data>")), experiment("two", finding("b"))
    )
    assert (first.passed, first.record, first.reason) == (False, None, "RuntimeError: no <data>")
    assert "Traceback" in first.trace
    assert second.passed
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert list(summary["experiments"]) == ["two"]
    assert summary["crashed"] == {"one": "RuntimeError: no <data>"}
    page = (tmp_path / "index.html").read_text()
    assert "no &lt;data&gt;" in page
    assert "of an earlier run" not in page


def test_an_experiment_that_cannot_be_found_is_a_crash(tmp_path: Path) -> None:
    def find(name: str) -> Experiment:
        raise ModuleNotFoundError(f"No module named {name!r}")

    (result,) = run_all(["one"], tmp_path, Heard(), quick=True, find=find, table={})
    assert result.reason == "ModuleNotFoundError: No module named 'one'"


def test_numbers_outlive_a_figure_that_cannot_be_drawn(tmp_path: Path) -> None:
    def draw(numbers: dict[str, Any], figure: Any) -> None:
        raise KeyError("curve")

    run(tmp_path, experiment("one", finding("a")))
    (result,) = run(tmp_path, experiment("one", finding("a"), draw=draw))
    assert not result.passed
    assert "could not be drawn: KeyError: 'curve'" in result.reason
    assert [path.name for path in (tmp_path / "one").iterdir()] == ["numbers.json"]  # no old figure either


def test_what_is_finished_outlives_an_interrupt(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, experiment("one", finding("a")), experiment("two", ends=KeyboardInterrupt()))
    assert (tmp_path / "one" / "figure.png").exists()
    assert list(json.loads((tmp_path / "summary.json").read_text())["experiments"]) == ["one"]
    assert not (tmp_path / "two").exists()


def test_a_figure_is_drawn_from_what_was_written(tmp_path: Path) -> None:
    drawn = []

    def draw(numbers: dict[str, Any], figure: Any) -> None:
        drawn.append(numbers)

    numbers = {"nan": math.nan, "far": (math.inf, 1), 4: {"nested": -math.inf}}
    run(tmp_path, experiment("one", numbers=numbers, draw=draw))
    assert drawn == [{"nan": None, "far": [None, 1], "4": {"nested": None}}]
    assert json.loads((tmp_path / "one" / "numbers.json").read_text())["numbers"] == drawn[0]


def test_numbers_that_are_no_json_are_a_crash(tmp_path: Path) -> None:
    (result,) = run(tmp_path, experiment("one", numbers={"loss": torch.ones(2)}))
    assert result.record is None
    assert result.reason.startswith("TypeError: ")


def test_the_order_of_experiments_does_not_matter_nor_do_they_move_the_callers_random_state(
    tmp_path: Path,
) -> None:
    one, two = experiment("one"), experiment("two")
    torch.manual_seed(7)
    forward = run(tmp_path, one, two)
    after = torch.rand(2)
    backward = run(tmp_path, two, one)
    drawn = [
        [result.record["numbers"] for result in results if result.record] for results in (forward, backward)
    ]
    assert drawn[0] == drawn[1][::-1]
    torch.manual_seed(7)
    assert torch.equal(after, torch.rand(2))


def test_a_folder_that_can_not_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match=r"file: is a file\. Name a folder"):
        outputs.make_folder(tmp_path / "file")

    def refuse(self: Path, *given: Any, **named: Any) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "touch", refuse)
    with pytest.raises(UsageError, match=r"new: Permission denied\. Name a folder that can be written"):
        outputs.make_folder(tmp_path / "new")


def test_a_full_disk_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Path, content: bytes) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", refuse)
    with pytest.raises(UsageError, match=r"No space left on device\. Make room"):
        run(tmp_path, experiment("one"))


# ---- the table of findings


def test_every_experiment_is_known_by_its_own_name() -> None:
    for name in NAMES:
        assert load(name).name == name


def test_names() -> None:
    assert chosen([]) == NAMES
    assert chosen(["gan", "lost-updates", "gan"]) == ("lost-updates", "gan")
    with pytest.raises(
        UnknownNameError, match=r"unknown experiment 'lost-update'.*Did you mean 'lost-updates'"
    ):
        chosen(["lost-update"])
    with pytest.raises(UnknownNameError, match="unknown experiment 'ganz'"):
        load("ganz")


def test_the_packaged_table() -> None:
    table = expected.read()
    assert set(table) == set(NAMES)
    text = files("mezzo.reproduce").joinpath(expected.FILE).read_text()
    assert list(expected.tomllib.loads(text)) == sorted(NAMES)
    for name, efforts in table.items():
        assert set(efforts) == {"quick", "full"}, name
        said = {effort: {*one.shown, *one.not_shown} for effort, one in efforts.items()}
        assert said["quick"] <= said["full"], f"{name}: the full size leaves out what the quick one speaks of"
        for one in efforts.values():
            assert one.shown, f"{name} shows nothing"
            assert len(set(one.shown)) == len(one.shown)
            assert all(len(why) > 20 for why in one.not_shown.values()), f"{name}: why does it not show?"


BAD_TABLES = [
    ("[a.quick]\nshow = ['x']", "unknown keys ['show']"),
    ("[a.quick]\nshown = ['x']\nnot_shown = {x = 'why'}", "in both lists ['x']"),
    ("[a.small]\nshown = ['x']", "[a.small]"),
]


@pytest.mark.parametrize(("text", "said"), BAD_TABLES)
def test_a_table_that_is_wrong_is_refused(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=r"expected\.toml") as raised:
        expected.read(text)
    assert said in str(raised.value)


# ---- figures and the page


def a_line(numbers: dict[str, Any], figure: Any) -> None:
    axes = figure.subplots()
    axes.plot([1, 2, 3], numbers["curve"])
    figures.label_ends(
        axes, [(3, 2.0, "one", figures.FP16), (3, 2.1, "other", figures.BF16), (3, math.nan, "-", "k")]
    )


def test_figures_are_whole_small_and_the_same_each_time() -> None:
    before = dict(matplotlib.rcParams)
    one = experiment("one", draw=a_line)
    drawn = really_draw(one, {"curve": [1, None, 2]})
    assert dict(matplotlib.rcParams) == before
    assert drawn == really_draw(one, {"curve": [1, None, 2]})
    root = ET.fromstring(drawn["figure.svg"])
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    assert b"About one" in drawn["figure.svg"]
    assert drawn["figure.png"].startswith(b"\x89PNG\r\n")
    width, height = struct.unpack(">II", drawn["figure.png"][16:24])
    assert (width, height) == (900, 500)
    assert max(map(len, drawn.values())) < 150_000


def test_a_readers_own_style_is_not_drawn_by() -> None:
    one = experiment("one", draw=a_line)
    plain = really_draw(one, {"curve": [1, 2, 3]})
    with matplotlib.rc_context({"figure.facecolor": "black", "font.size": 30, "savefig.dpi": 300}):
        assert really_draw(one, {"curve": [1, 2, 3]}) == plain


@settings(deadline=None)
@given(
    st.lists(st.floats(-100, 100), min_size=1, max_size=8).map(sorted),
    st.floats(0.5, 20),
)
def test_labels_are_moved_apart_and_no_further(places: list[float], gap: float) -> None:
    moved = figures._apart(places, gap)
    assert len(moved) == len(places)
    assert all(later - earlier > gap * (1 - 1e-9) - 1e-9 for earlier, later in itertools.pairwise(moved))
    assert math.isclose(sum(moved), sum(places), abs_tol=1e-6)
    if all(later - earlier >= gap for earlier, later in itertools.pairwise(places)):
        assert moved == pytest.approx(places)


MISSING = [
    ({"matplotlib"}, "matplotlib not found"),
    ({"sklearn"}, "scikit-learn not found"),
    ({"matplotlib", "sklearn"}, "matplotlib and scikit-learn not found"),
]


@pytest.mark.parametrize(("absent", "said"), MISSING)
def test_what_must_be_installed(absent: set[str], said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    figures.check_installed()
    monkeypatch.setattr(
        figures.importlib.util, "find_spec", lambda name: None if name in absent else object()
    )
    with pytest.raises(UsageError) as raised:
        figures.check_installed()
    assert str(raised.value).startswith(said)
    assert "pip install 'mezzo[reproduce]'" in str(raised.value)


class Tags(html.parser.HTMLParser):
    """Checks that every tag is closed in its order, and keeps what would be fetched."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.sources: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.sources += [str(value) for name, value in attrs if name in ("src", "href")]
        if tag not in ("meta", "link", "img"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_is_well_formed_and_asks_the_network_nothing(tmp_path: Path) -> None:
    angry = finding("<script>alert(1)</script>")
    run(
        tmp_path,
        experiment("one", angry, finding("b", holds=False)),
        table={"one": Expected((), {"b": "<small>"})},
    )
    page = (tmp_path / "index.html").read_text()
    tags = Tags()
    tags.feed(page)
    assert tags.open == []
    assert all(source.startswith(("data:", "#")) for source in tags.sources)
    assert "<script" not in page
    assert "&lt;small&gt;" in page
    assert "default-src &#39;none&#39;" in page


def test_finding_names_are_words_joined_by_hyphens() -> None:
    for efforts in expected.read().values():
        for one in efforts.values():
            for name in (*one.shown, *one.not_shown):
                assert name.replace("-", "").isalnum(), name
                assert name == name.lower()


def test_the_page_of_the_docs_has_a_place_for_every_experiment() -> None:
    text = (Path(__file__).parent.parent / "docs" / "reproduce.md").read_text(encoding="utf-8")
    assert re.findall(r"<!-- ([a-z]\S+) -->", text) == list(NAMES)
    assert re.findall(r"<!-- /([a-z]\S+) -->", text) == list(NAMES)
    assert re.findall(r"^### `(\S+)`$", text, re.MULTILINE) == list(NAMES)

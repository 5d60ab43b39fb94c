"""The demos run on their own, print the metric that the table says, and know nothing of Mezzo."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from mezzo.demos import DEMOS, find

SMALL = {
    "digits": ["--epochs", "1", "--width", "8"],
    "text-gpt": [
        "--steps",
        "3",
        "--width",
        "16",
        "--layers",
        "1",
        "--characters",
        "20000",
        "--context",
        "16",
    ],
}


def test_every_demo_has_a_small_size_to_test() -> None:
    assert SMALL.keys() == DEMOS.keys()


@pytest.mark.heavy
@pytest.mark.parametrize("name", sorted(DEMOS))
def test_demo_runs_as_a_plain_script_and_prints_its_metric(name: str) -> None:
    demo = find(name)
    done = subprocess.run(
        [sys.executable, "-W", "error", str(demo.path), *SMALL[name]],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    (value,) = re.findall(demo.metric, done.stdout)
    assert 0 < float(value) <= 100
    assert "mezzo" not in demo.path.read_text().lower()


def test_a_wrong_name_is_told_the_nearest_right_one() -> None:
    with pytest.raises(LookupError, match=r"unknown demo 'digit'.*digits, text-gpt.*Did you mean 'digits'\?"):
        find("digit")

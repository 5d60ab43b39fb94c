"""PyTorch's own tests of GradScaler and autocast, run with Mezzo's classes in their place.

    python benchmarks/conformance.py --pytorch DIR        # writes benchmarks/results/conformance.json

DIR is a checkout of PyTorch at the tag of the installed version, or a folder with its test/test_torch.py and
test/test_autocast.py. Without --pytorch the environment variable PYTORCH_SOURCE names it. PyTorch's wheel does not
contain these tests. They also need the package `expecttest`.

Each suite runs twice, in a process each: with PyTorch's own class, then with Mezzo's. Only tests that pass with
PyTorch's own count.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import outcomes

OUT = Path(__file__).parent / "results" / "conformance.json"
CHOSEN = "MEZZO_STANDS_IN"  # the suite, for the pytest plugin that this file is


@dataclass(frozen=True)
class Suite:
    """Tests of one class: their file in a checkout, pytest's -k, and where the tests take the class from."""

    file: str
    named: str
    name: str
    holders: tuple[str, ...]


SUITES = {
    "GradScaler": Suite(
        "test/test_torch.py",
        "grad_scal or gradscal or params_invalidated",
        "GradScaler",
        ("torch", "torch.amp", "torch.amp.grad_scaler"),
    ),
    "autocast": Suite("test/test_autocast.py", "", "autocast", ("torch", "torch.amp")),
}


def pytest_configure() -> None:
    """Pytest's hook: put Mezzo's class in place before a test module is imported."""
    if not os.environ.get(CHOSEN):
        return
    suite = SUITES[os.environ[CHOSEN]]
    for holder in suite.holders:
        module = importlib.import_module(holder)
        setattr(module, suite.name, _stand_in(os.environ[CHOSEN], getattr(module, suite.name)))


def _stand_in(suite: str, theirs: Any) -> Any:
    import mezzo.amp

    if suite == "GradScaler":
        return mezzo.amp.GradScaler
    ours = mezzo.amp.autocast

    def region(*args: Any, **kwargs: Any) -> Any:
        # Mezzo and PyTorch themselves go on using PyTorch's: they are not what is tested.
        caller = sys._getframe(1).f_globals.get("__name__", "")
        inside = caller.startswith(("mezzo.", "torch.")) and not caller.startswith("torch.testing.")
        return (theirs if inside else ours)(*args, **kwargs)

    return region


def run(suite: str, pytorch: Path, stand_in: bool) -> dict[str, tuple[str, str]]:
    """Test -> outcome and reason, with Mezzo's class or PyTorch's."""
    chosen = SUITES[suite]
    paths = (str(Path(__file__).parent), os.environ.get("PYTHONPATH", ""))
    environment = {
        CHOSEN: suite if stand_in else "",
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "PYTORCH_TESTING_DEVICE_ONLY_FOR": "cpu",
    }
    arguments = ["-p", "conformance", "-W", "ignore", "-c", os.devnull, "--rootdir", str(pytorch)]
    return outcomes.run([*arguments, "-k", chosen.named, chosen.file], pytorch, environment)


def measure(pytorch: Path | None) -> dict[str, Any]:
    """What the file holds: a suite's tests with outcome and reason; or "not_run" with the reason."""
    import torch

    tag = f"v{torch.__version__.partition('+')[0]}"
    files = sorted({suite.file for suite in SUITES.values()})
    if pytorch is None or not all((pytorch / file).is_file() for file in files):
        return {
            "not_run": f"needs {' and '.join(files)} of PyTorch's repository at its tag {tag}: "
            f"give their folder with --pytorch or PYTORCH_SOURCE (received {pytorch})"
        }
    if importlib.util.find_spec("expecttest") is None:
        return {"not_run": "needs the package expecttest: pip install expecttest"}
    suites: dict[str, Any] = {}
    baselines: dict[str, dict[str, tuple[str, str]]] = {}
    for name, suite in SUITES.items():
        if suite.file not in baselines:
            baselines[suite.file] = run(name, pytorch, stand_in=False)
        theirs = baselines[suite.file]
        counted = [test for test, (outcome, _) in theirs.items() if outcome == "passed"]
        if not counted:
            return {
                "not_run": f"{suite.file}: no test passes with PyTorch's own: {next(iter(theirs.values()))[1]}"
            }
        ours = run(name, pytorch, stand_in=True)
        tests = {test: ours.get(test, ("failed", "was not collected")) for test in counted}
        suites[name] = {
            "passed": sum(outcome == "passed" for outcome, _ in tests.values()),
            "of": len(counted),
            "tests": {test: {"outcome": outcome, "why": why} for test, (outcome, why) in tests.items()},
        }
    return {"torch": torch.__version__, "suites": suites}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pytorch", type=Path, default=os.environ.get("PYTORCH_SOURCE"), metavar="DIR")
    parser.add_argument("--out", type=Path, default=OUT, help="default %(default)s")
    options = parser.parse_args()
    found = measure(options.pytorch.resolve() if options.pytorch else None)
    for name, suite in found.get("suites", {}).items():
        print(f"{name}: {suite['passed']} of {suite['of']}")
        for test, result in suite["tests"].items():
            if result["outcome"] != "passed":
                print(f"  {result['outcome']}: {test}: {result['why']}")
            result["why"] = result["why"].partition(":")[0]  # the file names the error; its text is PyTorch's
    print(found.get("not_run", ""), end="\n" * ("not_run" in found))
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

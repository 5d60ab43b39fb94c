"""Apex's own tests of amp, run on a CPU with `mezzo.apex` in its place.

    python benchmarks/apex_tests.py --apex DIR        # writes benchmarks/results/apex_tests.json

DIR is a checkout of NVIDIA/apex at cb65b8ed^ (e13873de), the last commit with amp::

    git clone https://github.com/NVIDIA/apex DIR && git -C DIR checkout e13873de

The tests of tests/L0/run_amp run from a temporary copy in which "cuda" is replaced by "cpu" (`MOVES`). A test does not
apply if it calls a kernel of Apex's CUDA extension `amp_C` itself, or imports a module that `mezzo.apex` does not have.
A test that fails by a documented difference has it as its reason; the exit status is 1 if another one fails.
The optimizer FusedSGD is PyTorch's; its tests apply, so the import of `amp_C` that disables them is left out.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import outcomes

OUT = Path(__file__).parent / "results" / "apex_tests.json"
FOLDER = "tests/L0/run_amp"
COMMIT = "e13873debc4699d39c6861074b9a3b2a02327f92"
# From CUDA's names to the CPU's. The type of an FP32 CPU tensor is torch.FloatTensor.
MOVES = (
    (r"torch\.cuda\.(\w*Tensor)", r"torch.\1"),
    (r"(['\"])cuda\1", r"'cpu'"),
    (r"\.cuda\(\)", ""),
    (r"torch\.set_default_tensor_type\(torch\.FloatTensor\)", "torch.set_default_dtype(torch.float32)"),
)
UNTIL_EXIT = ExitStack()
IMPORT_OF_EXTENSION = r"(?m)^ *import amp_C\n"
# File -> why its tests do not apply.
NOT_APPLICABLE = {
    **dict.fromkeys(
        (
            "test_multi_tensor_axpby.py",
            "test_multi_tensor_l2norm.py",
            "test_multi_tensor_scale.py",
            "test_multi_tensor_unscale_l2norm.py",
            "test_update_scale_hysteresis.py",
        ),
        "calls a kernel of Apex's CUDA extension amp_C",
    ),
    "test_larc.py": "imports apex.parallel.LARC, which mezzo.apex does not have",
}
# Test -> why it fails: docs/torch-amp.md lists these differences.
DIFFERENCES = {
    "TestBasicCasts::test_group_norm_is_float": "group_norm returns fp16 under Mezzo's table",
    "TestBannedMethods::test_bce_raises_by_default": "BannedOpError is not a NotImplementedError",
    "TestTensorCasts::test_cpu_is_float": ".cpu() keeps the dtype",
    "TestPromotion::test_inplace_exp_is_error_for_half": "exp_ keeps the dtype of its tensor, and is no error",
}


def pytest_configure() -> None:
    """Pytest's hook: `apex` is `mezzo.apex` from here on."""
    from mezzo.apex.imports import provided

    UNTIL_EXIT.enter_context(provided())


def pytest_unconfigure() -> None:
    """Pytest's hook: the end."""
    UNTIL_EXIT.close()


def moved(source: str) -> str:
    """A test file's text, for a CPU."""
    for pattern, text in MOVES:
        source = re.sub(pattern, text, source)
    return source if "FusedSGD" not in source else re.sub(IMPORT_OF_EXTENSION, "", source)


def tests_in(source: str) -> list[str]:
    """The names of the test methods in a file that is not run."""
    return re.findall(r"(?m)^ +def (test_\w+)", source)


def run(path: Path, source: str) -> dict[str, tuple[str, str]]:
    """Test -> outcome and reason, of one file. Two files have a class of the same name."""
    places = (str(Path(__file__).parent), os.environ.get("PYTHONPATH", ""))
    environment = {"PYTHONPATH": os.pathsep.join(filter(None, places))}
    with tempfile.TemporaryDirectory() as temporary:
        for one, text in ((path.with_name("utils.py"), None), (path, source)):
            text = text or one.read_text(encoding="utf-8")
            (Path(temporary) / one.name).write_text(moved(text), encoding="utf-8")
        arguments = ["-p", "apex_tests", "-W", "ignore", "-c", os.devnull, "--rootdir", temporary, path.name]
        return outcomes.run(arguments, Path(temporary), environment)


def measure(apex: Path) -> dict[str, Any]:
    """What the file holds: counts, and each test with its outcome and the reason of one that did not pass."""
    import torch

    tests: dict[str, dict[str, str]] = {}
    for path in sorted((apex / FOLDER).glob("test_*.py")):
        source, why = path.read_text(encoding="utf-8"), NOT_APPLICABLE.get(path.name)
        found = run(path, source) if why is None else {}
        for test in tests_in(source) if why else ():
            found[test] = ("not applicable", why or "")
        for test, (outcome, reason) in found.items():
            tests[f"{path.stem}::{test}"] = {"outcome": outcome, "why": DIFFERENCES.get(test, reason)}
    counts = dict.fromkeys(("passed", "failed", "skipped", "not applicable"), 0)
    for result in tests.values():
        counts[result["outcome"]] += 1
    return {"apex": COMMIT, "torch": torch.__version__, **counts, "tests": tests}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--apex", type=Path, required=True, metavar="DIR")
    parser.add_argument("--out", type=Path, default=OUT, help="default %(default)s")
    options = parser.parse_args()
    if not (options.apex / FOLDER / "utils.py").is_file():
        parser.error(f"{options.apex} has no {FOLDER}: use a checkout of NVIDIA/apex at {COMMIT[:8]}")
    found = measure(options.apex.resolve())
    print(", ".join(f"{value} {kind}" for kind, value in found.items() if isinstance(value, int)))
    for test, result in found["tests"].items():
        if result["outcome"] in ("failed", "skipped"):
            print(f"  {result['outcome']}: {test}: {result['why']}")
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return int(
        any(
            r["outcome"] == "failed" and r["why"] not in DIFFERENCES.values() for r in found["tests"].values()
        )
    )


if __name__ == "__main__":
    raise SystemExit(main())

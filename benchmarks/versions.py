"""`make versions`: the fast tests against several releases of PyTorch, each in its own environment.

    python benchmarks/versions.py                        # every release of RELEASES: benchmarks/results/versions.json
    python benchmarks/versions.py 2.13.0 2.14.1          # only these; the file's other rows stay
    python benchmarks/versions.py --python python3.12    # with another interpreter
    python benchmarks/versions.py --envs DIR             # reuse the environments in DIR, and keep new ones there
    python benchmarks/versions.py nightly --index URL    # PyTorch's nightly index, from pytorch.org's "Get started"

An environment is made once and kept. Newer releases for Linux bring several gigabytes of CUDA libraries. Each run
installs this working tree into the environment. The tests are those of `make fast` for PyTorch: not the heavy ones, and
not those of Keras and TensorFlow. The table in docs/index.md is filled from the file.

Exit status: 0 all tests pass with every release, 1 a test fails or a release cannot be installed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import readme

ROOT = Path(__file__).resolve().parent.parent
OUT = ROOT / "benchmarks" / "results" / "versions.json"
RELEASES = ("2.11.0", "2.12.1", "2.13.0", "2.14.1")
PACKAGES = (
    *("hypothesis", "matplotlib", "ml_dtypes", "pytest", "pytest-xdist", "tensorboard", "triton"),
    *("libcst", "lightning>=2.6.4", "peft", "pytorch-lightning>=2.6.4", "transformers", "accelerate", "trl"),
)
"""What the fast tests need besides Mezzo."""
VERSION = "import importlib.metadata; print(importlib.metadata.version('torch'))"
ABOUT = (
    "import json, platform, torch, numba, numpy; print(json.dumps({'torch': torch.__version__, "
    "'python': platform.python_version(), 'numba': numba.__version__, 'numpy': numpy.__version__}))"
)


def install(inside: Path, python: str, release: str, index: str | None) -> None:
    """Make the environment of the interpreter `inside`, or reuse it, and install Mezzo's working tree there.

    Raises:
        subprocess.CalledProcessError: pip could not install something; `stderr` says what.
    """
    folder = inside.parent.parent
    pip = [str(inside), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    if not (folder / "ready").exists():
        print(f"  making {folder} and downloading PyTorch", flush=True)
        subprocess.run([python, "-m", "venv", "--clear", folder], check=True)
        torch = ["--pre", "--index-url", index, "torch"] if index else [f"torch=={release}"]
        subprocess.run([*pip, *torch], check=True, stderr=subprocess.PIPE, text=True)
        (folder / "ready").touch()
    print(f"  installing Mezzo and what its tests need into {folder}", flush=True)
    # With the release: another package's requirement must not replace it.
    kept = subprocess.check_output([str(inside), "-c", VERSION], text=True).strip() if index else release
    command = [*pip, f"torch=={kept}", "--editable", str(ROOT), *PACKAGES]
    subprocess.run(command, check=True, stderr=subprocess.PIPE, text=True)


def reason(error: subprocess.CalledProcessError) -> str:
    """Why pip failed: its last error that is not a link to its documentation."""
    lines = [line.strip() for line in (error.stderr or "").splitlines() if line.strip()]
    named = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR") and "://" not in line]
    return (named or lines or [str(error)])[-1]


def tested(python: Path, release: str, extra: list[str]) -> dict[str, Any]:
    """The versions of an environment, and how its tests ended."""
    about: dict[str, Any] = json.loads(subprocess.check_output([str(python), "-c", ABOUT], text=True))
    if release != "nightly" and about["torch"].partition("+")[0] != release:
        raise RuntimeError(f"{python} has torch {about['torch']}, not {release}: remove its environment")
    report = python.parent.parent / "junit.xml"
    report.unlink(missing_ok=True)
    began = time.monotonic()
    ignored = ["--ignore=tests/on_keras", "--ignore=tests/on_tensorflow"]
    command = [
        str(python),
        "-m",
        "pytest",
        "-q",
        "-n",
        "2",
        "-m",
        "not heavy and not nightly",
        f"--junitxml={report}",
    ]
    done = subprocess.run(
        [*command, *ignored, *extra], cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=False
    )
    row = {**about, "tests": 0, "failed": [], "skipped": 0, "status": done.returncode}
    if report.exists():
        cases = list(ET.parse(report).getroot().iter("testcase"))
        row["tests"] = len(cases)
        row["skipped"] = sum(case.find("skipped") is not None for case in cases)
        row["failed"] = sorted(
            f"{case.get('classname')}::{case.get('name')}"
            for case in cases
            if case.find("failure") is not None or case.find("error") is not None
        )
    return {**row, "minutes": round((time.monotonic() - began) / 60, 1)}


def main() -> int:
    """Test each release; write the file after each."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("releases", nargs="*", default=RELEASES, help=f"default: {' '.join(RELEASES)}")
    parser.add_argument("--python", default=sys.executable, help="the interpreter (default: this one)")
    parser.add_argument("--envs", type=Path, default=ROOT / ".versions", help="default: %(default)s")
    parser.add_argument("--index", default=os.environ.get("TORCH_NIGHTLY_INDEX"), help="for `nightly`")
    parser.add_argument("--pytest", default="", help="more arguments of pytest, such as '-k autocast'")
    parser.add_argument("--out", type=Path, default=OUT)
    given = parser.parse_args()
    if "nightly" in given.releases and not given.index:
        parser.error('nightly needs --index URL or TORCH_NIGHTLY_INDEX: pytorch.org\'s "Get started" has it')
    version = subprocess.check_output(
        [given.python, "-c", "import sys; print('%d.%d' % sys.version_info[:2])"], text=True
    ).strip()
    rows: dict[str, Any] = json.loads(given.out.read_text())["rows"] if given.out.exists() else {}
    bad = False
    for number, release in enumerate(given.releases, 1):
        print(f"[{number}/{len(given.releases)}] torch {release}, Python {version}", flush=True)
        name = f"torch-{release}-python-{version}"
        inside = given.envs.resolve() / name / "bin" / "python"
        try:
            install(inside, given.python, release, given.index if release == "nightly" else None)
            row = tested(inside, release, given.pytest.split())
            print(
                f"  {row['tests']} tests, {len(row['failed'])} failed, {row['skipped']} skipped, {row['minutes']} min"
            )
        except subprocess.CalledProcessError as error:
            row = {"torch": release, "python": version, "status": error.returncode, "reason": reason(error)}
            print(f"  not installed: {row['reason']}")
        bad |= row["status"] != 0
        rows[name] = row
        given.out.write_text(json.dumps({"schema": 1, "rows": dict(sorted(rows.items()))}, indent=1) + "\n")
        if given.out == OUT:
            readme.main()  # the next release's tests compare the page with the file
    return int(bad)


if __name__ == "__main__":
    sys.exit(main())

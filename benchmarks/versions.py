"""`make versions`: the fast tests against several releases of PyTorch, each in an environment of its own.

    python benchmarks/versions.py                        # every release of RELEASES: benchmarks/results/versions.json
    python benchmarks/versions.py 2.14.1 2.15.0          # only these; the file's other rows stay
    python benchmarks/versions.py --python python3.12    # with another interpreter
    python benchmarks/versions.py nightly --index URL    # PyTorch's nightly index, from pytorch.org's "Get started"

An environment is made once under .versions/ and kept. Newer releases for Linux bring several gigabytes of CUDA
libraries. The tests are those of `make fast`: PyTorch's, without the heavy ones, Keras's and TensorFlow's.

Exit status: 0 all tests pass with every release, 1 one does not, 2 an environment could not be made.
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

ROOT = Path(__file__).resolve().parent.parent
OUT = ROOT / "benchmarks" / "results" / "versions.json"
RELEASES = ("2.11.0", "2.12.1", "2.13.0", "2.14.1", "2.15.0")
PACKAGES = ("hypothesis", "matplotlib", "ml_dtypes", "pytest", "pytest-xdist", "tensorboard", "triton>=3.9")
"""What the fast tests need besides Mezzo."""
ABOUT = (
    "import json, platform, torch, numba, numpy; print(json.dumps({'torch': torch.__version__, "
    "'python': platform.python_version(), 'numba': numba.__version__, 'numpy': numpy.__version__}))"
)


def environment(release: str, python: str, index: str | None) -> Path:
    """The interpreter of an environment with this release, Mezzo's working tree and what its fast tests need."""
    name = subprocess.check_output(
        [python, "-c", "import sys; print('%d.%d' % sys.version_info[:2])"], text=True
    )
    folder = ROOT / ".versions" / f"torch-{release}-python-{name.strip()}"
    inside = folder / "bin" / "python"
    if not (folder / "ready").exists():
        subprocess.run([python, "-m", "venv", "--clear", str(folder)], check=True)
        pip = [str(inside), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        if index:
            subprocess.run([*pip, "--pre", "--index-url", index, "torch"], check=True)
        else:
            subprocess.run([*pip, f"torch=={release}"], check=True)
        subprocess.run([*pip, "--editable", str(ROOT), *PACKAGES], check=True)
        (folder / "ready").touch()
    return inside


def tested(python: Path, extra: list[str]) -> dict[str, Any]:
    """The versions of an environment, and how its tests ended."""
    about: dict[str, Any] = json.loads(subprocess.check_output([str(python), "-c", ABOUT], text=True))
    report = python.parent.parent / "junit.xml"
    report.unlink(missing_ok=True)
    began = time.monotonic()
    ignored = ["--ignore=tests/on_keras", "--ignore=tests/on_tensorflow"]
    command = [str(python), "-m", "pytest", "-q", "-n", "2", "-m", "not heavy", f"--junitxml={report}"]
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
    parser.add_argument("--index", default=os.environ.get("TORCH_NIGHTLY_INDEX"), help="for `nightly`")
    parser.add_argument("--pytest", default="", help="more arguments of pytest, such as '-k autocast'")
    parser.add_argument("--out", type=Path, default=OUT)
    given = parser.parse_args()
    rows: dict[str, Any] = json.loads(given.out.read_text())["rows"] if given.out.exists() else {}
    bad = False
    for release in given.releases:
        if release == "nightly" and not given.index:
            parser.error(
                'nightly needs --index URL or TORCH_NIGHTLY_INDEX: pytorch.org\'s "Get started" has it'
            )
        print(f"torch {release}", flush=True)
        try:
            python = environment(release, given.python, given.index if release == "nightly" else None)
        except subprocess.CalledProcessError as error:
            print(f"torch {release}: no environment: {error}", file=sys.stderr)
            return 2
        row = tested(python, given.pytest.split())
        bad |= row["status"] != 0
        print(f"  {row['tests']} tests, {len(row['failed'])} failed, {row['skipped']} skipped")
        rows[f"torch {row['torch']}, Python {row['python']}"] = row
        given.out.write_text(json.dumps({"schema": 1, "rows": rows}, indent=1) + "\n")
    return int(bad)


if __name__ == "__main__":
    sys.exit(main())

"""A built wheel works in a clean environment, from an empty folder."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from mezzo import __version__

ROOT = Path(__file__).parent.parent
SMALL = ("--precision", "bf16", "--", "--width", "16", "--epochs", "2")


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel and the source distribution."""
    out = tmp_path_factory.mktemp("dist")
    subprocess.run(
        [sys.executable, "-m", "build", "--outdir", str(out), str(ROOT)], check=True, capture_output=True
    )
    return out


@pytest.mark.heavy
def test_the_distributions_hold_the_package_and_nothing_else(dist: Path) -> None:
    with zipfile.ZipFile(dist / f"mezzo-{__version__}-py3-none-any.whl") as wheel:
        names = {name for name in wheel.namelist() if ".dist-info/" not in name}
    tracked = subprocess.check_output(["git", "ls-files", "src/mezzo"], cwd=ROOT, text=True).split()
    assert names == {name.removeprefix("src/") for name in tracked}
    with tarfile.open(dist / f"mezzo-{__version__}.tar.gz") as source:
        assert any(name.endswith("/README.md") for name in source.getnames())


@pytest.mark.nightly
def test_the_wheel_works_in_a_clean_environment(dist: Path, tmp_path: Path) -> None:
    environment, empty = tmp_path / "environment", tmp_path / "empty"
    empty.mkdir()
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}

    def call(*command: str | Path) -> str:
        done = subprocess.run(command, cwd=empty, env=clean, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    call(sys.executable, "-m", "venv", environment)
    python = environment / "bin" / "python"
    wheel = dist / f"mezzo-{__version__}-py3-none-any.whl"
    options = ("--quiet", "--no-compile", "--constraint", ROOT / "constraints.txt")
    call(python, "-m", "pip", "install", *options, wheel)
    call(environment / "bin" / "mezzo", "compare", "--demo", "digits", "--seeds", "1", *SMALL)
    verdict = json.loads((empty / "mezzo-compare-digits" / "verdict.json").read_text())
    assert verdict["candidates"]["bf16"]["parity"] in ("consistent", "inconclusive")
    assert str(environment) in call(python, "-c", "import mezzo; print(mezzo.__file__)")

"""Which implementation of the optimizer kernels a device gets; and Triton's without a GPU.

Those are equal to the reference in Triton's interpreter, and compiled for a Hopper to be read. Both in child processes:
Triton decides at its import whether it interprets, and this process's `torch.compile` needs a Triton that does not.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from mezzo.core.errors import UsageError
from mezzo.pytorch.kernels import backend


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(backend.KERNELS, raising=False)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    backend._warn_once.cache_clear()


INSTALLED = [
    # device, what is installed, what serves it
    ("cpu", {"numba"}, "numba"),
    ("cpu", {"triton"}, "reference"),
    ("cuda", {"triton", "numba"}, "triton"),
    ("cuda", {"numba"}, "reference"),
    ("xpu", {"triton", "numba"}, "reference"),
]


@pytest.mark.parametrize(("device", "installed", "serves"), INSTALLED)
def test_a_device_uses_its_compiler_where_it_is_installed(
    device: str, installed: set[str], serves: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backend, "is_installed", lambda module: module in installed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert backend.implementation(device) == serves


@pytest.mark.parametrize(("device", "named"), [("cpu", "pip install numba"), ("cuda", "pip install triton")])
def test_a_missing_compiler_is_told_once(device: str, named: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "is_installed", lambda module: False)
    with pytest.warns(UserWarning, match=f"many times slower.*{named}"):
        backend.implementation(device)
    backend.implementation(device)  # a second warning would be an error here


FORCED = [
    # forced, interpreted, where it runs
    ("reference", "", {"cpu", "cuda", "mps"}),
    ("numba", "", {"cpu"}),
    ("triton", "", {"cuda"}),
    ("triton", "1", {"cpu"}),
]


@pytest.mark.parametrize(("forced", "interpreted", "where"), FORCED)
def test_the_environment_forces_an_implementation_where_it_can_run(
    forced: str, interpreted: str, where: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(backend.KERNELS, forced)
    monkeypatch.setenv("TRITON_INTERPRET", interpreted)
    for device in ("cpu", "cuda", "mps"):
        if device in where:
            assert backend.implementation(device) == forced
        else:
            with pytest.raises(UsageError, match=f"cannot run on '{device}'.*MEZZO_KERNELS=reference"):
                backend.implementation(device)


def test_a_wrong_name_in_the_environment_lists_the_right_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(backend.KERNELS, "numbas")
    with pytest.raises(UsageError, match=r"MEZZO_KERNELS='numbas'.*numba, reference, triton.*'numba'"):
        backend.implementation("cpu")


def test_no_compiler_is_imported_before_a_kernel_is_needed() -> None:
    code = (
        "import sys; from mezzo.pytorch.kernels import backend, gradient_norm, optimizer_step; "
        "backend.implementation('cpu'); print({'numba', 'triton'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


# Triton's kernels without a GPU.


CHILDREN = Path(__file__).parent / "children"
NEEDS_TRITON = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")


def child(*words: str, **variables: str) -> str:
    paths = [str(CHILDREN.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), **variables}
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, env=env, timeout=550)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.heavy
@NEEDS_TRITON
@pytest.mark.parametrize(
    ("file", "which"),
    [
        ("test_step_kernels.py", "every_mode or edge"),
        ("test_cross_entropy.py", "every_option or special or scale or ignored"),
    ],
)
def test_the_interpreted_kernels_pass_their_tests(file: str, which: str) -> None:
    command = ("-m", "pytest", "-q", "-p", "no:cacheprovider", str(CHILDREN.parent / file), "-k", which)
    output = child(*command, TRITON_INTERPRET="1")
    assert " passed" in output
    assert "skipped" not in output


# What each kind of row compiles to on a Hopper: rule, masters, state, gradient.
COMPILED = [
    ("adamw", [("own", "fp32", "float32"), ("split", "fp32", "bfloat16")]),
    ("adamw", [("fp16", "fp32", "float16")]),
    ("adamw", [("split8", "int8", "bfloat16")]),
    ("adamw", [("none", "bf16", "bfloat16")]),
    ("adam-l2-up", [("own", "fp32", "float32")]),
    ("sgd-nesterov-up", [("split", "fp32", "bfloat16")]),
    ("sgd-momentum", [("split8", "int8", "bfloat16")]),
]


# Fused multiply-adds of an element, where a rule names them.
FUSED = {"adamw": 0, "adam-l2-up": 1, "sgd-nesterov-up": 4, "sgd-momentum": 3}


@pytest.mark.heavy
@NEEDS_TRITON
def test_the_compiled_step_contracts_nothing_and_loads_vectors(tmp_path: Path) -> None:
    script = str(CHILDREN / "compiled_kernels.py")
    output = child(script, json.dumps(COMPILED), TRITON_CACHE_DIR=str(tmp_path), TRITON_INTERPRET="0")
    found = [json.loads(line) for line in output.splitlines()]
    assert len(found) == len(COMPILED)
    for (rule, rows), made in zip(COMPILED, found):
        where = f"{rule} {rows}: {made}"
        # IEEE arithmetic: nothing approximate, no flush of subnormals.
        assert made["inexact"] == [], where
        # No multiply-add is fused but the rule's own: of 4 elements of a thread in a whole block, 1 in a short one.
        assert made["fma"] == 5 * FUSED[rule], where
        # A whole block is loaded and stored by vectors of 4 elements, whatever their format.
        for loads, stores, element in made["vectors"]:
            assert loads >= 1, (element, where)
            assert stores >= 1, (element, where)

"""Which implementation of the optimizer kernels a device gets."""

from __future__ import annotations

import subprocess
import sys
import warnings

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

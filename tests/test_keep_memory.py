"""mezzo.keep_memory(): freed memory is used again, and where that can't be told, nothing is claimed."""

from __future__ import annotations

import subprocess
import sys

import pytest

from mezzo.pytorch import keep_memory as module

STEP = """
import resource, sys, torch, mezzo
keep = {keep} and mezzo.keep_memory()
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(8):
        torch.ones(9 << 20)  # 36 MiB, above the 32 that malloc keeps of its own accord
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
for _ in range(3):  # malloc lays out eight or nine such blocks before it comes back to the first
    faults()
print(keep, faults())
"""


def faults(keep: bool) -> tuple[bool, int]:
    code = STEP.format(keep=keep)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    kept, count = done.stdout.split()
    return kept == "True", int(count)


@pytest.mark.heavy
@pytest.mark.skipif(sys.platform != "linux", reason="glibc's malloc")
def test_blocks_are_made_of_the_same_pages_again() -> None:
    kept, few = faults(keep=True)
    if not kept:
        pytest.skip("the C library is not glibc, or malloc is another's")
    pages = 8 * (36 << 20) // 4096
    assert few < pages // 100
    assert faults(keep=False)[1] >= pages


def test_other_c_libraries_and_allocators_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_is_replaced", lambda: True)
    assert module.keep_memory() is False
    monkeypatch.setattr(module.platform, "libc_ver", lambda: ("", ""))
    monkeypatch.setattr(module, "_is_replaced", lambda: False)
    assert module.keep_memory() is False

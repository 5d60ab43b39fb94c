"""What every test finds: a machine whose CPU has native bf16, whatever this one has.

Which kernels serve a format depends on the CPU's instructions (`mezzo.pytorch.hardware.native_formats`), and no
result of a test may. Tests of other machines set the variable themselves; `test_hardware.py` takes it away.
"""

from __future__ import annotations

import gc
import os
import random
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, settings

from forked import fake, forked, forking  # noqa: F401
from run_scripts import Ran, launcher

os.environ.setdefault("MEZZO_ASSUME_NATIVE", "bf16")

# Imports and the collection of tests make objects that stay, and Python's collector would pass through them each time.
gc.disable()

# A slow machine fails no test.
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--random-order", metavar="SEED", help="shuffle files, and the tests of each file")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Shuffle by file, so that fixtures of a module are set up once; the same seed gives the same order."""
    if (seed := config.getoption("--random-order")) is not None:
        draw = random.Random(seed)
        files = {item.path: draw.random() for item in items}
        items.sort(key=lambda item: (files[item.path], draw.random()))


def pytest_collection_finish() -> None:
    gc.enable()


# A parent that ignores signals (nohup, a job in the background of a script) hands that on, and no test may depend on
# it. A child process gets the default action of a signal that has a handler here.
for _number, _handler in (
    (signal.SIGINT, signal.default_int_handler),
    (signal.SIGTERM, signal.SIG_DFL),
    (signal.SIGHUP, lambda *_: None),
):
    if signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, _handler)


@pytest.fixture(scope="module", autouse=True)
def _what_is_there_is_not_collected() -> None:
    """Takes the objects of libraries and of other files' tests out of Python's collector: millions after a while.

    Each count of the tensors alive, and each full collection, passes through all that the collector knows.
    """
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    """Gives them back at the end. Else Triton's library lists its functions that are part of cycles as leaked."""
    gc.unfreeze()


@pytest.fixture(autouse=True)
def _restored_settings() -> Iterator[None]:
    """Restores what libraries set for the whole process: environment variables, and Accelerate's shared state.

    Transformers' `TrainingArguments(bf16=True)` sets ACCELERATE_MIXED_PRECISION, which every later Accelerator reads.
    """
    before = dict(os.environ)
    yield
    for name in os.environ.keys() ^ before.keys() | {
        name for name in before if os.environ.get(name) != before[name]
    }:
        if name == "PYTEST_CURRENT_TEST":
            continue
        if name in before:
            os.environ[name] = before[name]
        else:
            del os.environ[name]
    if (state := sys.modules.get("accelerate.state")) is not None:
        state.AcceleratorState._reset_state(reset_partial_state=True)
        state.GradientState._reset_state()


@pytest.fixture(autouse=True)
def _same_random_numbers() -> None:
    """Each test begins with the same random state, whatever ran before it."""
    random.seed(0)
    np.random.seed(0)
    if torch := sys.modules.get("torch"):
        # Not `torch.manual_seed`, which stores a stack trace for each kind of accelerator that was not used yet.
        torch.default_generator.manual_seed(0)
        if torch.cuda.is_initialized():
            torch.cuda.manual_seed_all(0)


@pytest.fixture(autouse=True)
def _trainings_are_closed() -> Iterator[None]:
    """A test leaves no MixedPrecision open, to which its parameters would belong and whose steps would wait."""
    yield
    if module := sys.modules.get("mezzo.pytorch.training.mixed_precision"):
        alive = list(module._ALIVE)
        module.drop_windows([mp.model for mp in alive])  # else close() warns of them
        for mp in alive:
            mp.close()


@pytest.fixture(autouse=True)
def _one_framework(request: pytest.FixtureRequest) -> Iterator[None]:
    """A test of PyTorch leaves no other framework imported: Mezzo treats a process with Keras as one of Keras."""
    yield
    if not request.path.parent.name.startswith("on_"):
        assert not sys.modules.keys() & {"keras", "tensorflow", "jax"}


@pytest.fixture
def launch(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., Ran]:
    """Runs a script as `mezzo run` does, in this process: `launch(source, *argv, **request) -> Ran`."""
    return launcher(tmp_path, capsys)


@pytest.fixture(params=["host", "device"])
def decides(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Who knows of a skip first: "device" makes the CPU an accelerator, which must not be waited for."""
    if request.param == "device":
        monkeypatch.setattr("mezzo.pytorch.loss_scaler.reading_is_free", lambda tensor: False)
    return request.param


@pytest.fixture
def tensors_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """`PeakTensorBytes` counts tensors only, also after another test has compiled something in this process.

    It counts the allocator's events then, which hold the scratch memory of oneDNN's kernels too.
    """
    monkeypatch.setattr("mezzo.pytorch.memory._something_is_compiled", lambda: False)

"""A pytest plugin: Keras's own tests run with Mezzo's LossScaleOptimizer in the place of theirs.

They apply gradients that nobody scaled, so it ignores that. `MEZZO_OUTCOMES` is a file to write: how many optimizers of
ours were made, and of each test its outcome and its error.
"""

from __future__ import annotations

import importlib
import json
import os
from pathlib import Path
from typing import Any

import pytest

# Where Keras's tests, its trainer and its callbacks take the name from.
HOLDERS = ("keras.src.optimizers", "keras.src.trainers.trainer")
DEFINED_IN = "keras.src.optimizers.loss_scale_optimizer"

made = 0
outcomes: dict[str, dict[str, str]] = {}


def pytest_configure(config: pytest.Config) -> None:
    import mezzo.keras

    ours: Any = mezzo.keras.LossScaleOptimizer
    begin = ours.__init__
    begin.__kwdefaults__["on_unscaled"] = "ignore"

    def counted(self: Any, *args: Any, **kwargs: Any) -> None:
        global made
        made += 1
        begin(self, *args, **kwargs)

    ours.__init__ = counted
    for name in (*HOLDERS, DEFINED_IN):
        module = importlib.import_module(name)
        assert hasattr(module, "LossScaleOptimizer"), f"{name} no longer holds LossScaleOptimizer"
        module.LossScaleOptimizer = ours  # type: ignore[attr-defined]


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    # Setup and teardown count only where they did not pass.
    if report.when != "call" and report.passed:
        return
    crash = getattr(report.longrepr, "reprcrash", None)
    why = crash.message if crash else report.longrepr[2] if isinstance(report.longrepr, tuple) else ""
    outcomes[report.nodeid.rpartition("::")[2]] = {"outcome": report.outcome, "why": why}


def pytest_sessionfinish(session: pytest.Session) -> None:
    Path(os.environ["MEZZO_OUTCOMES"]).write_text(json.dumps({"made": made, "tests": outcomes}))

"""StepResult: what one step did. Journal: counts losses and updates, and writes their records."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from weakref import finalize

import torch
from torch import Tensor

from mezzo.core.notebook import html_table
from mezzo.core.overflow import OverflowReport
from mezzo.core.records import LossRecord, Record, RecordWriter, UpdateRecord
from mezzo.pytorch.distributed import named

EVERY = 16
"""Updates whose records are read and written together: reading one number waits for the device."""

_NORMAL = "The gradients are finite at a smaller loss scale, which a dynamic one takes by itself"
_FLAGS = 256  # of skipped steps that are kept on the device before they are added up there


@dataclass(slots=True, eq=False, repr=False)
class StepResult:
    """The result of `MixedPrecision.step`. Reading it may wait for the device; creating it does not.

    It holds a few 0-dim tensors, no graph and no gradients, so it can be kept.

    Args:
        updated: whether the call ended with an optimizer step, taken or skipped; False while losses accumulate.
        found_inf: 0-dim tensor or bool, whether a gradient was NaN or infinite; None without a loss scale, where
            gradients are not checked and no step is skipped.
        loss_tensor: 0-dim, detached, the last loss given to `step` (not divided, not scaled); None for a flush with
            nothing accumulated.
        grad_norm_tensor: 0-dim 2-norm of the unscaled gradients before clipping; None inside a window, and where the
            step did not need it.
        scale_tensor: 0-dim FP32 loss scale that this step's loss was multiplied with; None without one.
        note: why the optimizer was not called, where it was not.
        weight_overflow_tensor: 0-dim FP32, above 0 once a weight has become infinite in its 16-bit format; None where
            weights are FP32 or the optimizer does not report it.
        finding: the origin of the value that was not finite, if the step was skipped and traced.
        by_tensor: which ranks found one, as in `mezzo.pytorch.distributed.Agreement`; None on one rank.
    """

    updated: bool
    found_inf: Tensor | bool | None = None
    loss_tensor: Tensor | None = None
    grad_norm_tensor: Tensor | None = None
    scale_tensor: Tensor | None = None
    note: str = ""
    weight_overflow_tensor: Tensor | None = None
    finding: OverflowReport | None = None
    by_tensor: Tensor | None = None

    @property
    def skipped(self) -> bool:
        """Whether the optimizer step was skipped because a gradient was NaN or infinite."""
        return self.updated and bool(self.found_inf)

    @property
    def stepped(self) -> bool:
        """Whether the optimizer stepped: use it to step your own scheduler and to count steps."""
        return self.updated and not self.skipped

    @property
    def moved(self) -> bool:
        """Deprecated name of `stepped`."""
        warnings.warn("result.moved is deprecated. Use result.stepped.", DeprecationWarning, stacklevel=2)
        return self.stepped

    @property
    def reason(self) -> str:
        """Why the optimizer did not step, or that a weight is infinite; empty if all is well."""
        if self.skipped:
            found = ""
            if self.finding is not None:
                found = f". Cause: {self.finding}" if self.finding.alarms else f". {_NORMAL}"
            where = "" if self.by_tensor is None else f" on {named(self.by_tensor)}"
            return (
                f"a gradient was NaN or infinite{where} at loss scale {self.loss_scale:g}; parameters and optimizer "
                f"are unchanged{found}"
            )
        if self.updated and self.weight_overflow:
            return (
                "a weight became infinite in its 16-bit format: its FP32 value is above the format's largest number. "
                "Use a smaller learning rate, or params='fp32'"
            )
        return self.note

    @property
    def weight_overflow(self) -> bool:
        """Whether a weight was written infinite in its 16-bit format, in this step or one before it."""
        return self.weight_overflow_tensor is not None and bool(self.weight_overflow_tensor)

    @property
    def loss(self) -> float | None:
        """The loss given to `step`; for `flush` the last loss of the window; None if nothing was accumulated."""
        return None if self.loss_tensor is None else float(self.loss_tensor)

    @property
    def grad_norm(self) -> float | None:
        """The gradients' total 2-norm, unscaled and before clipping; NaN or infinite if a gradient is.

        None where no optimizer step was due, and without `clip_norm` (`math.inf` only measures), except with a loss
        scale and a `mezzo.optim` optimizer, whose check for NaN computes it.
        """
        return None if self.grad_norm_tensor is None else float(self.grad_norm_tensor)

    @property
    def loss_scale(self) -> float:
        """The loss scale that was used; 1.0 without one."""
        return 1.0 if self.scale_tensor is None else float(self.scale_tensor)

    def __repr__(self) -> str:
        outcome, *numbers = self._shown("" if self.finding is None else self.finding.advice)
        return f"StepResult({', '.join([outcome[1], *map('='.join, numbers)])})"

    def _repr_html_(self) -> str:
        return html_table("StepResult", self._shown())

    def _shown(self, without: str = "") -> list[tuple[str, str]]:
        outcome = "skipped" if self.skipped else "stepped" if self.updated else f"no step: {self.note}"
        scale = None if self.scale_tensor is None else self.loss_scale
        rows = (("loss", self.loss), ("grad_norm", self.grad_norm), ("loss_scale", scale))
        reason = [("reason", repr(self.reason.replace(without, "")))] if self.updated and self.reason else []
        return [("outcome", outcome), *((name, short(x)) for name, x in rows if x is not None), *reason]


def short(value: float) -> str:
    """A number for a `repr`: four digits, or all of an integer."""
    return str(int(value)) if value.is_integer() and abs(value) < 2**53 else f"{value:.4g}"


_Entry = tuple[int, float, Tensor | StepResult]


class Journal:
    """Counts losses and updates, and keeps what is to be written until `flush`; without a writer it only counts."""

    def __init__(self, writer: RecordWriter | None) -> None:
        self.losses = 0
        self.updates = 0
        self.skips: Tensor | int = 0  # without `flags`
        self.flags: list[Tensor] = []
        self._writer = writer
        start = time.monotonic()
        # Seconds since the run began. No method: an observer that holds the clock must not hold the journal.
        self.now: Callable[[], float] = lambda: time.monotonic() - start
        self._kept: list[_Entry] = []
        self._sources: list[Callable[[], list[Record]]] = []
        if writer is not None:  # so that records are written without close(), too
            finalize(self, _write, writer, self._kept, self._sources)

    def loss(self, value: Tensor) -> None:
        """Count a loss: 0-dim, detached."""
        if self._writer is not None:
            self._kept.append((self.losses, self.now(), value))
        self.losses += 1

    def update(self, result: StepResult) -> None:
        """Count an optimizer step, taken or skipped. Does not wait."""
        if isinstance(result.found_inf, Tensor):
            self.flags.append(result.found_inf)
            if len(self.flags) == _FLAGS:
                self._add_up()
        else:
            self.skips = self.skips + (result.found_inf is True)
        if self._writer is not None:
            self._kept.append((self.updates, self.now(), result))
            if (self.updates + 1) % EVERY == 0:
                self.flush()
        self.updates += 1

    def _add_up(self) -> None:
        if self.flags:
            self.skips = torch.stack(self.flags).count_nonzero() + self.skips
            self.flags.clear()

    @property
    def skipped(self) -> int:
        """Updates that were skipped; waits for the device."""
        self._add_up()
        return int(self.skips)

    def flush(self) -> None:
        """Read and write what was kept; waits for the device once for all of it."""
        if self._writer is not None:
            _write(self._writer, self._kept, self._sources)

    def also(self, source: Callable[[], list[Record]]) -> None:
        """Write the records that `source` returns at each flush."""
        self._sources.append(source)


def _write(writer: RecordWriter, kept: list[_Entry], sources: list[Callable[[], list[Record]]]) -> None:
    entries, kept[:] = list(kept), []
    for index, at, what in entries:
        if isinstance(what, Tensor):
            writer.write(LossRecord(index, float(what), at))
        else:
            update = UpdateRecord(index, 0, what.stepped, what.skipped, what.loss_scale, at, what.reason)
            writer.write(update)
    for source in sources:
        for each in source():
            writer.write(each)

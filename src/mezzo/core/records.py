"""Run records: what one training run did, one JSON line each; ``kind`` names the type.

A run writes one ``run``, then the others as training goes on, and one ``end``, which a killed run lacks. Times are
seconds since the first line, on one monotonic clock.
"""

from __future__ import annotations

import json
import math
import os
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, ClassVar, cast
from weakref import finalize

from mezzo.core.errors import UsageError
from mezzo.core.overflow import OverflowReport, TensorFacts
from mezzo.core.ranges import Histogram, RangeRow

SCHEMA = 1
LEFT_ALONE = "left alone: "
"""The note of a run begins so if its script uses mixed precision itself."""
SWITCHED_OFF = "switched off: "
"""A note of a run under `--own off` begins so, for each setting of the script's."""
HAD_TF32 = "the script switched TF32 on"
"""A note of a run in FP32 or emulated TF32 begins so if Mezzo has switched it off."""
IN_NO_LAYER = " in no layer of this model"
"""What a run notes of a quantized format that none of a model's layers has."""
NOTHING_RAN = ", so nothing ran in "
"""What a run notes, after why, if no operation ran in the formats of its policy."""
EMULATED = "Emulated on "
"""The note of a run begins so if the device lacks a quantized format, with why after a colon."""
OWN = "own"
"""The policy in the records of a run whose script kept its own mixed precision."""
OWN_PRECISION = "own precision: "
"""The note of a run begins so if its script kept its own mixed precision and was recorded."""


def file_name(precision: str) -> str:
    """A precision as it stands in the names of a run's files.

    >>> file_name("bf16,op.softmax=fp32"), file_name("mezzo-calibrate-train/policy.toml")
    ('bf16-op.softmax-fp32', 'mezzo-calibrate-train-policy.toml')
    """
    return re.sub(r"[^A-Za-z0-9.]+", "-", precision).strip("-.").lower()


@dataclass(frozen=True)
class RunStarted:
    """The script, its policy, its seed, and the hardware."""

    kind: ClassVar[str] = "run"
    script: str
    argv: list[str]
    policy: str
    seed_offset: int
    nudged: bool
    machine: dict[str, Any]
    started: str
    schema: int = SCHEMA


@dataclass(frozen=True)
class LossRecord:
    """One outermost ``backward()``, with its unscaled loss."""

    kind: ClassVar[str] = "loss"
    index: int
    loss: float
    at: float


@dataclass(frozen=True)
class UpdateRecord:
    """One call of an optimizer's step. Optimizers are numbered in the order in which they first stepped."""

    kind: ClassVar[str] = "update"
    index: int
    optimizer: int
    moved: bool
    skipped: bool
    loss_scale: float
    at: float
    reason: str = ""
    observed: bool = False  # memory and formats were measured, so the step is slower


@dataclass(frozen=True)
class MemoryRecord:
    """Peak memory of a training step in bytes; ``how`` is ``tensor bytes`` or ``cuda allocator``."""

    kind: ClassVar[str] = "memory"
    peak_bytes: int
    how: str


@dataclass(frozen=True)
class OpFormats:
    """How one op ran: its rule, the casts around it, and formats as ``"bf16 -> bf16"`` (float inputs -> outputs)."""

    op: str
    rule: str
    planned: str
    observed: str
    calls: int
    casts: int
    reason: str
    module: str = ""

    @property
    def as_planned(self) -> bool:
        """Whether the observed formats are the planned ones; True for an op without a plan."""
        return not self.planned or self.planned == self.observed


@dataclass(frozen=True)
class OpsRecord:
    """The formats observed in one step, op by op."""

    kind: ClassVar[str] = "ops"
    ops: list[OpFormats] = field(default_factory=list)


@dataclass(frozen=True)
class RangesRecord:
    """Exponent histograms of one step; ``update`` is the index of its `UpdateRecord`."""

    kind: ClassVar[str] = "ranges"
    update: int
    optimizer: int
    at: float
    loss_scale: float
    rows: list[RangeRow] = field(default_factory=list)


@dataclass(frozen=True)
class ModuleRounding:
    """To first order, how rounding one module's own arithmetic to a format changes the loss of one step."""

    module: str
    kind: str
    format: str
    signed: float  # the sum over the outputs' elements of e, the gradient times the rounding error
    squares: float  # the sum of e * e
    cause: str = ""  # the operation with the first number too large for the format
    near: bool = False  # whether that number is not too large yet, but would be if doubled


@dataclass(frozen=True)
class SensitivityRecord:
    """The sensitivity of a model's modules in one step, by module and format; and the step's loss."""

    kind: ClassVar[str] = "sensitivity"
    update: int
    loss: float
    rows: list[ModuleRounding] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    wide: list[str] = field(default_factory=list)  # last blocks that a ranked precision leaves in bf16


@dataclass(frozen=True)
class OverflowRecord:
    """Why the gradients of a skipped update were not finite."""

    kind: ClassVar[str] = "overflow"
    update: int
    optimizer: int
    at: float
    loss_scale: float
    finding: OverflowReport


@dataclass(frozen=True)
class RunEnded:
    """The run's exit status, its length in seconds, and notes that the user should read."""

    kind: ClassVar[str] = "end"
    status: int
    seconds: float
    notes: list[str] = field(default_factory=list)


Measured = MemoryRecord | OpsRecord | RangesRecord | SensitivityRecord | OverflowRecord
Record = RunStarted | LossRecord | UpdateRecord | Measured | RunEnded
_KINDS: dict[str, type[Any]] = {cls.kind: cls for cls in Record.__args__}
_NESTED = (OpFormats, RangeRow, Histogram, ModuleRounding, OverflowReport, TensorFacts)
_CLASSES: dict[str, type[Any]] = {cls.__name__: cls for cls in (*_KINDS.values(), *_NESTED)}

# Annotation -> the type that JSON gives it. An int field holds no bool, and a bool field no int.
_PLAIN: dict[str, type[Any]] = {"int": int, "bool": bool, "str": str, "dict[str, Any]": dict}
# Class -> its fields and their annotations (read once: a run has a hundred thousand lines).
_FIELDS = {cls: {f.name: str(f.type) for f in fields(cls)} for cls in _CLASSES.values()}


def to_line(record: Record) -> str:
    """One record as one line of strict JSON: NaN and infinities are the strings ``"nan"``, ``"inf"``."""
    return json.dumps({"kind": record.kind, **strict(record)}, allow_nan=False)


def from_line(line: str) -> Record:
    """The record that `to_line` wrote, without unknown fields (a newer writer's); UsageError if the line is none."""
    try:
        data = json.loads(line)
        record: Record = _made(_KINDS[data.pop("kind")], data)
        return record
    except (KeyError, TypeError, AttributeError, ValueError, OverflowError, RecursionError) as error:
        raise UsageError(f"not a run record: {line[:80]!r} ({type(error).__name__}: {error})") from error


def _made(cls: type[Any], value: dict[str, Any]) -> Any:
    kinds = _FIELDS[cls]
    return cls(**{name: _field(kinds[name], item) for name, item in value.items() if name in kinds})


def _field(kind: str, value: Any) -> Any:
    """A field's value from plain JSON; TypeError if it does not fit the field's annotation."""
    if kind == "float":
        return float(value)
    plain = _PLAIN.get(kind)
    if plain is not None:
        if type(value) is not plain:
            raise TypeError(f"expected {kind}, received {str(value)[:80]!r}")
        return value
    if kind.startswith("list["):
        kind = kind[5:-1]
        if type(value) is not list:
            raise TypeError(f"expected a list, received {str(value)[:80]!r}")
        return value if set(map(type, value)) <= {_PLAIN.get(kind)} else [_field(kind, one) for one in value]
    return _made(_CLASSES[kind], value)


def strict(value: Any) -> Any:
    """A value for strict JSON, NaN and infinities as strings. (`dataclasses.asdict` also copies, which is slow.)"""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    names = _FIELDS.get(type(value))
    if names is not None:
        return {name: strict(getattr(value, name)) for name in names}
    if isinstance(value, dict):
        return {key: strict(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return value if set(map(type, value)) == {int} else [strict(item) for item in value]
    return value


class RecordWriter:
    """Appends records to a file, flushing each line. A forked child (a DataLoader worker) writes nothing.

    A write that fails, as on a full disk, is the last one. It warns, so that the training goes on.
    """

    needed: ClassVar[bool] = False  # whether this process trains only for its records: a failed write raises

    def __init__(self, path: Path, mode: str = "w") -> None:
        self._begin(path, path.open(mode, encoding="utf-8", buffering=1))
        finalize(self, self._file.close)

    def _begin(self, place: str | os.PathLike[str], file: Any) -> None:
        self._place, self._file, self._closed, self._pid = os.fspath(place), file, False, os.getpid()

    def write(self, record: Record) -> None:
        """Append one record."""
        if os.getpid() == self._pid and not self._closed:
            self._or_warn(self._append, record)

    def close(self) -> None:
        """Write what is still in memory and close the file; later writes are dropped."""
        if os.getpid() == self._pid and not self._closed:
            self._closed = True
            self._or_warn(self._file.close)

    def _append(self, record: Record) -> None:
        self._file.write(to_line(record) + "\n")

    def _or_warn(self, write: Callable[..., None], *given: Record) -> None:
        try:
            write(*given)
        except OSError as error:
            self._closed = True
            with suppress(OSError):  # it tries to write again
                self._file.close()
            if self.needed:
                raise
            lost = f"{error.strerror or error}. Training goes on, but no more records are written."
            warnings.warn(f"{self._place}: {lost}", stacklevel=3)


def writer_of(given: Any, where: str, mode: str = "w") -> RecordWriter | None:
    """The writer for an argument: itself, or one to a file at a path; UsageError if it is neither."""
    if given is None or callable(getattr(given, "write", None)):
        return cast("RecordWriter | None", given)
    fix = "Use a path such as 'run.jsonl', or a mezzo.TensorBoardWriter."
    if not isinstance(given, (str, os.PathLike)):
        raise UsageError(f"{where} is {given!r}. {fix}")
    try:
        return RecordWriter(Path(given), mode)
    except OSError as error:
        raise UsageError(f"{where} is {os.fspath(given)!r}: {error.strerror}. {fix}") from error


def read(path: Path) -> Iterator[Record]:
    """The records of a file, without a last line cut short by a kill; UsageError names any other bad line."""
    with path.open(encoding="utf-8", errors="replace", newline="\n") as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith("\n"):  # only the last can
                return
            try:
                yield from_line(line.rstrip())
            except UsageError as error:
                raise UsageError(f"{path}:{number}: {error}") from error

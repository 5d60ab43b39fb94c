"""TensorBoardWriter: a run's records as TensorBoard events, instead of a file of JSON lines or in addition to it."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

from mezzo.core import records
from mezzo.core.errors import UsageError, checks_keywords
from mezzo.core.ranges import Histogram, label_of
from mezzo.core.records import Record, RecordWriter, writer_of
from mezzo.pytorch.distributed import own_path


class TensorBoardWriter(RecordWriter):
    """Writes records as TensorBoard events: the interface of `RecordWriter`.

    ::

        mp = mezzo.MixedPrecision(model, optimizer, "fp16", watch=True, records=TensorBoardWriter("runs/a"))

    ===================  ====================================================================================
    record               TensorBoard
    ===================  ====================================================================================
    loss                 scalar ``loss`` over backward calls
    update               scalars ``loss_scale`` and ``skipped`` over updates (``.../optimizer 1`` of a second one)
    ranges               histograms ``log2 WHAT/MODULE`` of exponents, gradients without the loss scale
    overflow             text ``findings``
    memory               scalar ``peak_bytes``
    run, ops, end        texts ``run``, ``formats``, ``end``
    ===================  ====================================================================================

    Times are the records' own. A child made by ``fork`` writes nothing.

    Args:
        logdir: the folder for the events; made if it is not there. Rank 1 of several has `runs/a-rank1`.
        also: a file, or another writer, that gets every record too: ``also="run.jsonl"``.

    Raises:
        UsageError: the package ``tensorboard`` is not installed.
    """

    @checks_keywords
    def __init__(
        self, logdir: str | os.PathLike[str], also: RecordWriter | str | os.PathLike[str] | None = None
    ) -> None:
        try:
            with _without_tensorflow():
                from torch.utils.tensorboard import SummaryWriter

                folder = own_path(logdir)
                self._begin(folder, SummaryWriter(os.fspath(folder)))
        except ImportError as error:
            raise UsageError(
                f"TensorBoardWriter needs the package tensorboard, which can't be imported ({error}). Install it: "
                "pip install tensorboard"
            ) from error
        self._also = writer_of(own_path(also), "TensorBoardWriter: also")
        self._zero = time.time()
        self._last = 0

    def write(self, record: Record) -> None:
        """Write one record."""
        if self._also is not None:
            self._also.write(record)
        super().write(record)

    def close(self) -> None:
        """Write what is still in memory and close the files; later writes are dropped."""
        super().close()
        if self._also is not None:
            self._also.close()

    def _scalar(self, tag: str, value: float, step: int, at: float) -> None:
        self._file.add_scalar(_utf8(tag), value, step, walltime=self._zero + at)

    def _text(self, tag: str, lines: list[str], step: int, at: float) -> None:
        # Indented: shown as it is, whatever a script's names would mean in Markdown.
        text = "\n".join("    " + line for part in lines for line in part.splitlines())
        self._file.add_text(tag, _utf8(text), step, walltime=self._zero + at)

    def _append(self, record: Record) -> None:
        if isinstance(record, records.LossRecord):
            self._scalar("loss", record.loss, record.index, record.at)
        elif isinstance(record, records.UpdateRecord):
            self._last = record.index
            suffix = f"/optimizer {record.optimizer}" if record.optimizer else ""
            self._scalar(f"loss_scale{suffix}", record.loss_scale, record.index, record.at)
            self._scalar(f"skipped{suffix}", float(record.skipped), record.index, record.at)
        elif isinstance(record, records.RangesRecord):
            for row in record.rows:
                if row.histogram.counts:
                    label = label_of(row, record.optimizer)
                    self._histogram(f"log2 {row.what}/{label}", row.histogram, record)
        elif isinstance(record, records.OverflowRecord):
            found = record.finding
            lines = [f"{found.cause}: {found.sentence}"]
            lines += [f"in: {tensor}" for tensor in found.inputs]
            lines += [f"out: {tensor}" for tensor in found.outputs]
            lines += [f"passed on by: {text}" for text in found.propagators]
            lines += [f"try: {text}" for text in found.remedies]
            self._text("findings", lines, record.update, record.at)
        elif isinstance(record, records.MemoryRecord):
            self._scalar("peak_bytes", float(record.peak_bytes), 0, time.time() - self._zero)
        elif isinstance(record, records.OpsRecord):
            lines = [f"{op.op:32} {op.observed:20} {op.calls:6} calls  {op.planned}" for op in record.ops]
            self._text("formats", lines, 0, time.time() - self._zero)
        else:
            lines = [f"{name}: {value}" for name, value in vars(record).items()]
            at = record.seconds if isinstance(record, records.RunEnded) else 0.0
            self._text(record.kind, lines, self._last, at)

    def _histogram(self, tag: str, histogram: Histogram, record: records.RangesRecord) -> None:
        """By exponent: on a linear axis of magnitudes all but the largest would be one bar."""
        limits = [float(histogram.lowest + place) for place in range(len(histogram.counts) + 1)]
        middles = [(limit + 0.5, count) for limit, count in zip(limits, histogram.counts)]
        self._file.add_histogram_raw(
            _utf8(tag),
            min=limits[0],
            max=limits[-1],
            num=sum(histogram.counts),
            sum=sum(count * middle for middle, count in middles),
            sum_squares=sum(count * middle * middle for middle, count in middles),
            # The first bucket of TensorBoard reaches down to minus infinity: an empty one ends where ours begin.
            bucket_limits=limits,
            bucket_counts=[0, *histogram.counts],
            global_step=record.update,
            walltime=self._zero + record.at,
        )


@contextmanager
def _without_tensorflow() -> Iterator[None]:
    """TensorBoard does not import TensorFlow, after which LLVM would abort the import of Triton (`torch._dynamo`)."""
    marker = "tensorboard.compat.notf"  # TensorBoard does not import TensorFlow if this module exists
    if "tensorflow" in sys.modules or marker in sys.modules:
        yield
        return
    sys.modules[marker] = ModuleType(marker)
    try:
        yield
    finally:
        del sys.modules[marker]


def _utf8(text: str) -> str:
    """With halves of surrogate pairs (an argument that was not UTF-8) as their codes, since protobuf refuses them."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")

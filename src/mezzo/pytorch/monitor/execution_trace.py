"""Every call that PyTorch's dispatcher made between two moments, as a tree with formats.

PyTorch's own execution trace records each dispatcher call with the dtypes of its tensors, the calls that it made in
turn, and the forward op to which a backward call belongs. Unlike a dispatch mode it sees ``linear`` and not only its
``addmm``, sees the call before and after autocast, and is not a guard of compiled functions. It is process-wide and may
begin and end anywhere.
"""

from __future__ import annotations

import json
import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ExecutionTraceObserver

_TENSOR = re.compile(r"Tensor\(([^()]+)\)")
_FORMATS = {
    "float": "fp32",
    "double": "fp64",
    "c10::Half": "fp16",
    "c10::BFloat16": "bf16",
    "c10::Float8_e4m3fn": "e4m3fn",
    "c10::Float8_e5m2": "e5m2",
}
# A step whose trace is larger than this is not read: it would take longer than the step is worth.
_LARGEST = 1 << 29

_active = False


@dataclass
class Call:
    """One call: its name (``aten::linear``), its floating tensors as (identity, format), and what it called.

    ``sequence`` is (thread, number): the number that autograd gives to a node which the call makes, or, in
    backward (``backward`` is True), the number of the node that is being run.
    """

    name: str
    schema: str
    inputs: list[tuple[int, str]]
    outputs: list[tuple[int, str]]
    sequence: tuple[int, int]
    backward: bool
    children: list[Call] = field(default_factory=list)

    @property
    def op(self) -> str:
        """The name as the op table has it: without ``aten::``."""
        return self.name.removeprefix("aten::")

    def walk(self) -> Iterator[Call]:
        """This call and all that it made, in order."""
        yield self
        for child in self.children:
            yield from child.walk()


class ExecutionTrace:
    """Records from `start` to `stop`; one at a time in a process. A child made by ``fork`` records nothing."""

    def __init__(self) -> None:
        self._observer = ExecutionTraceObserver()
        self._path = Path()

    def start(self) -> str:
        """Begin; returns why it could not, or an empty string."""
        global _active
        handle, name = tempfile.mkstemp(prefix="mezzo-trace-", suffix=".json")
        os.close(handle)
        self._observer, self._path = ExecutionTraceObserver(), Path(name)
        with _without_chatter() as said:
            self._observer.register_callback(name)
        if not self._observer.is_registered or any(b"already registered" in line for line in said):
            # PyTorch says True either way. To unregister now would end the other one's recording.
            self._observer._registered = False
            self._path.unlink()
            return "another execution trace is being recorded in this process"
        with _without_chatter():
            self._observer.start()
        _active = True
        return ""

    def stop(self) -> tuple[list[Call], str]:
        """End; returns the outermost calls in order, or none of them and why they can't be read."""
        global _active
        with _without_chatter():
            # Its own `stop` would crash if someone else had ended the recording; this doesn't.
            self._observer._execution_trace_running = False
            self._observer.unregister_callback()
        _active = False
        try:
            size = self._path.stat().st_size
            if size > _LARGEST:
                return [], f"the trace of the step is {size >> 20} MiB, too large to read"
            return _roots(
                json.loads(self._path.read_text(encoding="utf-8", errors="replace"), strict=False)
            ), ""
        except (ValueError, KeyError, TypeError, IndexError) as error:
            return [], f"the trace of the step can't be read ({error})"
        finally:
            self._path.unlink(missing_ok=True)


def _in_forked_child() -> None:
    """A child shares the file with its parent: what it writes would break the parent's trace."""
    if _active:
        with _without_chatter():
            torch._C._profiler._disable_execution_trace_observer()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_forked_child)


def _roots(trace: dict[str, Any]) -> list[Call]:
    nodes = sorted(trace["nodes"], key=lambda node: int(node["id"]))
    calls: dict[int, Call] = {}
    roots = []
    for node in nodes:
        attributes = {item["name"]: item["value"] for item in node["attrs"]}
        parent = calls.get(node["ctrl_deps"])
        own = attributes.get("scope") == 1
        thread = attributes.get("fw_tid" if own else "tid", 0)
        call = Call(
            node["name"],
            attributes.get("op_schema", ""),
            _floats(node["inputs"]),
            _floats(node["outputs"]),
            (thread, attributes.get("seq_id", -1)),
            own or (parent is not None and parent.backward),
        )
        calls[node["id"]] = call
        if parent is None:
            roots.append(call)
        else:
            parent.children.append(call)
    return roots


def _floats(side: dict[str, Any]) -> list[tuple[int, str]]:
    """The floating tensors among a call's arguments or results, those in lists too.

    A Python number that became a tensor (FP64, without dimensions) with other floating tensors is left out: it decides
    no format.
    """
    found: list[tuple[int, str, bool]] = []
    for kind, value, shape in zip(side["types"], side["values"], side["shapes"]):
        names = _TENSOR.findall(kind)
        if not names:
            continue
        single = kind.startswith("Tensor(")
        for name, tensor, size in zip(names, [value] if single else value, [shape] if single else shape):
            if name in _FORMATS and isinstance(tensor, list) and tensor and isinstance(tensor[0], int):
                found.append((tensor[0], _FORMATS[name], name == "double" and size == []))
    plain = [(identity, fmt) for identity, fmt, number in found if not number]
    return plain or [(identity, fmt) for identity, fmt, _ in found]


@contextmanager
def _without_chatter() -> Iterator[list[bytes]]:
    """Take the lines in which the observer announces itself out of stderr, and yield them; let others through."""
    said: list[bytes] = []
    try:
        kept = os.dup(2)
    except OSError:  # a process without stderr
        yield said
        return
    with tempfile.TemporaryFile() as caught:
        os.dup2(caught.fileno(), 2)
        try:
            yield said
        finally:
            os.dup2(kept, 2)
            os.close(kept)
            caught.seek(0)
            for line in caught:
                if b"execution_trace_observer" in line:
                    said.append(line)
                else:
                    os.write(2, line)

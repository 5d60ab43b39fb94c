"""The calls of PyTorch's dispatcher, as a tree with formats, from PyTorch's own execution trace."""

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

from torch.profiler import ExecutionTraceObserver

_TENSOR = re.compile(r"Tensor\(([^()]+)\)")
_FORMATS = {"float": "fp32", "double": "fp64", "c10::Half": "fp16", "c10::BFloat16": "bf16"}
_FORMATS |= {"c10::Float8_e4m3fn": "e4m3fn", "c10::Float8_e5m2": "e5m2"}
# A step whose trace is larger than this is not read: it would take longer than the step is worth.
_LARGEST = 1 << 29

_active: list[ExecutionTraceObserver] = []  # the one that records, if one does


@dataclass
class Call:
    """One call of an op, and those that it made."""

    name: str  # aten::linear
    schema: str
    inputs: list[tuple[int, str]]  # identity and format of each floating tensor
    outputs: list[tuple[int, str]]
    sequence: tuple[int, int]  # thread, and autograd's number of the node that it makes, or in backward runs
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


@dataclass
class Recorded:
    """The outermost calls in order; or none, and a note why they could not be recorded."""

    calls: list[Call] = field(default_factory=list)
    note: str = ""


@contextmanager
def recorded() -> Iterator[Recorded]:
    """Record what runs inside, in all threads; one at a time in a process. A child made by ``fork`` records nothing."""
    found, observer = Recorded(), ExecutionTraceObserver()
    handle, name = tempfile.mkstemp(prefix="mezzo-trace-", suffix=".json")
    os.close(handle)
    path = Path(name)
    try:
        with _without_chatter() as said:
            observer.register_callback(name)
        if not observer.is_registered or any(b"already registered" in line for line in said):
            # PyTorch says True either way. To unregister now would end the other one's recording.
            observer._registered = False
            found.note = "another PyTorch execution trace is being recorded in this process"
            yield found
            return
        with _without_chatter():
            observer.start()
        _active.append(observer)
        try:
            yield found
        finally:
            with _without_chatter():
                # Its own `stop` would crash if someone else had ended the recording; this doesn't.
                observer._execution_trace_running = False
                observer.unregister_callback()
            _active.clear()
        found.calls, found.note = _read(path)
    finally:
        path.unlink(missing_ok=True)


def _read(path: Path) -> tuple[list[Call], str]:
    size, unknown = path.stat().st_size, "the formats of the observed step are unknown: its trace"
    if size > _LARGEST:
        return [], f"{unknown} of {size >> 20} MiB is too large to read"
    try:
        return _roots(json.loads(path.read_text(encoding="utf-8", errors="replace"), strict=False)), ""
    except (ValueError, KeyError, TypeError, IndexError) as error:
        return [], f"{unknown} can't be read ({error})"


def _in_forked_child() -> None:
    """A child shares the file with its parent: what it writes would break the parent's trace."""
    for observer in _active:
        with _without_chatter():
            observer.stop()


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
    """The floating tensors among a call's arguments or results, without numbers that became FP64 tensors."""
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

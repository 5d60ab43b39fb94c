"""TensorFlow's own auto mixed precision pass, run on a graph by itself: what it painted, and the casts it put in."""

from __future__ import annotations

import ctypes
import mmap
import platform
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf
from tensorflow.core.framework import types_pb2
from tensorflow.core.protobuf import config_pb2, device_properties_pb2, meta_graph_pb2
from tensorflow.python.grappler import cluster as grappler_cluster
from tensorflow.python.grappler import tf_optimizer

from mezzo.tensorflow.graph import typed_graph
from mezzo.tensorflow.op_lists import OpLists
from mezzo.tensorflow.painting import paint

PREFIX = "TF_AUTO_MIXED_PRECISION_GRAPH_REWRITE_"
SUFFIX = "-AutoMixedPrecision"


@dataclass(frozen=True)
class Painted:
    """Of each graph (``""`` and the functions in it): the (node, type) pairs that became 16 bits, and the casts."""

    types: frozenset[tuple[str, str]]
    casts: frozenset[tuple[str, int, str]]
    nodes: int


def only(option: str) -> config_pb2.ConfigProto:
    """A configuration of grappler with one optimizer on."""
    config = config_pb2.ConfigProto()
    rewrites = config.graph_options.rewrite_options
    for field in rewrites.DESCRIPTOR.fields:
        if field.enum_type is not None and field.enum_type.name == "Toggle":
            setattr(rewrites, field.name, rewrites.OFF)
    rewrites.disable_model_pruning = True
    rewrites.memory_optimization = rewrites.NO_MEM_OPT
    rewrites.meta_optimizer_iterations = rewrites.ONE
    rewrites.min_graph_nodes = -1
    rewrites.fail_on_optimizer_errors = True
    setattr(rewrites, option, rewrites.ON)
    return config


def _gpu() -> list[Any]:
    """A cluster of a CPU and a GPU that is not there."""
    found = []
    for kind in ("CPU", "GPU"):
        device = device_properties_pb2.NamedDevice(name=f"/job:localhost/replica:0/task:0/device:{kind}:0")
        device.properties.type = kind
        if kind == "GPU":
            device.properties.vendor = "NVIDIA"
            device.properties.environment.update({"architecture": "8.0", "cuda": "12050", "cudnn": "8907"})
        found.append(device)
    return found


def optimized(graph_def: Any, lists: OpLists, fetches: Sequence[str], instructions: str = "AMX_FP16") -> Any:
    """`graph_def` after TensorFlow's pass with these lists; for FP16 on a CPU, on one with `instructions`."""
    meta = meta_graph_pb2.MetaGraphDef()
    meta.graph_def.CopyFrom(graph_def)
    meta.collection_def["train_op"].node_list.value.extend(fetches)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(PREFIX + "EMULATE_FP16", "0")
        if lists.mode == "cuda":
            patch.setenv(PREFIX + "SIMULATE_GPU", "1")
        for name, value in lists.environment().items():
            patch.setenv(name, value)
        cluster = grappler_cluster.Cluster(devices=_gpu() if lists.mode == "cuda" else None)
        processor = a_processor_with(instructions) if lists.mode == "onednn_float16" else nullcontext()
        try:
            with processor:
                return tf_optimizer.OptimizeGraph(only(lists.option), meta, verbose=False, cluster=cluster)
        finally:
            cluster.Shutdown()


@contextmanager
def a_processor_with(instructions: str) -> Iterator[None]:
    """TensorFlow finds these instructions, named as in its `CPUFeature`, and no others, whatever this processor has.

    The pass for FP16 on CPUs returns the graph as it is unless the processor has certain instructions. TensorFlow asks
    a function for them that its library exports; in here that function is `return feature == instructions`. The pass
    rewrites a graph and runs nothing, so that none of the instructions is used.
    """
    if platform.machine() != "x86_64" or sys.platform != "linux":
        pytest.skip("TensorFlow is told of FP16 instructions in machine code of x86-64, under Linux")
    header = Path(tf.sysconfig.get_include(), "tsl/platform/cpu_info.h").read_text()
    number = re.search(rf"\b{instructions} = (\d+),", header)
    assert number is not None
    library = ctypes.CDLL(str(Path(tf.__file__).with_name("libtensorflow_framework.so.2")))
    address = ctypes.cast(library["_ZN3tsl4port14TestCPUFeatureENS0_10CPUFeatureE"], ctypes.c_void_p).value
    assert address is not None
    code = bytes([0x83, 0xFF, int(number[1]), 0x0F, 0x94, 0xC0, 0xC3])  # cmp edi, number; sete al; ret
    before = ctypes.string_at(address, len(code))
    _protect(address, mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    try:
        ctypes.memmove(address, code, len(code))
        yield
    finally:
        ctypes.memmove(address, before, len(before))
        _protect(address, mmap.PROT_READ | mmap.PROT_EXEC)


def _protect(address: int, how: int) -> None:
    """Give the pages of the code at `address` these rights."""
    mprotect = ctypes.CDLL(None, use_errno=True).mprotect
    start = address & -mmap.PAGESIZE
    if mprotect(ctypes.c_void_p(start), ctypes.c_size_t(2 * mmap.PAGESIZE), how):
        raise OSError(ctypes.get_errno(), "mprotect")


def types_of(node: Any) -> dict[str, int]:
    """Type attribute (or entry of a list of them) -> its value."""
    found = {}
    for name, value in node.attr.items():
        if name.startswith("_"):
            continue
        if value.HasField("list"):
            found.update({f"{name}[{at}]": kind for at, kind in enumerate(value.list.type)})
        elif value.type:
            found[name] = value.type
    return found


def by_tensorflow(graph_def: Any, lists: OpLists, fetches: Sequence[str]) -> Painted:
    """What the pass did to the nodes of the graph itself."""
    out = {node.name: node for node in optimized(graph_def, lists, fetches).node}
    changed = set()
    for node in graph_def.node:
        after = types_of(out[node.name])
        for name, value in types_of(node).items():
            if after[name] != value:
                assert value == types_pb2.DT_FLOAT
                changed.add((node.name, name))
    casts = set()
    for name in out:
        if name.endswith(SUFFIX):
            source, port, to, _, _ = name.rsplit("-", 4)
            casts.add((source, int(port), {"CastToFp32": "float32"}.get(to, lists.dtype)))
    return Painted(frozenset(changed), frozenset(casts), len(graph_def.node))


def by_mezzo(graph_def: Any, lists: OpLists, fetches: Sequence[str]) -> Painted:
    """What `painting` says of them."""
    fed = [node.name for node in graph_def.node if node.op == "Placeholder"]  # grappler takes these to be fed
    graph = typed_graph(graph_def, lists, preserved=[*fetches, *fed], assume_kernels=False)
    result = paint(graph, lists)
    return Painted(
        frozenset(
            (graph.node_of(at).name, graph.types[at].name)
            for at in result.painted
            if graph.types[at].dtype == "float32"
        ),
        frozenset((graph.nodes[cast.node].name, cast.port, cast.dtype) for cast in result.casts),
        len(graph.nodes),
    )

"""A GraphDef as the plain graph that `painting` colours: definitions, kernels and devices looked up in TensorFlow."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from mezzo.core.errors import UsageError
from mezzo.tensorflow.op_lists import OpLists
from mezzo.tensorflow.typed_graph import Node, NodeType, TypedGraph

# Where tensors of unknown use enter and leave a graph.
_BORDER = frozenset({
    "_Arg", "_Retval", "OptionalFromValue", "OptionalGetValue", "PartitionedCall", "Placeholder",
    "StatefulPartitionedCall",
})  # fmt: skip
_VARIABLES = frozenset({"Variable", "VariableV2"})
_BATCH_NORM = {"FusedBatchNorm": "FusedBatchNormV2", "FusedBatchNormGrad": "FusedBatchNormGradV2"}


@dataclass(frozen=True)
class _Kernel:
    device: str
    label: str
    constraints: tuple[tuple[str, frozenset[int]], ...]

    def runs(self, types: Mapping[str, tuple[int, ...]]) -> bool:
        """Whether it takes a node with these type attributes."""
        return all(name in types and allowed.issuperset(types[name]) for name, allowed in self.constraints)


@dataclass(frozen=True)
class _Op:
    """What an op's definition says: (type attribute, list?, number attribute, fixed type) of each argument."""

    inputs: tuple[tuple[str, bool, str, int], ...]
    outputs: tuple[tuple[str, bool, str, int], ...]
    # Type attribute -> (is it a list, the types it may be or None for any).
    attributes: Mapping[str, tuple[bool, frozenset[int] | None]]
    stateful: bool
    refs: bool


@dataclass
class _Types:
    """The types of a node while it is read: name -> its value and its ports."""

    dtype: dict[tuple[str, int], int] = field(default_factory=dict)
    inputs: dict[tuple[str, int], list[int]] = field(default_factory=dict)
    outputs: dict[tuple[str, int], list[int]] = field(default_factory=dict)

    def add(self, key: tuple[str, int], dtype: int) -> None:
        self.dtype.setdefault(key, dtype)


def typed_graph(
    graph_def: Any, lists: OpLists, *, preserved: Iterable[str] = (), assume_kernels: bool | None = None
) -> TypedGraph:
    """Read a `GraphDef`.

    Args:
        graph_def: TensorFlow's GraphDef; calls of the functions of its library are nodes like any other.
        lists: the mode: its 16-bit dtype, and the device type that nodes without a device are taken to be on.
        preserved: names of nodes that grappler must leave alone (what is fed, fetched or kept).
        assume_kernels: take each op to have a 16-bit kernel where its definition allows one. Unless given: where this
            build of TensorFlow has no kernels for the device (a CPU build asked about a GPU).

    Raises:
        UsageError: a node's op or input is not in the graph or in this TensorFlow.
    """
    from tensorflow.core.framework import types_pb2

    names = {number: name[3:].lower() for name, number in types_pb2.DataType.items()}
    names.update(
        {types_pb2.DT_FLOAT: "float32", types_pb2.DT_HALF: "float16", types_pb2.DT_DOUBLE: "float64"}
    )
    target = types_pb2.DT_HALF if lists.dtype == "float16" else types_pb2.DT_BFLOAT16
    if assume_kernels is None:
        assume_kernels = not has_kernels(lists.device)
    library = {function.signature.name: _op(function.signature) for function in graph_def.library.function}
    index = {node.name: number for number, node in enumerate(graph_def.node)}
    by_name = {node.name: node for node in graph_def.node}
    preserved = frozenset(preserved)
    nodes: list[Node] = []
    types: list[NodeType] = []
    for number, node in enumerate(graph_def.node):
        left_out = _left_out(node, lists, preserved)
        op_name = node.op if left_out else _BATCH_NORM.get(node.op, node.op)
        op = library.get(op_name) or _definition(op_name)
        if op is None:
            raise UsageError(
                f"explain: node {node.name!r} has the op {node.op!r}, which this TensorFlow does not know. Import the "
                "library that registers it first."
            )
        attributes = _attributes(node, op)
        if op_name != node.op:
            attributes["U"] = (types_pb2.DT_FLOAT,)
        read, input_keys, output_keys = _read(node, op, attributes)
        place = {key: len(types) + at for at, key in enumerate(read.dtype)}
        for key, dtype in read.dtype.items():
            types.append(
                NodeType(
                    node=number,
                    name=key[0] if key[1] < 0 else f"{key[0]}[{key[1]}]" if key[0] else "",
                    dtype=names.get(dtype, str(dtype)),
                    inputs=tuple(read.inputs.get(key, ())),
                    outputs=tuple(read.outputs.get(key, ())),
                    allowed=_allowed(op, key[0], dtype, target),
                    kernel=bool(key[0])
                    and (assume_kernels or _has_kernel(node, op_name, attributes, key, target, lists.device)),
                    quantized=any(names.get(value, "").startswith("q") for value in read.dtype.values()),
                )
            )
        nodes.append(
            Node(
                name=node.name,
                op=op_name,
                inputs=tuple(_inputs(node, index)),
                input_types=tuple(place[key] for key in input_keys),
                output_types=tuple(place[key] for key in output_keys),
                left_out=left_out,
                reads_variable=_reads_variable(node, by_name),
                forcible=op_name not in ("Const", "SoftmaxCrossEntropyWithLogits")
                and not (op.stateful or op.refs),
                border=node.op in _BORDER or node.op in library,
            )
        )
    return TypedGraph(tuple(nodes), tuple(types), dtype=lists.dtype, kernels_known=not assume_kernels)


@cache
def has_kernels(device: str) -> bool:
    """Whether this build of TensorFlow has kernels for a device type (`"GPU"`, `"CPU"`)."""
    return any(kernel.device == device for kernel in _kernels("MatMul"))


def _left_out(node: Any, lists: OpLists, preserved: Collection[str]) -> str:
    if node.name in preserved:
        return "it is fed, fetched or kept, so grappler leaves it as it is"
    if node.device:
        kind = _device(node.device)
        if kind is None or lists.device not in kind.upper():
            return f"it is on {node.device}, and the pass looks at {lists.device}s only"
    return ""


def _device(name: str) -> str | None:
    """The type of a device that is named in full (`/device:CPU:0`), or None."""
    import tensorflow as tf

    try:
        spec = tf.DeviceSpec.from_string(name)
    except ValueError:
        return None
    return None if spec.device_index is None else spec.device_type


def _inputs(node: Any, index: Mapping[str, int]) -> Iterator[tuple[int, int]]:
    for given in node.input:
        if given.startswith("^"):
            continue
        name, _, port = given.partition(":")
        if name not in index:
            raise UsageError(
                f"explain: node {node.name!r} has the input {given!r}, which is not in the graph."
            )
        yield index[name], int(port or 0)


def _attributes(node: Any, op: _Op) -> dict[str, tuple[int, ...]]:
    """The values of a node's type attributes, a tuple of one for those that are no list."""
    found: dict[str, tuple[int, ...]] = {}
    for name, (is_list, _) in op.attributes.items():
        if name in node.attr:
            value = node.attr[name]
            found[name] = tuple(value.list.type) if is_list else (value.type,)
    return found


def _read(
    node: Any, op: _Op, attributes: Mapping[str, tuple[int, ...]]
) -> tuple[_Types, list[tuple[str, int]], list[tuple[str, int]]]:
    read, sides = _Types(), []
    for arguments, ports in ((op.inputs, read.inputs), (op.outputs, read.outputs)):
        keys = [key for argument in arguments for key in _ports(node, argument, attributes)]
        for port, (key, dtype) in enumerate(keys):
            read.add(key, dtype)
            ports.setdefault(key, []).append(port)
        sides.append([key for key, _ in keys])
    for name, values in attributes.items():  # those of no port as well, such as a list's element_dtype
        for at, value in enumerate(values):
            read.add((name, at if op.attributes[name][0] else -1), value)
    return read, sides[0], sides[1]


def _ports(
    node: Any, argument: tuple[str, bool, str, int], attributes: Mapping[str, tuple[int, ...]]
) -> Iterable[tuple[tuple[str, int], int]]:
    name, is_list, number, fixed = argument
    if is_list:
        return [((name, at), value) for at, value in enumerate(attributes.get(name, ()))]
    # A fixed type has no name; its number tells several of one op apart.
    one = ((name, -1), attributes.get(name, (0,))[0]) if name else (("", fixed), fixed)
    return [one] * (node.attr[number].i if number and number in node.attr else 1)


def _allowed(op: _Op, name: str, dtype: int, target: int) -> bool:
    if not name:
        return dtype == target
    allowed = op.attributes[name][1]
    return allowed is None or target in allowed


def _has_kernel(
    node: Any,
    op: str,
    attributes: Mapping[str, tuple[int, ...]],
    key: tuple[str, int],
    target: int,
    device: str,
) -> bool:
    """Whether a kernel would run the node with this one type changed and its other types as they are."""
    values = attributes[key[0]]
    at = max(key[1], 0)
    changed = tuple(sorted({**attributes, key[0]: (*values[:at], target, *values[at + 1 :])}.items()))
    kind = (_device(node.device) if node.device else device) or device
    label = node.attr["_kernel"].s.decode() if "_kernel" in node.attr else ""
    return _runs(op, kind, label, changed)


@cache
def _runs(op: str, device: str, label: str, types: tuple[tuple[str, tuple[int, ...]], ...]) -> bool:
    given = dict(types)
    # A kernel for any device is taken where the device has none of its own.
    return any(
        kernel.device == kind and kernel.label == label and kernel.runs(given)
        for kind in (device, "DEFAULT")
        for kernel in _kernels(op)
    )


@cache
def _kernels(op: str) -> tuple[_Kernel, ...]:
    from tensorflow.python.framework import kernels

    return tuple(
        _Kernel(
            kernel.device_type,
            kernel.label,
            tuple((c.name, frozenset(c.allowed_values.list.type)) for c in kernel.constraint),
        )
        for kernel in kernels.get_registered_kernels_for_op(op).kernel
    )


@cache
def _definition(op: str) -> _Op | None:
    from tensorflow.python.framework import op_def_registry

    definition = op_def_registry.get(op)
    return None if definition is None else _op(definition)


def _op(definition: Any) -> _Op:
    def argument(arg: Any) -> tuple[str, bool, str, int]:
        return (arg.type_list_attr or arg.type_attr, bool(arg.type_list_attr), arg.number_attr, arg.type)

    return _Op(
        tuple(map(argument, definition.input_arg)),
        tuple(map(argument, definition.output_arg)),
        {
            attr.name: (attr.type == "list(type)", frozenset(attr.allowed_values.list.type) or None)
            for attr in definition.attr
            if attr.type in ("type", "list(type)")
        },
        definition.is_stateful,
        any(arg.is_ref for arg in (*definition.input_arg, *definition.output_arg)),
    )


def _reads_variable(node: Any, by_name: Mapping[str, Any]) -> bool:
    """Whether a node is an Identity of a TensorFlow 1 variable, or an Enter of such an Identity."""
    if node.op not in ("Identity", "Enter") or not node.input:
        return False
    source = by_name.get(node.input[0].partition(":")[0])
    if source is None:
        return False
    return source.op in _VARIABLES if node.op == "Identity" else _reads_variable(source, by_name)

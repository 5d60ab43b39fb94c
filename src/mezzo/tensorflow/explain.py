"""`mezzo.tensorflow.explain`: which nodes of a function's graph run in 16 bits, and why the others do not.

Nothing is computed. The function is traced, TensorFlow's function optimizer inlines calls and lowers loops and branches
as it does before the pass, and `painting` colours the graph. What other optimizers do to a graph before the pass runs
(constants folded, duplicates merged) is left out, so that the names are those that the reader's code gave.
"""

from __future__ import annotations

import inspect
import os
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from mezzo.core.errors import UsageError, unknown_name
from mezzo.tensorflow import op_lists as lists_
from mezzo.tensorflow.explanation import CastRow, Explanation, NodeRow
from mezzo.tensorflow.graph import typed_graph
from mezzo.tensorflow.op_lists import OpLists
from mezzo.tensorflow.painting import Painting, paint
from mezzo.tensorflow.reasons import NO_ALLOW_OP, Reasons
from mezzo.tensorflow.typed_graph import TypedGraph

__all__ = ["Explanation", "explain"]


def explain(
    fn: Any,
    *args: Any,
    mode: str = "auto",
    op_lists: OpLists | Mapping[str, Iterable[str]] | str | os.PathLike[str] | None = None,
    **kwargs: Any,
) -> Explanation:
    """Which nodes of a graph grappler's auto mixed precision turns into 16 bits, which not, and why.

    Args:
        fn: a Python function, a `tf.function`, a concrete function, a Keras 3 or tf_keras model (its forward pass), a
            `tf.Graph` or a `GraphDef`. A training step shows its gradients too.
        args, kwargs: what to call it with, or a `tf.TensorSpec` in the place of a tensor; none for a concrete function
            or a graph, and none for a model that knows the shapes of its inputs.
        mode: `cuda` or fp16 (FP16 on a GPU), `onednn_bfloat16` or bf16 (BF16 on a CPU), `onednn_float16`, `cpu` (FP16's
            lists, on a CPU); `auto`: `cuda` where TensorFlow sees a GPU, else `onednn_bfloat16`. Every name that the
            rewrite's `precision` takes for fp16 and bf16 is taken, in capitals or not.
        op_lists: ops to move to other lists, as a mapping (``{"deny": ["Tanh"]}``), a TOML file with the same keys, or
            the lists themselves. What the rewrite would do with them; None for the lists that are in force.

    Returns:
        a row for each node with an FP32 type; print it, or read `rows`, `painted`, `unpainted`, `casts`.

    Raises:
        UsageError: `fn` is nothing of the kind, or cannot be traced with `args`; `mode` is no name, or FP32's.
        UnknownNameError: no such mode, list or op.

    >>> import tensorflow as tf
    >>> result = explain(lambda x: tf.exp(tf.nn.relu(x @ x)), tf.TensorSpec((2, 2)), mode="onednn_bfloat16")
    >>> [row.op for row in result.painted], result.row("Exp").why
    (['MatMul', 'Relu'], 'Exp is on the deny list')
    """
    lists = _lists(mode, op_lists)
    graph_def, kept, compiled = _graph_of(fn, args, kwargs)
    fed = [node.name for node in graph_def.node if node.op == "Placeholder"]
    graph = typed_graph(inlined(graph_def, kept), lists, preserved=[*kept, *fed])
    return _explanation(graph, lists, paint(graph, lists), compiled)


def _lists(mode: str, given: Any) -> OpLists:
    from mezzo.tensorflow.op_list_overrides import overrides_of
    from mezzo.tensorflow.switch import SWITCH

    name = _mode(mode)
    if isinstance(given, OpLists):
        if name not in ("auto", given.mode):
            raise UsageError(
                f"explain: mode is {mode!r} and op_lists are those of {given.mode!r}; give one of them."
            )
        return given
    if name == "auto":
        import tensorflow as tf

        name = "cuda" if tf.config.list_physical_devices("GPU") else "onednn_bfloat16"
    if not given:
        return lists_.op_lists(name)
    # As the rewrite does, which moves ops from where the user has them, whatever lists it was given before.
    return lists_.op_lists(name, overrides_of(given), environ=SWITCH.environ())


def _mode(given: Any) -> str:
    """The mode of a name of one or of a precision; `auto` stays."""
    from mezzo.tensorflow.precision import FULL, MODES, NAMES

    modes = lists_.modes()
    if not isinstance(given, str):
        raise UsageError(f"explain: mode is {given!r}; give one of the names auto, {', '.join(modes)}.")
    name = given.lower()
    if name in FULL:
        raise UsageError(
            f"explain: mode is {given!r}, in which nothing is rewritten. Use 'fp16', 'bf16' or 'auto'."
        )
    precision = NAMES.get(name, name)
    name = MODES.get(precision, precision)
    if name not in ("auto", *modes):
        raise unknown_name("mode", given, dict.fromkeys([*modes, *NAMES]), where="explain: ")
    return name


def _graph_of(fn: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, list[str], bool]:
    """The GraphDef of what was given, the names of nodes that must be kept, and whether XLA compiles it all."""
    import tensorflow as tf
    from tensorflow.core.framework import graph_pb2

    if isinstance(fn, (graph_pb2.GraphDef, tf.Graph)):
        _no_arguments(fn, args, kwargs)
        graph_def = fn if isinstance(fn, graph_pb2.GraphDef) else fn.as_graph_def()
        if isinstance(fn, tf.Graph) and hasattr(fn, "outputs"):  # a function's own graph
            return *_with_results(graph_def, fn.outputs), False
        return graph_def, _unread(graph_def), False
    if hasattr(fn, "structured_input_signature") and hasattr(fn, "graph"):
        _no_arguments(fn, args, kwargs)
        return *_with_results(fn.graph.as_graph_def(), fn.graph.outputs), _by_xla(fn)
    call, args, kwargs = _callable(fn, args, kwargs)
    try:
        concrete = call.get_concrete_function(*args, **kwargs)
    except (TypeError, ValueError) as error:
        raise UsageError(
            f"explain: {_name(fn)} cannot be traced with {len(args) + len(kwargs)} arguments: "
            f"{_cause(error)} Give it what it is called with, or a tf.TensorSpec for a tensor."
        ) from error
    return *_with_results(concrete.graph.as_graph_def(), concrete.graph.outputs), _by_xla(concrete)


def _by_xla(concrete: Any) -> bool:
    return bool(concrete.function_def.attr["_XlaMustCompile"].b)


def _callable(
    fn: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[Any, Sequence[Any], Mapping[str, Any]]:
    import tensorflow as tf

    if hasattr(fn, "get_concrete_function"):
        return fn, args, kwargs
    if _is_model(fn):
        # A model is called with its arguments held fast, so that a training=True is no tensor.
        return tf.function(lambda *inputs: fn(*inputs, **kwargs)), args or _inputs_of(fn), {}
    if not callable(fn) or inspect.isclass(fn):
        raise UsageError(
            f"explain: got {_name(fn)}; give a Python function, a tf.function, a concrete function, a Keras model, a "
            "tf.Graph or a GraphDef."
        )
    return tf.function(fn), args, kwargs


def _is_model(fn: Any) -> bool:
    for name in ("keras", "tf_keras"):
        library = sys.modules.get(name)
        kind = getattr(library, "Layer", None) or getattr(getattr(library, "layers", None), "Layer", None)
        if kind is not None and isinstance(fn, kind):
            backend = library.backend.backend() if name == "keras" and library is not None else "tensorflow"
            if backend != "tensorflow":
                raise UsageError(
                    f"explain: this model runs on Keras's {backend} backend, and TensorFlow's rewrite changes "
                    "TensorFlow graphs only. Set KERAS_BACKEND=tensorflow before importing keras."
                )
            return True
    return False


def _inputs_of(model: Any) -> list[Any]:
    import tensorflow as tf

    if not (getattr(model, "built", False) and getattr(model, "inputs", None)):
        raise UsageError(
            "explain: this model does not know the shapes of its inputs. Give one or a tf.TensorSpec: "
            "explain(model, tf.TensorSpec((None, 784), tf.float32))."
        )
    # `input` has the structure that the model is called with (one tensor, a list, a mapping); a Sequential has none.
    structure = getattr(model, "input", model.inputs[0])
    return [tf.nest.map_structure(lambda given: tf.TensorSpec(tuple(given.shape), given.dtype), structure)]


def _with_results(graph_def: Any, outputs: Sequence[Any]) -> tuple[Any, list[str]]:
    """The graph with a node for each result, as TensorFlow adds to a function's body; those it must keep."""
    from tensorflow.core.framework import graph_pb2

    made = graph_pb2.GraphDef()
    made.CopyFrom(graph_def)
    for number, tensor in enumerate(outputs):
        result = made.node.add(name=f"result_{number}", op="_Retval", input=[tensor.name])
        result.attr["T"].type = tensor.dtype.base_dtype.as_datatype_enum
        result.attr["index"].i = number
    _prune(made)
    return made, _unread(made)


def _unread(graph_def: Any) -> list[str]:
    """The ends of a graph: what nothing reads."""
    read = {_giver(given) for node in graph_def.node for given in node.input}
    return [node.name for node in graph_def.node if node.name not in read]


def _prune(graph_def: Any) -> None:
    """Drop what neither a result nor an effect needs, as TensorFlow does with a function's body."""
    from tensorflow.python.framework import op_def_registry

    nodes = {node.name: node for node in graph_def.node}
    # Stateful ops are run for what they do; a placeholder is an argument whether it is used or not.
    ahead = [
        name
        for name, node in nodes.items()
        if node.op in ("_Retval", "Placeholder") or getattr(op_def_registry.get(node.op), "is_stateful", True)
    ]
    needed: set[str] = set()
    while ahead:
        name = ahead.pop()
        if name not in needed:
            needed.add(name)
            ahead += [_giver(given) for given in nodes[name].input]
    live = [node for node in graph_def.node if node.name in needed]
    if len(live) < len(graph_def.node):
        copies = [type(node).FromString(node.SerializeToString()) for node in live]
        del graph_def.node[:]
        graph_def.node.extend(copies)


def _giver(given: str) -> str:
    return given.lstrip("^").partition(":")[0]


def inlined(graph_def: Any, kept: Sequence[str]) -> Any:
    """The graph as TensorFlow's function optimizer hands it on: calls inlined, loops and branches lowered."""
    if not graph_def.library.function:
        return graph_def
    from tensorflow.core.protobuf import config_pb2, device_properties_pb2, meta_graph_pb2
    from tensorflow.python.grappler import cluster, tf_optimizer

    config = config_pb2.ConfigProto()
    rewrites = config.graph_options.rewrite_options
    rewrites.optimizers.append("function")
    rewrites.meta_optimizer_iterations = rewrites.ONE
    rewrites.min_graph_nodes = -1
    rewrites.fail_on_optimizer_errors = True
    meta = meta_graph_pb2.MetaGraphDef()
    meta.graph_def.CopyFrom(graph_def)
    meta.collection_def["train_op"].node_list.value.extend(kept)
    cpu = device_properties_pb2.NamedDevice(name="/job:localhost/replica:0/task:0/device:CPU:0")
    cpu.properties.type = "CPU"
    # A machine that is only described: grappler would else start the real one's devices.
    return tf_optimizer.OptimizeGraph(config, meta, verbose=False, cluster=cluster.Cluster(devices=[cpu]))


def _explanation(graph: TypedGraph, lists: OpLists, painting: Painting, compiled: bool) -> Explanation:
    reasons = Reasons(graph, lists, painting)
    rows = []
    for number, node in enumerate(graph.nodes):
        kinds = [index for index in graph.types_of[number] if graph.types[index].dtype == "float32"]
        if not kinds:
            continue
        painted = [index for index in kinds if index in painting.painted]
        rule, why = reasons.of((painted or kinds)[0])
        kept = [graph.types[index].name or "fixed" for index in kinds if index not in painting.painted]
        if painted and kept:
            why += f"; its type {', '.join(kept)} stays FP32"
        rows.append(
            NodeRow(
                node=node.name,
                op=node.op,
                colour=lists.colour(node.op),
                painted=bool(painted),
                types={
                    graph.types[index].name or "fixed": lists.dtype
                    if index in painting.painted
                    else "float32"
                    for index in kinds
                },
                rule=rule,
                why=why,
            )
        )
    casts = tuple(
        CastRow(
            graph.nodes[c.node].name, c.port, c.dtype, tuple(graph.nodes[reader].name for reader, _ in c.to)
        )
        for c in painting.casts
    )
    return Explanation(
        lists.mode,
        lists.dtype,
        lists.device,
        len(graph.nodes),
        tuple(rows),
        casts,
        tuple(_notes(graph, lists, painting, compiled)),
    )


def _notes(graph: TypedGraph, lists: OpLists, painting: Painting, compiled: bool) -> list[str]:
    notes = []
    if compiled:
        notes.append(
            "XLA compiles this function (jit_compile=True), and TensorFlow's rewrite leaves such functions in FP32: "
            "the rows say what it would do with jit_compile=False."
        )
    if not painting.painted:
        notes.append(NO_ALLOW_OP)
    if not graph.kernels_known:
        notes.append(
            f"This build of TensorFlow has no {lists.device} kernels to look up: each listed op is taken to have one "
            f"in {lists.dtype} where its definition allows it."
        )
    if lists.mode == "onednn_float16":
        notes.append(
            "TensorFlow rewrites nothing in this mode unless the processor has AMX-FP16 or AVX-NE-CONVERT "
            "(AVX512-FP16 alone is not enough)."
        )
    if lists.mode == "cpu":
        notes.append(
            "In this mode TensorFlow computes in FP32 between two casts, unless "
            "TF_AUTO_MIXED_PRECISION_GRAPH_REWRITE_EMULATE_FP16=0."
        )
    return notes


def _no_arguments(fn: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    if args or kwargs:
        raise UsageError(
            f"explain: {_name(fn)} is traced already and takes no arguments here; got {len(args) + len(kwargs)}."
        )


def _name(fn: Any) -> str:
    return getattr(fn, "__name__", None) or getattr(fn, "name", None) or f"a {type(fn).__name__}"


def _cause(error: Exception) -> str:
    """The sentence of an error that says why, without the frames of AutoGraph and Keras around it."""
    lines = [re.sub(r"\x1b\[\d*m", "", line).strip() for line in str(error).splitlines()]
    lines = [line for line in lines if line] or [type(error).__name__]
    said = lines[0]
    if said.startswith("in user code:"):
        named = [at for at, line in enumerate(lines) if re.match(r"[\w.]*(Error|Exception):", line)]
        lines = lines[named[0] :] if named else lines[-1:]
        said = lines[0]
    if "Exception encountered when calling" in said and len(lines) > 1:
        said = f"{said} {lines[1]}"
    return said if said.endswith(".") else f"{said}."

"""Exponent histograms of a backend's tensors, counted where the tensors are."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import numpy.typing as npt

from mezzo.core.ranges import BINS, INFINITE, NAN, ZERO, Histogram
from mezzo.keras.dtypes import NAMES, SIXTEEN_BITS

_INFINITY = 0xFF << 23  # FP32's pattern of it
_BLOCK = 1 << 20  # PyTorch allocates some 30 bytes for each element that it counts at once


def format_of(tensor: Any) -> str:
    """The format of a tensor's numbers, by Mezzo's name where it has one."""
    name = str(keras.backend.standardize_dtype(_numbers(tensor).dtype))
    return NAMES.get(name, name)


def is_floating(tensor: Any) -> bool:
    """Whether a tensor holds real floating-point numbers."""
    dtype = getattr(_numbers(tensor), "dtype", None)
    return dtype is not None and str(keras.backend.standardize_dtype(dtype)) in NAMES


def count(tensor: Any) -> Any:
    """How often each exponent occurs; nobody waits for the device.

    FP64 numbers are counted as FP32. Of a sparse gradient (TensorFlow's IndexedSlices) what it holds counts.

    Args:
        tensor: floating, of any shape, of Keras's backend.

    Returns:
        Integer tensor of shape ``(BINS + 1,)``: `mezzo.core.ranges.BINS` counts, then FP32's bit pattern of the largest
        finite magnitude.
    """
    return _COUNTERS[keras.backend.backend()](_numbers(tensor))


def count_all(tensors: Sequence[Any]) -> list[Any]:
    """`count` of each; on JAX in one compiled function."""
    return list(at_once(_count_each)(list(tensors)))


def count_ratios(before: Sequence[Any], after: Sequence[Any]) -> list[Any]:
    """`count` of the `ratios` of each pair; on JAX in one compiled function."""
    return list(at_once(_count_each_ratio)(list(before), list(after)))


def ratios(before: Any, after: Any) -> Any:
    """``abs(after - before) / abs(before)`` in FP32; 0 where nothing moved, infinite where something did from 0.

    Args:
        before, after: tensors of one shape.
    """
    ops = keras.ops
    old, new = (ops.cast(one, "float32") for one in (before, after))
    moved = ops.abs(new - old)
    still = ops.equal(moved, 0)
    return ops.where(still, ops.zeros_like(old), moved / ops.abs(ops.where(still, ops.ones_like(old), old)))


def _count_each(tensors: Sequence[Any]) -> list[Any]:
    return [count(one) for one in tensors]


def _count_each_ratio(before: Sequence[Any], after: Sequence[Any]) -> list[Any]:
    return [count(ratios(old, new)) for old, new in zip(before, after, strict=True)]


_compiled: dict[Callable[..., Any], Callable[..., Any]] = {}


def at_once(function: Callable[..., Any]) -> Callable[..., Any]:
    """JAX would compile every operation for every shape by itself; the others run them as they are."""
    if keras.backend.backend() != "jax":
        return function
    if function not in _compiled:
        import jax

        _compiled[function] = jax.jit(function)
    return _compiled[function]


def read(counted: Sequence[Any], shifts: Sequence[int]) -> list[Histogram]:
    """The histograms, each of its numbers times ``2**shift``; waits for the device once.

    Args:
        counted: what `count` gave.
        shifts: for each.
    """
    if not counted:
        return []
    words = np.asarray(keras.ops.convert_to_numpy(keras.ops.stack(list(counted))))
    return [_histogram(row, shift) for row, shift in zip(words, shifts, strict=True)]


def _histogram(words: npt.NDArray[Any], shift: int) -> Histogram:
    largest = float(words[BINS].astype(np.int32).view(np.float32))
    found = Histogram.from_bins(words[:BINS].tolist(), largest)
    if not shift or not found.counts:
        return found
    return Histogram(
        found.lowest + shift,
        found.counts,
        found.zeros,
        found.infinities,
        found.nans,
        math.ldexp(found.largest, shift),
    )


def _numbers(tensor: Any) -> Any:
    """The tensor itself, or what a sparse gradient holds: its `values` is a tensor there, elsewhere a method."""
    held = getattr(tensor, "values", None)
    return tensor if held is None or callable(held) else held


def _tensorflow(tensor: Any) -> Any:
    import tensorflow as tf

    pattern = tf.bitcast(tf.reshape(tf.cast(tensor, tf.float32), [-1]), tf.int32) & 0x7FFFFFFF
    index = tf.bitwise.right_shift(pattern, 23)
    index = tf.where(pattern == 0, ZERO, tf.where(pattern > _INFINITY, NAN, index))
    bins = tf.math.bincount(index, minlength=BINS, maxlength=BINS, dtype=tf.int32)
    finite = tf.where(pattern < _INFINITY, pattern, 0)
    return tf.concat([bins, tf.reduce_max(tf.concat([finite, [0]], 0), keepdims=True)], 0)


def _jax(tensor: Any) -> Any:
    import jax.numpy as jnp

    pattern = _jax_pattern(tensor).reshape(-1)
    index = jnp.where(pattern == 0, ZERO, jnp.where(pattern > _INFINITY, NAN, pattern >> 23))
    bins = jnp.zeros(BINS, jnp.int32).at[index].add(1)
    finite = jnp.max(jnp.where(pattern < _INFINITY, pattern, 0), initial=0)
    return jnp.concatenate([bins, finite[None]])


def _jax_pattern(tensor: Any) -> Any:
    """FP32's bits of the magnitudes, int32; of 16-bit numbers by whole numbers alone.

    Compiled, a rounding to 16 bits and the cast back may both be left out, and `lax.reduce_precision`, which is not,
    makes fp16's subnormals 0.
    """
    import jax
    import jax.numpy as jnp

    dtype = str(tensor.dtype)
    if dtype not in SIXTEEN_BITS:
        return jax.lax.bitcast_convert_type(tensor.astype(jnp.float32), jnp.int32) & 0x7FFFFFFF
    bits = jax.lax.bitcast_convert_type(tensor, jnp.uint16).astype(jnp.int32) & 0x7FFF
    if dtype == "bfloat16":
        return bits << 16
    exponent, mantissa = bits >> 10, bits & 0x3FF
    normal = ((exponent + 112) << 23) | (mantissa << 13)
    top = 31 - jax.lax.clz(jnp.maximum(mantissa, 1))  # of a subnormal, mantissa * 2^-24
    subnormal = ((top + 103) << 23) | ((mantissa << (23 - top)) & 0x7FFFFF)
    beyond = _INFINITY | (mantissa << 13)
    small = jnp.where(mantissa == 0, 0, subnormal)
    return jnp.where(exponent == 0, small, jnp.where(exponent == 31, beyond, normal))


def _torch(tensor: Any) -> Any:
    import torch

    elements = tensor.detach().reshape(-1)
    row = torch.zeros(BINS + 1, dtype=torch.int64, device=elements.device)
    for start in range(0, elements.numel(), _BLOCK):
        pattern = elements[start : start + _BLOCK].to(torch.float32).view(torch.int32) & 0x7FFFFFFF
        index = torch.where(pattern == 0, ZERO, torch.where(pattern > _INFINITY, NAN, pattern >> 23))
        index = index.to(torch.int64)
        row.scatter_add_(0, index, torch.ones_like(index))  # torch.bincount would wait for the device
        row[BINS] = torch.maximum(row[BINS], torch.where(pattern < _INFINITY, pattern, 0).max())
    return row


_COUNTERS: dict[str, Callable[[Any], Any]] = {"tensorflow": _tensorflow, "jax": _jax, "torch": _torch}

assert INFINITE == 255  # an infinity's own exponent field: it needs no case of its own

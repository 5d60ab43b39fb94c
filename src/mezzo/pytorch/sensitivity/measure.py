"""One call of a unit, run again in FP32 and in the lower format: what rounding does to the loss, what time it saves.

Both runs get the same inputs, those in the lower format that would come so, so that rounding an input is counted
where the input is made and not a second time here. Modules that the unit calls are lowered in both: the difference is
the unit's own arithmetic.

    rounding = sum over the outputs of  gradient * (lowered output - FP32 output)

It holds all that the lower format does inside: rounded weights, the order of operations, cancellation, overflow. It
is first order in what follows the unit, and exact within it.

An input that is finite in FP32 and not in the lower format comes in FP32: its maker stays in FP32. And where lowering
the inner modules or rounding the inputs alone is enough to make the FP32 run not finite, both runs go without that:
else NaN would be held against NaN, and the unit's own arithmetic would not be judged at all (`_WAYS`).

A lowered inner module is not the same in both runs, though: what it only adds or multiplies runs in the format of its
inputs, and these are FP32 in the one and 16 bits in the other. So where much differs, both runs are made again with
inner modules that compute in FP32 and hand out what they would in the lower format, rounded (`_INNER_EXACT`). What is
gone then is the inner modules' own, and is not held against the unit as well.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import reduce
from statistics import median
from typing import Any

import torch
from torch import Tensor

from mezzo.core.patterns import is_pattern
from mezzo.core.policy import Policy
from mezzo.core.sensitivity import Rounding
from mezzo.pytorch.region.autocast import autocast
from mezzo.pytorch.region.modules import apply_module_overrides
from mezzo.pytorch.sensitivity.flow import floats_in
from mezzo.pytorch.sensitivity.kept import KeptCall, as_finite, changed, finite, largest
from mezzo.pytorch.sensitivity.kept_state import KeptState
from mezzo.pytorch.sensitivity.own_ops import OwnOps

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
PAIRS = 4
"""Timed pairs of a call in one step, ..."""
SECONDS = 0.1
"""... or fewer, once they have taken this long."""
ENOUGH_PAIRS = 6
"""Of all steps together; with fewer no difference could be called one (`UnitFacts.saved_seconds`)."""
CAST_TIMES = 7
"""Casts that are timed; the median counts."""
LEAST_EXPONENT = -24
"""The smallest loss scale that is tried, as a power of two."""
_BACKOFF = 4
SUSPECT = 0.01
"""Outputs or gradients further from FP32's than this share of their norm may be so by an inner module's fault."""
INNERS_SHARE = 0.5
"""That much of it must go with exact inner modules, to be theirs."""


class NotRepeatableError(RuntimeError):
    """A call that raises when it is run again with the same inputs."""


@dataclass(frozen=True)
class Measured:
    """What one call showed; see `UnitFacts`.

    `inputs`: what rounding each floating input does to the loss. `input_largest`: the largest finite magnitude of each,
    of the elements that the loss depends on. `largest`: in FP32, of what comes out in 16 bits. `own`: what the unit's
    own operations made in 16 bits.
    """

    rounding: Rounding
    largest: float
    inputs: list[Rounding]
    input_largest: list[float]
    seconds: list[list[float]]
    gradient_error: float
    exponent: int
    overflow: str
    own: OwnOps


@dataclass(frozen=True)
class _Way:
    """What both runs have in common.

    `inner_low`: inner modules are lowered. `rounded`: so are inputs that would come so. `inner_rounded`: so is what
    inner modules hand out.
    """

    inner_low: bool = True
    rounded: bool = True
    inner_rounded: bool = False


_WAYS = (_Way(), _Way(inner_low=False), _Way(inner_low=False, rounded=False))
_INNER_EXACT = _Way(inner_low=False, inner_rounded=True)


@dataclass
class _Run:
    outputs: list[Tensor]
    gradients: list[Tensor | None]
    seconds: float
    own: OwnOps


@dataclass
class _Pair:
    """A call in FP32 and lowered, with the loss scale's exponent and what overflowed; see `Measured`."""

    exact: _Run
    low: _Run
    exponent: int
    overflow: str

    @property
    def gradient_error(self) -> float:
        return _relative(self.exact.gradients, self.low.gradients)

    @property
    def error(self) -> float:
        """Of gradients or outputs, the larger."""
        return max(self.gradient_error, _relative(self.exact.outputs, self.low.outputs))


class Measurer:
    """Runs kept calls again.

    Args:
        format: the lower format, ``bf16`` or ``fp16``.
        device: of the model.
        steps: in which each call will be measured.
        clock: seconds.
    """

    def __init__(
        self,
        format: str,
        device: torch.device,
        steps: int = 1,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._format = format
        self._dtype = DTYPES[format]
        self._device = device
        self._clock = clock
        self._least = -(-ENOUGH_PAIRS // steps)
        self._fp32_first = False

    def measure(self, call: KeptCall, exponent: int = 0) -> Measured:
        """One call, with the gradients that reached its outputs.

        Args:
            call: of the step that is under way; its parameters have not moved yet.
            exponent: of the loss scale to begin with; it is lowered until fp16's gradients are finite.

        Raises:
            NotRepeatableError: the call can't be run again, even in FP32.
            Exception: whatever the module raises in the lower format.
        """
        state = KeptState(call.module, self._device)
        try:
            try:
                way, exact = self._exact(call, state)
            except Exception as error:
                raise NotRepeatableError(f"{type(error).__name__}: {error}") from error
            pair = self._pair(call, state, way, exact, exponent)
            if call.inner and way is _WAYS[0] and (pair.overflow or pair.error > SUSPECT):
                pair = self._without_inner(call, state, pair, exponent)
            exact, low, overflow = pair.exact, pair.low, pair.overflow
            seconds = [] if overflow else self._timed(call, state, way, pair.exponent)
        finally:
            state.put_back()
        wide = [tensor.detach().float() for tensor in call.inputs]
        parts = [_weighed(g, b, a) for g, a, b in zip(call.gradients, exact.outputs, low.outputs)]
        return Measured(
            reduce(Rounding.plus, parts, Rounding()),
            max(
                (largest(a) for a, b in zip(exact.outputs, low.outputs) if b.dtype is self._dtype),
                default=0.0,
            ),
            [_weighed(g, x.to(self._dtype), x) for g, x in zip(exact.gradients, wide)],
            [0.0 if g is None else largest(x[g != 0.0]) for g, x in zip(exact.gradients, wide)],
            seconds,
            pair.gradient_error,
            pair.exponent,
            overflow,
            low.own,
        )

    def rounding(self, call: KeptCall) -> Rounding:
        """What rounding the call's outputs would do to the loss."""
        parts = [_weighed(g, y.to(self._dtype), y) for g, y in zip(call.gradients, call.outputs)]
        return reduce(Rounding.plus, parts, Rounding())

    def cast_seconds(self, elements: int) -> float:
        """The time of casting so many FP32 numbers down and as many gradients up, the median of a few."""
        wide = torch.ones(elements, device=self._device)
        times = []
        for _ in range(CAST_TIMES + 1):
            start = self._now()
            wide.to(self._dtype).to(torch.float32)
            times.append(self._now() - start)
        return median(times[1:])

    def region_seconds(self) -> float:
        """The time of entering and leaving a region: what a module with a format of its own takes beside it."""
        times = []
        for _ in range(50):
            start = self._clock()
            with autocast(self._format, self._device.type):
                pass
            times.append(self._clock() - start)
        return median(times)

    def _exact(self, call: KeptCall, state: KeptState) -> tuple[_Way, _Run]:
        """The FP32 run, in the first way that is finite where the step's own outputs were; else in the plainest."""
        for way in _WAYS:
            exact = self._run(call, state, way, low=False, weigh=True)
            if as_finite(exact.outputs, call.outputs) and finite(exact.gradients):
                break
        return way, exact

    def _pair(self, call: KeptCall, state: KeptState, way: _Way, exact: _Run, exponent: int) -> _Pair:
        """The lowered run beside the FP32 one; its loss scale is lowered until fp16's gradients are finite."""
        while True:
            low = self._run(call, state, way, low=True, weigh=True, exponent=exponent)
            fits = as_finite(low.outputs, exact.outputs)
            sound = as_finite(low.gradients, exact.gradients)
            if sound or not fits or self._format != "fp16" or exponent <= LEAST_EXPONENT:
                break
            exponent -= _BACKOFF
        overflow = "output" if not fits else "" if sound else "gradient"
        if overflow and any(c and not self._fits(t) for t, c in zip(call.inputs, call.low)):
            overflow = "input"
        return _Pair(exact, low, exponent, overflow)

    def _without_inner(self, call: KeptCall, state: KeptState, pair: _Pair, exponent: int) -> _Pair:
        """Both runs with exact inner modules, if most of the difference goes by that; else the pair as it is."""
        try:
            exact = self._run(call, state, _INNER_EXACT, low=False, weigh=True)
            if not (as_finite(exact.outputs, call.outputs) and finite(exact.gradients)):
                return pair
            other = self._pair(call, state, _INNER_EXACT, exact, exponent)
        except Exception:  # a module that checks what it gets: what was seen stands
            return pair
        if other.overflow:
            return pair
        theirs = pair.overflow or other.error < INNERS_SHARE * pair.error
        return other if theirs else pair

    def _fits(self, tensor: Tensor) -> bool:
        """Whether what is finite in it is so in the lower format."""
        return as_finite([tensor.detach().to(self._dtype)], [tensor])

    def _timed(self, call: KeptCall, state: KeptState, way: _Way, exponent: int) -> list[list[float]]:
        """Pairs of seconds, FP32 and lowered, by turns the one first and the other."""
        pairs: list[list[float]] = []
        start = self._clock()
        while len(pairs) < self._least or (len(pairs) < PAIRS and self._clock() - start < SECONDS):
            pair = [0.0, 0.0]
            self._fp32_first = not self._fp32_first
            for low in (False, True) if self._fp32_first else (True, False):
                pair[low] = self._run(call, state, way, low=low, weigh=False, exponent=exponent).seconds
            pairs.append(pair)
        return pairs

    def _run(
        self, call: KeptCall, state: KeptState, way: _Way, *, low: bool, weigh: bool, exponent: int = 0
    ) -> _Run:
        """Forward and backward, once.

        Args:
            call: what is run.
            state: put back before.
            way: of the inner modules and the inputs.
            low: in the lower format, else in FP32.
            weigh: with the gradient of every input, those from outside included; else what a step computes.
            exponent: of the loss scale, where `low`.
        """
        state.put_back()
        grads_on = call.with_gradients
        scale = 2.0**exponent if low else 1.0

        def leaf(tensor: Tensor, place: int) -> Tensor:
            comes_low = way.rounded and call.low[place] and self._fits(tensor)
            rounded = tensor.detach().to(self._dtype) if comes_low else tensor.detach()
            mine = rounded if low else rounded.to(tensor.dtype)
            return mine.requires_grad_(grads_on and (weigh or tensor.requires_grad))

        args, kwargs, inputs = call.prepared(leaf)
        learned = (p for p in call.module.parameters() if p.requires_grad and p.is_floating_point())
        params = list(learned) if grads_on else []
        wanted = [t for t in [*inputs, *params] if t.requires_grad]
        seeds = [None if g is None else g * scale for g in call.gradients]
        with ExitStack() as stack:
            policy = Policy(self._format if low else "fp32", modules=self._inner(call, low, way))
            if way.inner_rounded:
                self._round_inner(call, stack, low)
            own = OwnOps(self._format, self._dtype, call.inner.values())
            if low and weigh:
                stack.enter_context(own.watching())
            if policy.modules:
                stack.enter_context(apply_module_overrides(call.module, policy, self._device.type))
            stack.enter_context(torch.set_grad_enabled(grads_on))
            start = self._now()
            with autocast(policy, self._device.type):
                outputs = list(floats_in(call.module.forward(*args, **kwargs)))
            pairs = [(y, g) for y, g in zip(outputs, seeds) if g is not None and y.requires_grad]
            found: tuple[Tensor | None, ...] = ()
            if pairs and wanted:
                found = torch.autograd.grad(
                    [y for y, _ in pairs], wanted, [g.to(y.dtype) for y, g in pairs], allow_unused=True
                )
            seconds = self._now() - start
        by_id = dict(zip(map(id, wanted), found)) if found else {}
        # One by one for inputs and parameters, so that both runs' can be set against each other.
        every = [by_id.get(id(t)) for t in [*inputs, *params]]
        dense = [g.to_dense() if g is not None and g.layout is not torch.strided else g for g in every]
        unscaled = [None if g is None else g.float() / scale for g in dense]
        return _Run([y.detach() for y in outputs], unscaled, seconds, own)

    def _round_inner(self, call: KeptCall, stack: ExitStack, low: bool) -> None:
        """While `stack` is open: what inner modules hand out is rounded where it would be, and in FP32 unless `low`."""

        def rounded(tensor: Tensor, would_be: bool) -> Tensor:
            if not would_be or not self._fits(tensor):
                return tensor
            down = tensor.to(self._dtype)
            # In FP32 the gradient passes as it is: without a loss scale it could vanish in 16 bits.
            return down if low else tensor + (down.to(tensor.dtype) - tensor).detach()

        for path, module in call.inner.items():
            flags = dict(enumerate(call.inner_low.get(path, [])))

            def hand_out(_: torch.nn.Module, __: Any, output: Any, flags: dict[int, bool] = flags) -> Any:
                return changed(output, lambda tensor, place: rounded(tensor, flags.get(place, False)))

            stack.callback(module.register_forward_hook(hand_out).remove)

    def _inner(self, call: KeptCall, low: bool, way: _Way) -> tuple[tuple[str, str], ...]:
        if low == way.inner_low:
            return ()  # they follow
        format = self._format if way.inner_low else "fp32"
        below = len(call.path) + 1 if call.path else 0
        return tuple((path[below:], format) for path in call.inner if is_pattern(path[below:]))

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return self._clock()


def _weighed(gradient: Tensor | None, rounded: Tensor, exact: Tensor) -> Rounding:
    """The sums of gradient * (rounded - exact): infinite where one is not finite that is in FP32.

    Left out are elements that are not finite in FP32 (a mask of -inf) and those without a gradient: whatever becomes of
    them, to first order the loss does not see it.
    """
    if gradient is None:
        return Rounding()
    counts = torch.isfinite(exact) & (gradient != 0.0)
    terms = (gradient.float() * (rounded.float() - exact.float())).double()[counts]
    if not bool(torch.isfinite(terms).all()):
        return Rounding(math.inf, math.inf, math.inf)
    return Rounding(float(terms.sum()), float(terms.square().sum()), float(terms.abs().sum()))


def _relative(exact: Sequence[Tensor | None], low: Sequence[Tensor | None]) -> float:
    """The norm of all tensors' differences over their norm; 0 where there is nothing to lose.

    Infinite where the lower format's are not finite and FP32's are, or where none of FP32's is.
    """
    difference = total = 0.0
    known = nothing = True
    for a, b in zip(exact, low):
        if a is not None and b is not None:
            sound = torch.isfinite(a)
            known &= bool(sound.all())
            nothing &= not bool(sound.any())
            difference += float((b.double() - a.double())[sound].square().sum())
            total += float(a.double()[sound].square().sum())
    if not math.isfinite(difference) or (nothing and not known):
        return math.inf
    return (difference / total) ** 0.5 if total else 0.0

"""Delayed scaling: what an fp8 layer's tensors looked like in their last uses, and which of them outgrew their scale.

A *dynamic* scale needs a tensor's largest magnitude before the first value can be cast. A *delayed* one comes from the
last `n` uses of the same tensor (a layer's input, its weight, its output's gradient), so that cast and measurement can
run at once; where a use outgrows the past, values are cut to the format's largest, and `Fp8SaturationWarning` says so.

    amaxes, last = [0] * n, None
    def scale(x):
        if any(amaxes):
            last = scale_of(max(amaxes), dtype, margin)
        elif only zeros were ever recorded:           # the empty history is dynamic
            last = scale_of(amax(x), dtype, margin)
        amaxes.pop(0), amaxes.append(amax(x))         # finite by definition: NaN and infinities never enter
        return last

Everything here is arithmetic on small tensors of the layer's own device: no step waits for a GPU. A history belongs to
its weight, weakly: it dies with the model, is no part of a state_dict, and copies or pickles of the model start empty.
"""

from __future__ import annotations

import math
import warnings
import weakref
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from mezzo.core.errors import UsageError, unknown_name
from mezzo.core.fp8 import Fp8Scaling
from mezzo.pytorch.kernels.fp8 import amax, cast, cast_with_amax, count_saturated, scale_of

ROLES = ("input", "weight", "gradient")
LOOK_EVERY = 100
"""Uses between two looks at a GPU's counters, each of which waits for the device. A CPU's are looked at always."""


class Fp8SaturationWarning(UserWarning):
    """Values of a tensor were beyond what its delayed scale allowed, and were cut. Said once for each tensor."""


class _Track:
    """One tensor's past: its amaxes and the scales that were used with them, the oldest first; and its worst use."""

    __slots__ = ("amaxes", "counted", "has_past", "scales", "unrecorded", "uses", "values", "warned", "worst")

    def __init__(self, length: int, device: torch.device) -> None:
        self.amaxes = torch.zeros(length, device=device)
        self.scales = torch.zeros(length, device=device)
        # Of the use with the largest amax * scale: that product, the amax, the scale.
        self.worst = torch.zeros(3, device=device)
        self.uses = 0
        self.counted: Tensor | None = None
        self.values = 0
        self.warned = False
        # Whether an amax above 0 is known to have been recorded: then a use reads its tensor once.
        self.has_past = False
        # Uses without gradients since the last recorded one: evaluation, or what reentrant checkpoints will record.
        self.unrecorded = 0

    def record(self, seen: Tensor, scale: Tensor) -> None:
        """Add a use; the oldest leaves."""
        self.amaxes = torch.cat((self.amaxes[1:], seen[None]))
        self.scales = torch.cat((self.scales[1:], scale[None]))

    def recall(self, seen: Tensor, otherwise: Tensor) -> Tensor:
        """The scale that the last use with this amax had."""
        is_same = (self.amaxes == seen) & (self.scales > 0)
        newest = (is_same * torch.arange(1, len(is_same) + 1, device=is_same.device)).argmax()
        return torch.where(is_same.any(), self.scales[newest], otherwise)

    def fit(self, length: int, device: torch.device) -> None:
        """Follow a model to another device, or a policy to another length; the newest amaxes stay."""
        if len(self.amaxes) != length:
            newest = min(length, len(self.amaxes))
            fresh = _Track(length, self.amaxes.device)
            fresh.amaxes[length - newest :] = self.amaxes[len(self.amaxes) - newest :]
            fresh.scales[length - newest :] = self.scales[len(self.scales) - newest :]
            self.amaxes, self.scales = fresh.amaxes, fresh.scales
        if self.amaxes.device != device:
            self.amaxes, self.scales, self.worst = (
                t.to(device) for t in (self.amaxes, self.scales, self.worst)
            )
            self.counted = None if self.counted is None else self.counted.to(device)


class WeightHistory:
    """The histories of one layer's three tensors; `of` finds a weight's.

    Attributes:
        look_every: uses between two looks at the counters; None for 1 on a CPU and `LOOK_EVERY` elsewhere.
    """

    def __init__(self, weight: Tensor) -> None:
        self._weight = weakref.ref(weight)
        self.tracks: dict[str, _Track] = {}
        self.look_every: int | None = None

    def quantize(
        self, role: str, x: Tensor, dtype: torch.dtype, scaling: Fp8Scaling, *, record: bool = True
    ) -> tuple[Tensor, Tensor]:
        """Codes of this use of a tensor, and the scale, of shape []; the use is recorded, without a host sync.

        A forward that runs inside a backward is a recomputation (activation checkpointing). It is not recorded again,
        and gets the scale that the recorded use with its amax had: recomputed numbers are the first ones, unless more
        uses than the history is long lie between. A reentrant checkpoint's first forward runs without gradients and is
        not recorded, as no evaluation is; its recomputation is.

        Args:
            role: one of `ROLES`.
            x: FP32, bf16 or fp16, any shape.
            dtype: the 8-bit format.
            scaling: tensorwise, with a history.
            record: whether gradients are enabled.
        """
        track = self.tracks.get(role)
        if track is None:
            track = self.tracks[role] = _Track(scaling.history, x.device)
        track.fit(scaling.history, x.device)
        is_recomputed = role != "gradient" and torch._C._current_graph_task_id() != -1
        largest = track.amaxes.amax()
        scale = torch.where(largest > 0, scale_of(largest, dtype, scaling.margin), track.scales[-1])
        if track.has_past and not is_recomputed:
            codes, seen = cast_with_amax(x, scale, dtype)
        else:
            seen = amax(x)
            if not track.has_past:
                scale = torch.where(largest > 0, scale, scale_of(seen, dtype, scaling.margin))
            if is_recomputed and not track.unrecorded:
                scale = track.recall(seen, scale)
                record = False
            codes = cast(x, scale, dtype)
        if record:
            track.record(seen, scale)
            track.unrecorded = max(0, track.unrecorded - 1) if is_recomputed else 0
            self._watch(role, track, x, seen, scale, dtype, scaling)
        elif not is_recomputed:
            track.unrecorded += 1
        return codes, scale

    def _watch(
        self,
        role: str,
        track: _Track,
        x: Tensor,
        seen: Tensor,
        scale: Tensor,
        dtype: torch.dtype,
        scaling: Fp8Scaling,
    ) -> None:
        """Notice that values are cut. Only once an amax has shown that some are is a pass made that counts them."""
        every = self.look_every or (1 if x.device.type == "cpu" else LOOK_EVERY)
        track.uses += 1
        may_look = not (track.uses % every or (x.is_cuda and torch.cuda.is_current_stream_capturing()))
        if may_look and not track.has_past:
            track.has_past = bool(track.amaxes.any())
        if track.warned:
            return
        this = torch.stack((seen * scale, seen, scale))
        track.worst = torch.where(this[0] > track.worst[0], this, track.worst)
        if track.counted is not None:
            track.counted = track.counted + count_saturated(x, scale, dtype)
            track.values += x.numel()
        if not may_look:
            return
        if track.counted is None:
            if float(track.worst[0]) <= torch.finfo(dtype).max:
                return
            track.counted, track.values = count_saturated(x, scale, dtype), x.numel()
            if every > 1:
                return  # what follows until the next look is counted as well
        cut, values = int(track.counted), track.values
        worst, largest, used = track.worst.tolist()
        track.counted, track.worst = None, torch.zeros_like(track.worst)
        if cut:
            track.warned = True
            limit = torch.finfo(dtype).max
            self._warn(role, cut, values, largest, limit / used, worst / limit, scaling)

    def _warn(
        self,
        role: str,
        cut: int,
        values: int,
        largest: float,
        allowed: float,
        over: float,
        scaling: Fp8Scaling,
    ) -> None:
        tensor = {"gradient": "the gradient of the output", "input": "the input", "weight": "the weight"}[
            role
        ]
        wanted = Fp8Scaling(
            history=scaling.history,
            margin=min(15, scaling.margin + max(1, (math.ceil(over) - 1).bit_length())),
        )
        warnings.warn(
            f"fp8: {cut:,} of {values:,} values of {tensor} of {self.label()} were beyond the largest that their scale "
            f"allowed and were cut to it: the largest was {largest:.4g}, allowed was {allowed:.4g}. A delayed scale "
            f"comes from the last {scaling.history} uses; this use outgrew them. Use scaling=tensorwise, which "
            f"measures each tensor first, or leave headroom: scaling={wanted}.",
            Fp8SaturationWarning,
            stacklevel=2,
        )

    def label(self) -> str:
        """What to call the layer: its name, where `name_weights` was told, else its weight's shape."""
        weight = self._weight()
        if weight is None:
            return "a linear layer that is gone"
        name = _NAMES.get(weight)
        return (
            f"the linear layer with a weight of {list(weight.shape)}" if name is None else f"layer {name!r}"
        )


_HISTORIES: WeakTensorKeyDictionary = WeakTensorKeyDictionary()  # weight -> WeightHistory
_NAMES: WeakTensorKeyDictionary = WeakTensorKeyDictionary()  # weight -> name of its layer


def of(weight: Tensor) -> WeightHistory:
    """The histories that belong to a weight, which hold nothing of it; made at the first asking."""
    found: WeightHistory | None = _HISTORIES.get(weight)
    if found is None:
        found = WeightHistory(weight)
        _HISTORIES[weight] = found
    return found


def name_weights(model: nn.Module) -> None:
    """Remember, weakly, which layer each weight belongs to, so that warnings can name it.

    Naive code: ``names[parameter] = name.removesuffix(".weight")`` for the model's named parameters; a shared weight
    has its first name.
    """
    for name, parameter in model.named_parameters():
        _NAMES[parameter] = name.removesuffix(".weight") if name != "weight" else type(model).__name__


@dataclass(frozen=True)
class HistoriesBefore:
    """A model's histories as they are before a step, to be put back if it is skipped.

    An overflowed step's finite amaxes are recorded like any other's, and the scales of the next steps would come from
    them. Nothing is copied: a use makes new tensors.

    Args:
        model: whose weights' histories they are, weakly.
        before: each track that is there, with what a use replaces.
    """

    model: weakref.ref[nn.Module]
    before: dict[_Track, tuple[Tensor, Tensor, bool, int]]

    @classmethod
    def of(cls, model: nn.Module) -> HistoriesBefore:
        """Those of a model. Where this process has none yet its parameters are not looked through."""
        tracks = _tracks(model) if len(_HISTORIES) else []
        before = {track: (track.amaxes, track.scales, track.has_past, track.unrecorded) for track in tracks}
        return cls(weakref.ref(model), before)

    def put_back(self, found_inf: Tensor | bool) -> None:
        """Take back what was recorded since, where `found_inf` is not 0. Does not wait for the device."""
        model = self.model()
        if found_inf is False or model is None or not len(_HISTORIES):
            return
        for track in _tracks(model):
            empty = torch.zeros_like(track.amaxes)
            amaxes, scales, had_past, unrecorded = self.before.get(track, (empty, empty, False, 0))
            track.has_past = track.has_past and had_past
            if isinstance(found_inf, Tensor):
                if amaxes.shape != track.amaxes.shape:
                    continue
                skipped = found_inf.to(empty.device, non_blocking=True) != 0
                amaxes = torch.where(skipped, amaxes.to(empty.device), track.amaxes)
                scales = torch.where(skipped, scales.to(empty.device), track.scales)
            else:
                track.unrecorded = unrecorded
            track.amaxes, track.scales = amaxes, scales


def _tracks(model: nn.Module) -> list[_Track]:
    histories = (_HISTORIES.get(parameter) for parameter in model.parameters())
    return [track for found in histories if found is not None for track in found.tracks.values()]


def history_state(named_parameters: Iterable[tuple[str, Tensor]]) -> dict[str, dict[str, Tensor]]:
    """The delayed scales' histories, for a checkpoint: ``{parameter: {role: amaxes}}``.

    Args:
        named_parameters: as `nn.Module.named_parameters` gives them.

    Returns:
        FP32 tensors on the CPU of as many elements as the history is long, oldest first; parameters that have no
        history are left out.
    """
    state: dict[str, dict[str, Tensor]] = {}
    for name, parameter in named_parameters:
        found: WeightHistory | None = _HISTORIES.get(parameter)
        if found is not None and found.tracks:
            state[name] = {role: track.amaxes.cpu().clone() for role, track in found.tracks.items()}
    return state


def load_history_state(
    named_parameters: Iterable[tuple[str, Tensor]], state: Mapping[str, Mapping[str, Tensor]]
) -> None:
    """Put back what `history_state` gave. Parameters that it does not name start with an empty history.

    Raises:
        UsageError: it names a parameter that is not there, or holds something other than histories. Nothing is
            changed then.
    """
    parameters = dict(named_parameters)
    for name, roles in state.items():
        if name not in parameters:
            raise unknown_name("parameter", name, parameters, where="load_history_state(): ")
        for role, amaxes in roles.items():
            if role not in ROLES:
                raise unknown_name("role of a tensor", role, ROLES, where=f"load_history_state(): {name!r}: ")
            if not (
                isinstance(amaxes, Tensor)
                and amaxes.dim() == 1
                and bool((amaxes.isfinite() & (amaxes >= 0)).all())
            ):
                raise UsageError(
                    f"load_history_state(): {name!r}: the history of its {role} is no 1-D tensor of finite amaxes. "
                    "Give what history_state() returned."
                )
    for name, parameter in parameters.items():
        _HISTORIES.pop(parameter, None)
        for role, amaxes in state.get(name, {}).items():
            track = _Track(len(amaxes), parameter.device)
            track.amaxes.copy_(amaxes)
            of(parameter).tracks[role] = track

"""mezzo.calibrate: measure a few FP32 steps of a model, restore it, and recommend a precision."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mezzo.core.calibration import RANKED, Recommendation, check_format, ranked_for, ranked_format, recommend
from mezzo.core.commands import DEFAULT_MARGIN
from mezzo.core.errors import UsageError, checks_keywords
from mezzo.core.formats import Format
from mezzo.core.records import LossRecord, Record
from mezzo.pytorch.dtypes import name_of
from mezzo.pytorch.hardware import native_formats
from mezzo.pytorch.monitor.observer import StepObserver
from mezzo.pytorch.monitor.ranges import RangeWatch
from mezzo.pytorch.sensitivity import STEPS, Sensitivities
from mezzo.pytorch.snapshot import Snapshot
from mezzo.pytorch.training.observers import Observers

_LOSS_FN = "lambda model, batch: model(batch).square().mean()"


@checks_keywords
def calibrate(
    model: nn.Module,
    loss_fn: Callable[[nn.Module, Any], Tensor],
    batches: Iterable[Any],
    *,
    steps: int = 8,
    optimizer: Optimizer | None = None,
    format: str | None = None,
    rank_formats: Sequence[str | Format] = RANKED,
    margin: float = DEFAULT_MARGIN,
) -> Recommendation:
    """Recommend a format, a loss scale and the modules to keep in FP32, from a few FP32 steps; and rank the modules by
    how much rounding each would change the loss.

    Equals, for one step::

        loss_fn(model, batch).backward()
        scale = 2.0 ** floor(log2(65504 / largest_gradient_of_activations_and_weights) - 1)

    Model, optimizer and random state are restored to the bit afterwards, also after an error.

    Args:
        model: in FP32; put into training mode for the steps.
        loss_fn: the loss of one batch: ``lambda model, batch: F.cross_entropy(model(batch[0]), batch[1])``.
        batches: an iterable of second arguments for `loss_fn`, such as a DataLoader. The first `steps` are used.
        steps: the number of batches to use.
        optimizer: takes a step after each batch; None: the weights don't change.
        format: ``bf16``, ``fp16`` or ``fp32`` to recommend it, whatever the hardware. ``fp8``, ``mxfp8``, ``fp8-block``
            or ``nvfp4`` ranks the linear layers in it, and recommends which of them to keep in bf16.
        rank_formats: formats of the ranking, names or `mezzo.formats.Format` values; none: no ranking. Ignored if
            `format` has 8 or 4 bits.
        margin: the change of the loss that all modules together may make, as a share of the loss.

    Returns:
        A `Recommendation`, which has not been tried. Print it; pass its `policy` to `MixedPrecision`; `to_toml()` is
        the text of a policy file. Its `sensitivity` is the ranking from up to 4 of the steps, or None if nothing could
        be measured. Each of its `modules`, the most sensitive first, has `changes`: format -> expected change of the
        loss if the module alone runs in that format.

    Raises:
        UsageError: parameters that aren't FP32, a call within autocast, a `loss_fn` that returns no scalar, a loss that
            is NaN or infinite, no batch, no gradient.
        UnknownNameError: an unknown format.

    >>> import torch, mezzo
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    >>> found = mezzo.calibrate(model, lambda model, x: model(x).square().mean(), [torch.ones(2, 4)] * 3, format="fp16")
    >>> found.format, found.steps, found.kept
    ('fp16', 3, [])
    >>> sorted(one.module for one in found.sensitivity.modules)
    ['0', '1', '2']
    """
    parameters = [param for param in model.parameters() if param.requires_grad]
    check_format(format)
    device = _checked(parameters)
    if not hasattr(batches, "__iter__"):
        raise UsageError(f"batches is {batches!r}. Pass a list, a DataLoader or a generator of batches")
    snapshot = Snapshot([model], [] if optimizer is None else [optimizer])
    updated = torch.optim.SGD(parameters, lr=0.0) if optimizer is None else optimizer
    formats = [ranked_format(one) for one in ranked_for(format) or rank_formats]
    observers: list[StepObserver] = [RangeWatch(model, updated, every=1, ratios=False, all_modules=True)]
    if formats:
        observers.append(Sensitivities(formats, every=steps // STEPS))
    observing = Observers(model, observers)
    records: list[Record] = []
    try:
        model.train()
        with torch.enable_grad():
            for index, batch in enumerate(islice(batches, steps)):
                model.zero_grad()
                try:
                    loss = loss_fn(model, batch)
                except (TypeError, AttributeError) as error:
                    by_its_line = error.__traceback__ is None or error.__traceback__.tb_next is not None
                    of = getattr(loss_fn, "__module__", None) or type(loss_fn).__module__
                    if by_its_line and not of.startswith("torch"):
                        raise
                    raise UsageError(f"loss_fn(model, batch): {error}. Pass {_LOSS_FN}") from error
                if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
                    told = f" of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else ""
                    raise UsageError(
                        f"loss_fn returned a {type(loss).__name__}{told}: it must return a scalar tensor that depends "
                        f"on the parameters, such as {_LOSS_FN}"
                    )
                observing.backward_begins(loss, 1.0)
                loss.backward()
                observing.update_begins(updated, 1.0)
                if optimizer is not None:
                    optimizer.step()
                observing.update_ended(updated, index=index, skipped=False, loss_scale=1.0)
                records += [*observing.drain(), LossRecord(index, float(loss.detach()), 0.0)]
    finally:
        observing.undo()
        snapshot.restore()
    if not records:
        raise UsageError(
            f"there were no batches (steps={steps}). Pass a list or a DataLoader that is not empty; a generator that "
            "was read to its end has none left"
        )
    native = native_formats(device.type)
    return recommend(records, native=native, format=format, ranked=formats, margin=margin)


def _checked(parameters: list[nn.Parameter]) -> torch.device:
    if not parameters:
        raise UsageError("the model has no parameter with requires_grad=True, so there is nothing to train")
    low = {name_of(p.dtype) for p in parameters if p.is_floating_point() and p.element_size() < 4}
    if low:
        raise UsageError(
            f"the model has {', '.join(sorted(low))} parameters: calibrate needs an FP32 model. Call model.float() "
            "first, or calibrate before the weights are lowered"
        )
    device = parameters[0].device
    if torch.is_autocast_enabled(device.type):
        raise UsageError("calibrate measures in FP32: call it outside of autocast")
    return device

"""Mezzo's mixed precision under Transformers' Trainer: `use(trainer, "bf16", masters="split")` before training.

The Trainer trains through Accelerate: each accelerator that it makes is attached (`mezzo.accelerate`), also those of a
hyper-parameter search. The Trainer's class becomes a subclass that adds the loss scale and skipped steps to its log.
"""

from __future__ import annotations

import os
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mezzo.accelerate import Precision, attached
from mezzo.core.errors import CallOrderError, UsageError, checks_keywords
from mezzo.core.loss_scale import LossScale
from mezzo.core.policy import Policy
from mezzo.core.version import library
from mezzo.pytorch.optim.adopt import extend
from mezzo.pytorch.training import cast_parameters

# Not under its own name, which `mezzo.transformers` would then return.
_library = library("transformers", "5.0")

__all__ = ["use"]

_WHERE = "mezzo.transformers.use"


@checks_keywords
def use(
    trainer: Any,
    policy: str | os.PathLike[str] | Policy | torch.dtype = "auto",
    *,
    params: str | None = None,
    masters: str | None = None,
    state: str | None = None,
    loss_scale: LossScale | float | str | None = None,
    trace: bool | None = None,
) -> Any:
    """Let a Transformers `Trainer` train under a policy, and return it. Call it before `trainer.train()`.

    Example::

        trainer = Trainer(model, TrainingArguments("out"), train_dataset=data)  # no bf16=True, no fp16=True
        mezzo.transformers.use(trainer, "bf16", masters="split")
        trainer.train()

    What it does is described in `mezzo.accelerate.attach`; the `Precision` is `trainer.accelerator.mezzo`. A row of
    `trainer.state.log_history` gets, and TensorBoard shows:

    - ``loss_scale``: the next step's, and ``skipped_steps``: how many since the last row, if there is a loss scale;
    - ``nonfinite_losses``: how many losses since the last row were NaN or infinite, if any. The Trainer's
      ``logging_nan_inf_filter`` puts a share of the earlier losses in their place in ``loss``;
    - ``overflow``: the report on the last skipped step since the last row, if there was one.

    Checkpoints have the weights as they are stored, and load in Transformers without Mezzo. `optimizer.pt` has the
    masters, so that `resume_from_checkpoint` continues as if training had not been interrupted.

    Args:
        trainer: without mixed precision of its own.
        policy, params, masters, state, loss_scale, trace: see `mezzo.accelerate.attach`.

    Raises:
        UsageError: not a Trainer; one with mixed precision of its own, or that is in use; fp16 weights, whose gradients
            the Trainer clips; an invalid policy.
        CallOrderError: training has begun.
    """
    given = {name: value for name, value in locals().items() if name != "trainer"}
    if not isinstance(trainer, _library.Trainer):
        raise UsageError(f"{_WHERE}: received {type(trainer).__name__}. Pass a transformers.Trainer.")
    arguments, kind = trainer.args, type(trainer.args).__name__
    for name in ("bf16", "fp16", "bf16_full_eval", "fp16_full_eval"):
        if getattr(arguments, name, False):
            raise UsageError(
                f"{_WHERE}: two precision settings: {kind} has {name}=True too. Set {name}=False"
                f"{' (it is the default of ' + kind + ')' if kind != 'TrainingArguments' else ''}."
            )
    if arguments.n_gpu > 1:
        raise UsageError(
            f"{_WHERE}: this process uses {arguments.n_gpu} GPUs by DataParallel. Start one process per GPU: torchrun "
            f"--nproc-per-node {arguments.n_gpu} SCRIPT."
        )
    if trainer.accelerator._optimizers:
        raise CallOrderError(f"{_WHERE}: training has begun. Call it before trainer.train().")
    make: Any = partial(Precision, written=f"{_WHERE}(trainer, {{!r}})", **given)
    precision: Precision = make(trainer.accelerator)
    weights = [param for param in trainer.model.parameters() if param.requires_grad]
    if precision.policy.params == "fp16" or any(param.dtype is torch.float16 for param in weights):
        raise UsageError(
            f"{_WHERE}: trained weights in fp16, under '{precision.policy}': the Trainer clips gradients, and those of "
            "fp16 weights cannot be unscaled without losing small values. Load the model with dtype=torch.float32, "
            "and use 'fp16' without params and masters; or use 'bf16' with masters='split'."
        )
    cast_parameters.check_format(precision.policy, weights, _WHERE)
    attached(trainer.accelerator, precision, late=True)
    trainer._mezzo_make = make
    extend(trainer, _InUse)
    return trainer


class _InUse(_library.Trainer):  # type: ignore[misc, name-defined]
    """The first base class of a Trainer in use."""

    _mezzo_make: Any
    _mezzo_logged = 0  # skipped steps that are in the log
    _mezzo_nonfinite: Tensor | int = 0  # losses since the last row

    def create_accelerator_and_postprocess(self) -> None:
        """As the Trainer's, which makes one accelerator per trial of a hyper-parameter search."""
        super().create_accelerator_and_postprocess()
        attached(self.accelerator, self._mezzo_make(self.accelerator), late=True)
        self._mezzo_logged = 0

    def _load_scaler(self, checkpoint: Any) -> None:
        """As the Trainer's, which would load the loss scale of an fp16 checkpoint in bf16 too, and fail."""
        if self.accelerator.scaler is not None:
            super()._load_scaler(checkpoint)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """As the Trainer's; counts losses that are not finite."""
        with self.accelerator.mezzo.observing.live():
            loss = super().training_step(*args, **kwargs)
        self._mezzo_nonfinite = self._mezzo_nonfinite + (~loss.isfinite()).sum()
        return loss

    def log(self, logs: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        """As the Trainer's, with the loss scale and skipped steps in rows of training."""
        super().log(logs | self._mezzo_row() if "loss" in logs else logs, *args, **kwargs)

    def _mezzo_row(self) -> dict[str, Any]:
        precision: Precision = self.accelerator.mezzo
        row: dict[str, Any] = {}
        if precision.scaler is not None:
            skipped = precision.skipped_steps - self._mezzo_logged
            self._mezzo_logged = precision.skipped_steps
            row = {"loss_scale": precision.loss_scale, "skipped_steps": skipped}
            if skipped and precision.findings:
                row["overflow"] = precision.findings[-1].sentence
        if nonfinite := int(self._mezzo_nonfinite):
            row["nonfinite_losses"] = nonfinite
        self._mezzo_nonfinite = 0
        return row

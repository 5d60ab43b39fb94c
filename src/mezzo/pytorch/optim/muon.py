"""Muon for the matrices of hidden layers, with AdamW for the other parameters in groups of the same optimizer.

Jordan et al., "Muon: An optimizer for hidden layers in neural networks", 2024. In a step the kernels average the
gradients, PyTorch orthogonalizes the average, and the kernels update the weights. Parameters come one after another, so
that one FP32 matrix exists at a time besides the iteration's own. Rows of other rules are stepped together. Of shards,
each rank gathers the average in bf16, as the iteration reads it, and orthogonalizes the whole matrix.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim.optimizer import ParamsT

from mezzo.core.errors import ArgumentTypeError, UsageError, checks_keywords, did_you_mean, unknown_name
from mezzo.pytorch.autocast.modules import heads_of
from mezzo.pytorch.kernels.optimizer_step import Groups, Hyper, Row, Stepper, stepper
from mezzo.pytorch.module_paths import walk
from mezzo.pytorch.optim import checks
from mezzo.pytorch.optim.fused import FusedOptimizer
from mezzo.pytorch.optim.optimizers import BUFFER, adam_hyper
from mezzo.pytorch.weights import shards

ADJUSTMENTS = ("original", "match_rms_adamw")
"""How the learning rate follows a matrix's shape; see `MuonHyper.rate`."""

_MOST_STEPS = 99  # as torch.optim.Muon

# Defaults of a group with use_muon=False: those of AdamW.
_ADAMW = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 1e-2}


class Muon(FusedOptimizer):
    """Muon, as `torch.optim.Muon`, for 2-D weights: the averaged gradient is orthogonalized before it is applied.

    Naive code, for one weight of shape [rows, columns], in FP32 except for `orthogonalized`, which is in bf16::

        g = grad.float()
        buf = buf.lerp(g, 1 - momentum)                         # starts at zero
        update = orthogonalized(g.lerp(buf, momentum) if nesterov else buf)
        w = w * (1 - lr * weight_decay) - lr * max(1, rows / columns) ** 0.5 * update

    A group with ``use_muon=False`` is updated by AdamW, with AdamW's settings and defaults. `muon_groups` makes a
    model's groups.

    Args:
        params: 2-D parameters, except in groups with ``use_muon=False``.
        lr, weight_decay, momentum, nesterov, ns_coefficients, ns_steps, eps: as in `torch.optim.Muon`; momentum is in
            [0, 1), and the Newton-Schulz iteration runs `ns_steps` times (1 to 99).
        adjust_lr_fn: ``"original"`` or None: as above; ``"match_rms_adamw"``: ``0.2 * max(rows, columns) ** 0.5``
            instead of the root above, for the learning rate and weight decay of AdamW.
        state, masters: see `FusedOptimizer`; `state` is the format of the momentum, also of 16-bit weights.

    Raises:
        UsageError: a number out of range, a parameter that is not 2-D, or does not fit the masters.
        UnknownNameError: an unknown `state`, `masters` or `adjust_lr_fn`.
    """

    TORCH: ClassVar[type[torch.optim.Optimizer]] = torch.optim.Muon
    NUMBERS: ClassVar[tuple[str, ...]] = ("lr", "weight_decay", "momentum", "eps")

    @checks_keywords
    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] = (3.4445, -4.7750, 2.0315),
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: str | None = None,
        *,
        state: str = "fp32",
        masters: str = "fp32",
    ) -> None:
        defaults: dict[str, Any] = {"lr": lr, "weight_decay": weight_decay, "momentum": momentum}
        defaults |= {"nesterov": nesterov, "ns_coefficients": ns_coefficients, "eps": eps}
        defaults |= {"ns_steps": ns_steps, "adjust_lr_fn": adjust_lr_fn}
        super().__init__(params, defaults, state=state, masters=masters)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; those with ``use_muon=False`` have AdamW's defaults."""
        if isinstance(param_group, dict) and not param_group.get("use_muon", True):
            param_group = {**_ADAMW, **param_group}
        super().add_param_group(param_group)

    def _check(self, group: dict[str, Any]) -> None:
        super()._check(group)
        if not group.get("use_muon", True):
            return
        owner, steps, function = type(self).__name__, group["ns_steps"], group["adjust_lr_fn"]
        checks.number(owner, "momentum", group["momentum"], below=1.0)
        if type(steps) is not int or not 1 <= steps <= _MOST_STEPS:
            raise UsageError(f"{owner}: ns_steps={steps!r} is not an integer from 1 to {_MOST_STEPS}.")
        if not hasattr(group["ns_coefficients"], "__len__") or len(group["ns_coefficients"]) != 3:
            raise UsageError(f"{owner}: ns_coefficients={group['ns_coefficients']!r}: use three numbers.")
        if function not in (None, *ADJUSTMENTS):
            raise unknown_name("adjust_lr_fn", str(function), ADJUSTMENTS, where=f"{owner}: ")
        for index, param in enumerate(group["params"]):
            if param.ndim != 2:
                raise UsageError(
                    f"{owner}: parameter {index} of the group, of shape {list(param.shape)}, is not a matrix. Give it "
                    "to AdamW, in a group with use_muon=False; mezzo.optim.Muon(mezzo.optim.muon_groups(model)) does "
                    "that for all parameters of a model."
                )

    def _hyper(self, group: dict[str, Any]) -> Hyper:
        lr, decay, momentum, eps = (float(group[name]) for name in self.NUMBERS)
        if not group.get("use_muon", True):
            beta1, beta2 = map(float, group["betas"])
            return adam_hyper(lr, beta1, beta2, eps, decay, decoupled=True)
        ahead, from_g = _lerp(momentum)
        numbers = (*_lerp(1 - momentum), ahead, 0.0, from_g, float(group["nesterov"]), 0.0)
        a, b, c = map(float, group["ns_coefficients"])
        adjustment = group["adjust_lr_fn"] or ADJUSTMENTS[0]
        iteration = (a, b, c), group["ns_steps"], eps
        return MuonHyper("average", BUFFER, numbers, 0.0, False, lr, 1 - lr * decay, adjustment, iteration)

    def _new_stepper(self, device_type: str) -> Stepper:
        return MuonStepper(device_type)

    def torch_state_dict(self) -> dict[str, Any]:
        """The state for `torch.optim.Muon`: FP32 momentum, no masters. UsageError if AdamW updates a group."""
        if not all(group.get("use_muon", True) for group in self.param_groups):
            raise UsageError(
                "Muon.torch_state_dict: torch.optim.Muon has no groups with use_muon=False. Use state_dict(), or two "
                "optimizers: mezzo.optim.Muon and mezzo.optim.AdamW."
            )
        return super().torch_state_dict()


def _lerp(t: float) -> tuple[float, bool]:
    """The factor of ``end - start`` in an interpolation with this weight, and whether it is added to the start."""
    return (t, True) if t < 0.5 else (float(torch.tensor(t)) - 1, False)


@checks_keywords
def muon_groups(
    model: nn.Module,
    muon: Mapping[str, Any] | None = None,
    adamw: Mapping[str, Any] | None = None,
    *,
    exclude: str | Sequence[str] = (),
) -> list[dict[str, Any]]:
    """A model's trainable parameters as two groups: matrices of hidden layers for Muon, all others for AdamW.

    For AdamW are embeddings, the head (the last `nn.Linear`, and those with tied embeddings) and everything that is
    not 2-D: biases, norms, convolutions.

    Args:
        model: whose parameters are grouped; a parameter in several places is listed once.
        muon, adamw: settings of the two groups, such as ``{"lr": 3e-4, "betas": (0.9, 0.95)}``.
        exclude: a pattern of names of further parameters for AdamW, or several, such as ``"pos_embed"`` or
            ``"blocks.0.*"``: a table of positions that is a bare `nn.Parameter` looks like a hidden matrix.

    Returns:
        ``[{"params": [...], "use_muon": True, **muon}, {"params": [...], "use_muon": False, **adamw}]``, for
        `mezzo.optim.Muon`, or one each for two optimizers.

    Raises:
        UsageError: not a model, a pattern that matches no parameter, or no matrix for Muon.

    >>> import torch, mezzo.optim
    >>> from torch import nn
    >>> model = nn.Sequential(nn.Embedding(10, 4), nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 10))
    >>> groups = mezzo.optim.muon_groups(model, {"lr": 0.02}, {"lr": 3e-4})
    >>> [[list(param.shape) for param in group["params"]] for group in groups]
    [[[8, 4]], [[10, 4], [8], [8], [8], [10, 8], [10]]]
    >>> optimizer = mezzo.optim.Muon(groups, masters="split", state="bf16")
    """
    if not isinstance(model, nn.Module):
        raise ArgumentTypeError(
            f"muon_groups: model is of type {type(model).__name__}. Pass the model itself, not its parameters: "
            "muon_groups(model)"
        )
    tables = [module for module in model.modules() if isinstance(module, (nn.Embedding, nn.EmbeddingBag))]
    heads = heads_of(model)
    apart = {id(module.weight) for path, module in walk(model, inside=True) if path in heads}
    apart |= {id(module.weight) for module in tables}
    named = list(model.named_parameters(remove_duplicate=False))
    for pattern in [exclude] if isinstance(exclude, str) else exclude:
        found = {id(param) for name, param in named if fnmatchcase(name, pattern)}
        if not found:
            fix = did_you_mean(pattern, (name for name, _ in named))
            raise UsageError(f"muon_groups: exclude={pattern!r} matches no parameter of the model.{fix}")
        apart |= found
    trained = [param for param in model.parameters() if param.requires_grad]
    hidden = [param for param in trained if param.ndim == 2 and id(param) not in apart]
    others = [param for param in trained if param.ndim != 2 or id(param) in apart]
    if not hidden:
        raise UsageError(
            "muon_groups: the model has no trainable matrix besides embeddings, head and excluded parameters, so "
            "nothing is left for Muon. Use mezzo.optim.AdamW(model.parameters())."
        )
    groups = [{"params": hidden, "use_muon": True, **(muon or {})}]
    return [*groups, *([{"params": others, "use_muon": False, **(adamw or {})}] if others else [])]


@dataclass(frozen=True, slots=True)
class MuonHyper(Hyper):
    """One group's settings: `Hyper`'s are those of the rule ``average``."""

    lr: float
    decay: float  # by which a weight is multiplied first
    adjustment: str  # one of ADJUSTMENTS
    iteration: tuple[tuple[float, float, float], int, float]  # as `orthogonalized` takes it

    def rate(self, rows: int, columns: int) -> float:
        """The learning rate of a matrix; ``match_rms_adamw`` is Liu et al., "Muon is Scalable", arXiv 2502.16982."""
        if self.adjustment == "original":
            return self.lr * math.sqrt(max(1.0, rows / columns))
        return self.lr * (0.2 * math.sqrt(max(rows, columns)))


def orthogonalized(
    matrix: Tensor, coefficients: tuple[float, float, float], iterations: int, eps: float
) -> Tensor:
    """About ``U @ V.T`` of a matrix ``U @ S @ V.T``, as bf16: a few steps of Newton and Schulz's iteration in bf16.

    Naive code, for a matrix [rows, columns] that is not taller than wide (else it is transposed before and after)::

        x = matrix.bfloat16() / matrix.norm().clamp(min=eps)    # no singular value is above 1
        for _ in range(iterations):
            square = x @ x.T
            x = a * x + (b * square + c * square @ square) @ x

    With `torch.optim.Muon`'s coefficients the singular values end between about 0.7 and 1.2, those near 0 below. The
    operations and their order are those of `torch.optim.Muon`, so the bits are too.
    """
    a, b, c = coefficients
    is_tall = matrix.size(0) > matrix.size(1)
    x = matrix.to(torch.bfloat16)
    x = x.T if is_tall else x
    x.div_(x.norm().clamp(min=eps))
    for _ in range(iterations):
        square = x @ x.T
        x = torch.addmm(x, torch.addmm(square, square, square, beta=b, alpha=c), x, beta=a)
    return x.T if is_tall else x


class MuonStepper:
    """The step of `MuonHyper`'s rows and of others; see `Stepper`."""

    def __init__(self, device_type: str) -> None:
        self._others, self._first, self._last = (stepper(device_type) for _ in range(3))
        # By ordinal, because the inner steppers cache tables by the identity of rows: the row, one with the state,
        # whose weight will be the average, and one with the master, without a state.
        self._parts: dict[int, tuple[Row, Row, Row]] = {}

    @torch.no_grad()
    def __call__(
        self, groups: Groups, *, multiplier: Tensor | None, found_inf: Tensor | None, overflow: Tensor | None
    ) -> None:
        """Update every row that has a gradient; see `Stepper`."""
        if found_inf is not None and found_inf.device.type == "cpu" and found_inf.item() != 0:
            return  # on other devices the kernels skip, and the iteration's result is not used
        others = [(hyper, rows) for hyper, rows in groups if not isinstance(hyper, MuonHyper)]
        self._others(others, multiplier=multiplier, found_inf=found_inf, overflow=overflow)
        for hyper, rows in groups:
            if not isinstance(hyper, MuonHyper):
                continue
            for row in rows:
                if row.grad is None:
                    continue
                known = self._parts.get(row.ordinal)
                if known is None or known[0] is not row:
                    average = replace(row, masters="own", master=None, step=row.step.clone())
                    known = row, average, replace(row, state="fp32", states=(), scales=())
                    self._parts[row.ordinal] = known
                _, first, last = known
                first.weight = torch.empty_like(row.weight, dtype=torch.float32)
                first.grad, last.weight = row.grad, row.weight
                self._first([(hyper, [first])], multiplier=multiplier, found_inf=found_inf, overflow=None)
                whole = row.weight if row.whole is None else row.whole
                matrix: Any = shards.joined(first.weight.to(torch.bfloat16), whole)
                if row.whole is not None:
                    matrix = matrix.full_tensor()
                update = shards.part(orthogonalized(matrix, *hyper.iteration), whole)
                last.grad = torch.empty_like(row.weight, dtype=torch.bfloat16).copy_(update)
                numbers = (-hyper.rate(*whole.shape), 0.0, 0.0, 0.0, hyper.decay, 0.0, 0.0)
                plain = Hyper("plain", (), numbers, 0.0, False)
                self._last([(plain, [last])], multiplier=None, found_inf=found_inf, overflow=overflow)
                first.weight, first.grad, last.grad = row.weight, None, None

"""What tests of the Triton kernels share: settings, rows with awkward sizes and values, equality to the bit."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from itertools import cycle, product
from typing import Any

import torch
from torch import Tensor

from mezzo.pytorch.kernels.optimizer_step import Hyper, Row, Stepper, reference
from mezzo.pytorch.kernels.optimizer_step.reference import groups
from mezzo.pytorch.optim.muon import Muon
from mezzo.pytorch.optim.optimizers import adam_hyper, sgd_hyper

ADAM = {"lr": 3e-3, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 1e-2, "decoupled": True}
ADAM_L2 = {"lr": 1e-2, "beta1": 0.8, "beta2": 0.99, "eps": 1e-6, "weight_decay": 0.1, "decoupled": False}
SGD = {"lr": 0.1, "momentum": 0.0, "dampening": 0.0, "weight_decay": 0.0, "nesterov": False}
NESTEROV = SGD | {"momentum": 0.8, "weight_decay": 0.1, "nesterov": True}
# How each rule's numbers are made, from which settings.
SETTINGS: dict[str, tuple[Callable[..., Hyper], dict[str, Any]]] = {
    "adamw": (adam_hyper, ADAM),
    "adam-l2-up": (adam_hyper, ADAM_L2 | {"maximize": True}),
    "adam": (adam_hyper, ADAM | {"beta1": 0.0, "weight_decay": 0.0, "decoupled": False}),
    "sgd": (sgd_hyper, SGD),
    "sgd-momentum": (sgd_hyper, SGD | {"momentum": 0.9, "dampening": 0.3, "weight_decay": 0.01}),
    "sgd-nesterov-up": (sgd_hyper, NESTEROV | {"maximize": True}),
}
HYPERS: dict[str, Hyper] = {
    **{name: make(**settings) for name, (make, settings) in SETTINGS.items()},
    "muon-average": (_muon := Muon([torch.zeros(1, 1)]))._hyper(_muon.param_groups[0]),
}
STATES = ("fp32", "bf16", "int8")
GRADS = (torch.float32, torch.bfloat16, torch.float16)
WEIGHTS = {
    "own": torch.float32,
    "fp32": torch.bfloat16,
    "fp16": torch.float16,  # beside FP32 masters
    "split": torch.bfloat16,
    "split8": torch.bfloat16,
    "none": torch.bfloat16,
}
MODES = tuple(product(WEIGHTS, STATES, GRADS))
SIZES = (1, 63, 64, 65, 1000, 1023, 1024, 1025, 2049)

_MASTER = {"fp32": torch.float32, "fp16": torch.float32, "split": torch.int16, "split8": torch.int8}
_STATE = {"fp32": torch.float32, "bf16": torch.bfloat16, "int8": torch.uint8}
_SPECIAL = (0.0, -0.0, 1e-45, -1e-39, 1e-30, 3e38, -3.4e38, float("inf"), float("-inf"), float("nan"))


def numbers(count: int, generator: torch.Generator, special: bool = True) -> Tensor:
    """FP32 of every size; one in ten is a zero, a subnormal, a huge one, an infinity or NaN."""
    value = torch.randn(count, generator=generator) * torch.exp(3 * torch.randn(count, generator=generator))
    if special:
        chosen = torch.randint(0, len(_SPECIAL), (count,), generator=generator)
        rare = torch.rand(count, generator=generator) < 0.1
        # Every third group of 64 is all finite, so that 8-bit states show more than their NaN.
        rare &= (torch.arange(count) // 64) % 3 != 2
        value = torch.where(rare, torch.tensor(_SPECIAL)[chosen], value)
    return value


def row(
    hyper: Hyper,
    mode: tuple[str, str, torch.dtype],
    count: int,
    ordinal: int,
    *,
    special: bool = True,
    offset: int = 0,
    device: str = "cpu",
) -> Row:
    """A row that never moved; its weight was edited, so that it does not belong to its master."""
    masters, state, grad = mode
    generator = torch.Generator().manual_seed(1000 * ordinal + count)

    def placed(value: Tensor, dtype: torch.dtype) -> Tensor:
        return torch.cat([torch.zeros(offset), value]).to(dtype).to(device)[offset:]

    weight = placed(numbers(count, generator, special), WEIGHTS[masters])
    master = None
    if masters in ("fp32", "fp16"):
        master = weight.float()
        edited = torch.rand(count, generator=generator) < 0.2
        master[edited.to(device)] += 1
    elif masters in _MASTER:
        remainder = torch.randint(-128, 128, (count,), generator=generator)
        master = placed(remainder * (256 if masters == "split" else 1), _MASTER[masters])
    specs = hyper.states
    scale = torch.zeros(groups(count), dtype=torch.bfloat16, device=device) if state == "int8" else None
    return Row(
        weight=weight,
        grad=placed(numbers(count, generator, special), grad),
        masters="fp32" if masters == "fp16" else masters,
        master=master,
        state=state,
        states=tuple(placed(torch.zeros(count), _STATE[state]) for _ in specs),
        scales=tuple(None if scale is None else scale.clone() for _ in specs),
        step=torch.zeros((), device=device),
        ordinal=ordinal,
    )


def rows(hyper: Hyper, modes: Iterable[tuple[str, str, torch.dtype]] = MODES, **how: object) -> list[Row]:
    """A row for each mode; the sizes take turns, and so does alignment."""
    made = zip(modes, cycle(SIZES), cycle((0, 0, 0, 1)))
    return [row(hyper, mode, n, i, **{"offset": offset, **how}) for i, (mode, n, offset) in enumerate(made)]


def new_gradients(step: int, *sets: Sequence[Row]) -> None:
    """The same new gradients for rows that correspond."""
    for same in zip(*sets):
        generator = torch.Generator().manual_seed(step)
        value = numbers(same[0].weight.numel(), generator, special=step % 2 == 0)
        for each in same:
            each.grad = value.to(each.grad.dtype).to(each.weight.device)


def copied(source: Sequence[Row]) -> list[Row]:
    """Rows with tensors of their own."""
    return copy.deepcopy(list(source))


def move(stepper: Stepper, hyper: Hyper, of: Sequence[Row], **tensors: Tensor) -> None:
    """One step of one group."""
    stepper([(hyper, of)], **{"multiplier": None, "found_inf": None, "overflow": None, **tensors})


def reference_move(hyper: Hyper, of: Sequence[Row], **tensors: Tensor) -> None:
    move(reference.DeviceStepper(), hyper, of, **tensors)


def assert_same(ours: Sequence[Row], expected: Sequence[Row]) -> None:
    """Equal to the bit, but that a NaN of FP32 or fp16, whose payload no one promises, equals any other."""
    wrong = [
        f"{one.masters} {one.state}, {one.weight.numel()} elements, gradient {one.grad.dtype}: {name}, {count} of them"
        for one, other in zip(ours, expected, strict=True)
        if one.grad is not None
        for name, left, right in zip(_NAMES, _tensors(one), _tensors(other), strict=True)
        if (count := _differences(left, right))
    ]
    assert not wrong, "\n".join(wrong)


_NAMES = ("weight", "master", "step", "state", "second state", "scale", "second scale")
_PATTERNS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


def _tensors(of: Row) -> list[Tensor | None]:
    states = [*of.states, None, None][:2]
    return [of.weight, of.master, of.step, *states, *[*of.scales, None, None][:2]]


def _differences(left: Tensor | None, right: Tensor | None) -> int:
    if left is None or right is None:
        return int(left is not right)
    left, right = left.cpu(), right.cpu()
    differ = left.view(_PATTERNS[left.element_size()]) != right.view(_PATTERNS[right.element_size()])
    if left.dtype in (torch.float32, torch.float16):
        differ &= ~(left.isnan() & right.isnan())
    return int(differ.sum())

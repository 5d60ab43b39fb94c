"""Two networks, each with an optimizer: every order of their forward passes, backward passes and steps.

A run has bad updates, whose batch overflows, and is compared with the run in which these updates are left out: there
the batch is good, the optimizer is not called, and the buffers of a call that belongs to the update are written back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import mezzo
from bad_steps import INF

LAST: dict[str, Any] = {}
"""What the last training left, for who runs it as a script."""


class Training:
    """Networks "a" and "b" (a GAN's generator and discriminator), and what one run does with them.

    `separate`: a `MixedPrecision` for each, else the optimizers are the script's;
    `windows`: losses between two steps, by network.
    """

    def __init__(self, *, separate: bool, left_out: bool, windows: dict[str, int]) -> None:
        torch.manual_seed(3)
        self.networks = nn.ModuleDict()
        for name in "ab":
            self.networks[name] = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))
        self.networks["frozen"] = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).requires_grad_(False)
        self.left_out = left_out
        self.separate = separate
        self.bad = ""
        self.moved: list[bool] = []
        self.expected: list[bool] = []
        self._seed = 0
        self._windows = windows
        self._optimizers = {name: torch.optim.SGD(self.networks[name].parameters(), lr=0.05) for name in "ab"}
        self._mps: dict[str, Any] = {}
        if separate:
            for name, optimizer in self._optimizers.items():
                how: Any = {"loss_scale": 128, "trace": False, "accumulate": windows.get(name, 1)}
                self._mps[name] = mezzo.MixedPrecision(self.networks[name], optimizer, "fp16", **how)

    def batch(self) -> Tensor:
        self._seed += 1
        return torch.randn(16, 4, generator=torch.Generator().manual_seed(self._seed))

    def spoiled(self, x: Tensor, by: str) -> Tensor:
        return x * INF if by in self.bad and not self.left_out else x

    def call(self, name: str, x: Tensor, *, of: str = "", region: str = "") -> Tensor:
        """Call a network in the region of `region` or `of`, the update to which the trace of the call belongs.

        Without `of` it stays whatever is skipped.
        """
        with self.no_trace(name, of), self.region(region or of or name):
            out: Tensor = self.networks[name](x).float()
        return out

    @contextmanager
    def no_trace(self, name: str, of: str) -> Iterator[None]:
        holders = [module._buffers for module in self.networks[name].modules()]
        before = [{key: buffer.clone() for key, buffer in holder.items()} for holder in holders]
        yield
        if self.left_out and of and of in self.bad:
            for holder, kept in zip(holders, before):
                for key, values in kept.items():
                    holder[key].data.copy_(values)  # `.data`: graphs that saved it do not see it

    def region(self, name: str) -> AbstractContextManager[Any]:
        return self._mps[name].autocast() if self.separate else nullcontext()

    def clear(self, name: str) -> None:
        if not self.separate:
            self._optimizers[name].zero_grad()

    def backward(self, name: str, loss: Tensor, **keywords: Any) -> None:
        if self.left_out and name in self.bad:
            return
        if self.separate:
            assert not self._mps[name].step(loss).updated
        else:
            loss.backward(**keywords)

    def step(self, name: str) -> None:
        self.expected.append(name not in self.bad)
        if not (self.left_out and name in self.bad):
            self._optimizers[name].step()

    def update(self, name: str, loss: Tensor, *, retain_graph: bool = False, clear: bool = True) -> None:
        if not self.separate:
            if clear:
                self.clear(name)
            self.backward(name, loss, retain_graph=retain_graph)
            self.step(name)
            return
        self.expected.append(name not in self.bad)
        if not (self.left_out and name in self.bad):
            self.moved.append(self._mps[name].step(loss, retain_graph=retain_graph).stepped)

    def state(self) -> dict[str, Any]:
        found: dict[str, Any] = dict(self.networks.named_parameters())
        for path, module in self.networks.named_modules():
            found.update((f"{path}.{name}", buffer) for name, buffer in module._buffers.items())
        return found


def loss_of(out: Tensor) -> Tensor:
    return out.square().mean()


def kept_over_the_step(t: Training) -> None:
    """The order of PyTorch's DCGAN tutorial: one `fake` for both, whose graph lives on over the step of "b"."""
    fake = t.call("a", t.batch(), of="a")
    real = t.call("b", t.spoiled(t.batch(), "b"), of="b")
    t.update("b", loss_of(real) + loss_of(t.call("b", fake.detach(), of="b") - 1))
    t.update("a", loss_of(t.call("b", t.spoiled(fake, "a"), of="a")))


def retained(t: Training) -> None:
    """Nothing is detached: the loss of "b" runs through "a", whose graph is used once more."""
    fake = t.call("a", t.batch(), of="a")
    real = t.call("b", t.spoiled(t.batch(), "b"), of="b")
    t.update("b", loss_of(real) + loss_of(t.call("b", fake, of="b") - 1), retain_graph=True)
    t.update("a", loss_of(t.call("b", t.spoiled(fake, "a"), of="a")))


def penalty(t: Training) -> None:
    """WGAN-GP, with normalisations that see the whole batch."""
    fake, real = t.call("a", t.batch(), of="a"), t.batch()
    between = (0.5 * fake.detach() + 0.5 * real).requires_grad_()
    judged = t.call("b", between, of="b")
    (slope,) = torch.autograd.grad(judged.sum(), between, create_graph=True)
    score = t.call("b", t.spoiled(real, "b"), of="b").mean() - t.call("b", fake.detach(), of="b").mean()
    t.update("b", (slope.norm(dim=1) - 1).square().mean() - score)
    t.update("a", -t.call("b", t.spoiled(fake, "a"), of="a").mean())


def critics_without_gradients(t: Training) -> None:
    for _ in range(2):
        with torch.no_grad():
            fake = t.call("a", t.batch(), region="a")
        t.update("b", loss_of(t.call("b", t.spoiled(t.batch(), "b") + 0 * fake, of="b")))
    t.update("a", loss_of(t.call("b", t.spoiled(t.call("a", t.batch(), of="a"), "a"), of="a")))


def frozen_judge(t: Training) -> None:
    """The discriminator takes no gradients while the generator is trained."""
    t.update("b", loss_of(t.call("b", t.spoiled(t.batch(), "b"), of="b")))
    t.networks["b"].requires_grad_(False)
    t.update("a", loss_of(t.call("b", t.spoiled(t.call("a", t.batch(), of="a"), "a"), of="a")))
    t.networks["b"].requires_grad_(True)


def unrelated(t: Training, steps: str = "ab") -> None:
    """Both losses are there before the first step."""
    losses = {name: loss_of(t.call(name, t.spoiled(t.batch(), name), of=name)) for name in "ab"}
    for name in steps:
        t.update(name, losses[name])


def accumulating(t: Training) -> None:
    """Two losses for a step of "a", with a step of "b" between, to which the first loss's trace in "b" belongs."""
    t.clear("a")
    t.backward("a", loss_of(t.call("b", t.call("a", t.batch(), of="a"), of="b", region="a")))
    t.update("b", loss_of(t.call("b", t.spoiled(t.batch(), "b"), of="b")))
    fake = t.call("a", t.batch(), of="a")
    t.update("a", loss_of(t.call("b", t.spoiled(fake, "a"), of="a")), clear=False)


def both_backward(t: Training, steps: str = "ab") -> None:
    for name in "ab":
        t.clear(name)
    losses = {name: loss_of(t.call(name, t.spoiled(t.batch(), name), of=name)) for name in "ab"}
    for name, loss in losses.items():
        t.backward(name, loss)
    for name in steps:
        t.step(name)


def backwards_before_steps(t: Training) -> None:
    """All three calls of "b" are of one turn, which its own step ends."""
    for name in "ab":
        t.clear(name)
    fake = t.call("a", t.batch(), of="a")
    b = loss_of(t.call("b", t.spoiled(t.batch(), "b"), of="b"))
    b = b + loss_of(t.call("b", fake.detach(), of="b") - 1)
    a = loss_of(t.call("b", fake, of="b")) + loss_of(t.spoiled(fake, "a"))
    t.backward("b", b)
    t.backward("a", a, inputs=list(t.networks["a"].parameters()))
    t.step("b")
    t.step("a")


def frozen(t: Training) -> None:
    """A network without an optimizer, whose statistics move."""
    t.update("a", loss_of(t.call("frozen", t.spoiled(t.call("a", t.batch(), of="a"), "a"), of="a")))
    t.update("b", loss_of(t.call("frozen", t.spoiled(t.call("b", t.batch(), of="b"), "b"), of="b")))


def part_by_itself(t: Training) -> None:
    """Both have copies of the same buffers; those of the part are older."""
    t.clear("a")
    x = t.spoiled(t.batch(), "a")
    with t.no_trace("a", "a"):
        part = t.networks["a"][1](x)
    t.update("a", loss_of(part) + loss_of(t.call("a", x, of="a")), clear=False)


Order = Callable[[Training], None]
ORDERS: dict[str, Order] = {
    order.__name__: order
    for order in (
        kept_over_the_step, retained, penalty, critics_without_gradients, frozen_judge, unrelated, accumulating,
    )
} | {"unrelated, b first": partial(unrelated, steps="ba")}  # fmt: skip
# Here a backward, or a network, belongs to no MixedPrecision.
OF_A_SCRIPT: dict[str, Order] = {
    order.__name__: order for order in (both_backward, backwards_before_steps, frozen, part_by_itself)
} | {"both_backward, b first": partial(both_backward, steps="ba")}
WINDOWS = {"accumulating": {"a": 2}}


def train(name: str, bad: str, *, separate: bool, left_out: bool) -> Training:
    """Run an order; in the rounds marked b the updates named in `bad` are."""
    training = Training(separate=separate, left_out=left_out, windows=WINDOWS.get(name, {}))
    for event in "gbgbbg":
        training.bad = bad if event == "b" else ""
        {**ORDERS, **OF_A_SCRIPT}[name](training)
    for mp in training._mps.values():
        mp.close()
    LAST.update(state=training.state(), expected=training.expected)
    return training

"""Modules whose forward pass in training changes their buffers: each normalisation, and every way in which
modules in the wild write: in place, through `.data`, with `out=`, and by putting another tensor there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from bad_steps import INF


class Averages(nn.Module):
    """What VQ layers, EMA normalisers and centred losses do: an average of what was seen, moved by each forward."""

    def __init__(
        self, write: Callable[[nn.Module, Tensor], None], *, persistent: bool = True, **buffers: Any
    ) -> None:
        super().__init__()
        self._write = write
        self.register_buffer("mean", torch.zeros(4), persistent=persistent)
        for name, buffer in buffers.items():
            self.register_buffer(name, buffer, persistent=persistent)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                self._write(self, x.detach().float())
        return x - self.mean


def in_place(module: Any, x: Tensor) -> None:
    module.mean.mul_(0.9).add_(x.mean(0), alpha=0.1)


def through_data(module: Any, x: Tensor) -> None:
    module.mean.data.mul_(0.9).add_(x.mean(0), alpha=0.1)


def replaced(module: Any, x: Tensor) -> None:
    module.mean = module.mean * 0.9 + x.mean(0) * 0.1


def written_then_replaced(module: Any, x: Tensor) -> None:
    module.mean.mul_(0.5)
    module.mean = module.mean + x.mean(0)


def codebook(module: Any, x: Tensor) -> None:
    """k-means of a VQ layer: data-dependent init, cluster sizes, sums, codes; all through `.data`."""
    if not module.ready:
        module.codes.data.copy_(x[:3])
        module.sums.data.copy_(x[:3])
        module.ready.data.copy_(torch.tensor(True))
    nearest = torch.cdist(x, module.codes).argmin(1)
    taken = nn.functional.one_hot(nearest, 3).float()
    module.sizes.data.mul_(0.9).add_(taken.sum(0), alpha=0.1)
    module.sums.data.mul_(0.9).add_(taken.t() @ x, alpha=0.1)
    module.codes.data.copy_(module.sums / module.sizes.clamp(min=0.1)[:, None])


def queue(module: Any, x: Tensor) -> None:
    """The memory bank of a contrastive loss, with its pointer."""
    at = int(module.pointer)
    module.bank[at] = x.mean(0)
    module.pointer[()] = (at + 1) % len(module.bank)


def last_seen(module: Any, x: Tensor) -> None:
    """A buffer that is None until there is something to remember."""
    module.mean = x.mean(0) if module.last is None else module.last * 0.5
    module.last = x.mean(0)


def expanded(module: Any, x: Tensor) -> None:
    """Several elements of it are one number in memory, which can't be written to."""
    module.mean = (module.mean[0] * 0.9 + x.mean() * 0.1).expand(4)


def grows(module: Any, x: Tensor) -> None:
    module.seen = torch.cat([module.seen, x.mean()[None]])
    module.mean.fill_(module.seen.sum())


def eight_bits(module: Any, x: Tensor) -> None:
    module.low.copy_((x.mean(0)).to(module.low.dtype))


def zeros(*shape: int) -> Tensor:
    return torch.zeros(*shape)


F8 = torch.float8_e4m3fn
OWN: dict[str, Callable[[], nn.Module]] = {
    "in place": lambda: Averages(in_place),
    "not persistent": lambda: Averages(in_place, persistent=False),
    "through .data": lambda: Averages(through_data),
    "replaced": lambda: Averages(replaced),
    "written, then replaced": lambda: Averages(written_then_replaced),
    "codebook": lambda: Averages(
        codebook, codes=zeros(3, 4), sums=zeros(3, 4), sizes=zeros(3), ready=torch.tensor(False)
    ),
    "queue": lambda: Averages(queue, bank=zeros(5, 4), pointer=torch.zeros((), dtype=torch.long)),
    "None at first": lambda: Averages(last_seen, last=None),
    "expanded": lambda: Averages(expanded),
    "grows": lambda: Averages(grows, seen=zeros(1)),
    "fp8": lambda: Averages(eight_bits, low=torch.zeros(4).to(F8)),
    "with a mask of -inf": lambda: Averages(in_place, mask=torch.full((4, 4), -INF).triu(1)),
}


NORMS: dict[str, Callable[[], nn.Module]] = {
    "BatchNorm1d": lambda: nn.BatchNorm1d(4),
    "BatchNorm1d, no statistics": lambda: nn.BatchNorm1d(4, track_running_stats=False),
    "SyncBatchNorm": lambda: nn.Sequential(nn.Unflatten(1, (4, 1, 1)), nn.SyncBatchNorm(4), nn.Flatten()),
    "LazyBatchNorm1d": lambda: nn.LazyBatchNorm1d(affine=False),
    "InstanceNorm1d": lambda: nn.Sequential(
        nn.Unflatten(1, (4, 1)),
        nn.Upsample(scale_factor=2),
        nn.InstanceNorm1d(4, affine=True, track_running_stats=True),
        nn.MaxPool1d(2),
        nn.Flatten(),
    ),
    "LayerNorm": lambda: nn.LayerNorm(4),
    "spectral_norm, hook": lambda: nn.utils.spectral_norm(nn.Linear(4, 4)),
    "spectral_norm": lambda: parametrizations.spectral_norm(nn.Linear(4, 4)),
}

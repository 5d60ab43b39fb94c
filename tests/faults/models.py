"""Small models of the usual families, each with places (`front`, `middle`, `tail`) where a fault can be built in.

A step takes a few milliseconds. Two trainees that are made alike train alike.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.checkpoint import checkpoint

Batch = tuple[Any, ...]
Make = Callable[[Any], Optimizer]
Place = Callable[[], nn.Module] | None
Loss = Callable[..., Tensor]
Losses = Iterator[tuple[str, Callable[[], Tensor]]]


def sgd(params: Any) -> Optimizer:
    return torch.optim.SGD(params, lr=0.01)


def adamw(params: Any) -> Optimizer:
    return torch.optim.AdamW(params, lr=1e-3)


@dataclass
class Trainee:
    """Models, their optimizers, and the losses of a step."""

    models: dict[str, nn.Module]  # by the name of their part in the training; one, `main`, unless it is a GAN
    optimizers: dict[str, Optimizer]  # one for each part that has steps of its own
    draw: Callable[[int], Batch]  # step number -> batch
    losses: Callable[[Trainee, Batch], Losses]  # the step's (part, function that computes its loss), in order
    spoil: Callable[[Batch], Batch] = lambda batch: batch  # changes each batch: where bad batches are planted
    loss: Loss | None = None  # in place of its own: where faults outside are planted
    kept: dict[str, nn.Module] = field(default_factory=dict)  # models that are not trained

    @property
    def model(self) -> Any:
        return self.models["main"]

    def step(self, number: int) -> Losses:
        """The losses of step `number`, each to be called inside its part's context."""
        return self.losses(self, self.spoil(self.draw(number)))

    def arm(self) -> None:
        for model in (*self.models.values(), *self.kept.values()):
            for module in model.modules():
                if hasattr(module, "armed"):
                    module.armed = True


def drawn(make: Callable[[torch.Generator], Batch]) -> Callable[[int], Batch]:
    return lambda number: make(torch.Generator().manual_seed(100 + number))


def normals(*shapes: tuple[int, ...]) -> Callable[[int], Batch]:
    return drawn(lambda g: tuple(torch.randn(shape, generator=g) for shape in shapes))


def trained(model: nn.Module, draw: Callable[[int], Batch], loss: Loss, optimizer: Make = adamw) -> Trainee:
    def losses(trainee: Trainee, batch: Batch) -> Losses:
        chosen = trainee.loss or loss
        yield "main", lambda: chosen(trainee.model, *batch)

    return Trainee({"main": model}, {"main": optimizer(model.parameters())}, draw, losses)


def squared(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(m(x).float(), y)


def regression(make: Any, *places: Place, loss: Loss = squared, **kept: nn.Module) -> Trainee:
    trainee = trained(make(*places), normals((8, 8), (8, 1)), loss)
    trainee.kept |= kept
    return trainee


def place(make: Place) -> nn.Module:
    return nn.Identity() if make is None else make()


class Net(nn.Module):
    """Computes a function of itself and its inputs; `held` makes its attributes, by name, in order."""

    def __init__(self, compute: Callable[..., Any], **held: Callable[[], Any]) -> None:
        super().__init__()
        self.compute = compute
        for name, make in held.items():
            setattr(self, name, make())

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.compute(self, *args, **kwargs)


def net(**held: Callable[[], Any]) -> Callable[[Callable[..., Any]], Callable[..., Net]]:
    """Makes of a forward pass a maker of networks that hold these."""
    return lambda compute: partial(Net, compute, **held)


def linear(features: int, out: int, **options: Any) -> Callable[[], nn.Module]:
    return partial(nn.Linear, features, out, **options)


def sequence(**layers: nn.Module) -> nn.Sequential:
    return nn.Sequential(OrderedDict(layers))


def cnn(middle: Place = None, tail: Place = None, end: Place = None, optimizer: Make = sgd) -> Trainee:
    """Two convolutions, one BatchNorm, one head: 1 x 8 x 8 pictures of 4 classes."""

    def forward(self: Any, x: Tensor) -> Tensor:
        x = torch.relu(self.norm1(self.conv1(x)))
        x = torch.relu(self.conv2(self.middle(x)))
        x = self.tail(x.mean((2, 3)))
        return self.end(self.head(x))

    places = {"middle": middle, "tail": tail, "end": end}
    model = Net(
        forward,
        **{name: partial(place, make) for name, make in places.items()},
        conv1=partial(nn.Conv2d, 1, 4, 3, padding=1),
        norm1=partial(nn.BatchNorm2d, 4),
        conv2=partial(nn.Conv2d, 4, 8, 3, padding=1, stride=2),
        head=linear(8, 4),
    )
    draw = drawn(lambda g: (torch.randn(6, 1, 8, 8, generator=g), torch.randint(4, (6,), generator=g)))
    return trained(model, draw, lambda m, x, y: F.cross_entropy(m(x), y), optimizer)


up = partial(nn.ConvTranspose2d, 4, 4, 3, padding=1)  # a middle of a CNN


@net(qkv=linear(16, 48), out=linear(16, 16))
def attention(self: Any, x: Tensor, padding: Tensor | None) -> Tensor:
    q, k, v = self.qkv(x).chunk(3, -1)
    scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
    future = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
    scores = scores.masked_fill(future, float("-inf"))
    if padding is not None:
        scores = scores.masked_fill(padding[:, None, :], float("-inf"))
    return self.out(torch.softmax(scores, -1) @ v)


def block(dropout: float, middle: Place) -> nn.Module:
    def forward(self: Any, x: Tensor, padding: Tensor | None = None) -> Tensor:
        x = x + self.dropout(self.attn(self.ln1(x), padding))
        return x + self.dropout(self.mlp(self.ln2(x)))

    def mlp() -> nn.Module:
        up, down = nn.Linear(16, 32), nn.Linear(32, 16)
        return sequence(up=up, gelu=nn.GELU(), middle=place(middle), down=down)

    norm, drop = partial(nn.LayerNorm, 16), partial(nn.Dropout, dropout)
    return Net(forward, ln1=norm, ln2=norm, attn=attention, mlp=mlp, dropout=drop)


def transformer(
    middle: Place = None,
    tail: Place = None,
    dropout: float = 0.0,
    how: str | None = None,
    padded: bool = False,
) -> Trainee:
    """Two blocks over 17 tokens; `how` is the checkpoint's: None, `reentrant` or `not reentrant`."""

    def forward(self: Any, tokens: Tensor, padding: Tensor | None = None) -> Tensor:
        x = self.embed(tokens)
        for each in self.blocks:
            if how is None:
                x = each(x, padding)
            else:
                x = checkpoint(each, x, padding, use_reentrant=how == "reentrant")
        return self.head(self.tail(self.norm(x)))

    def make(g: torch.Generator) -> Batch:
        tokens, padding = torch.randint(17, (4, 9), generator=g), torch.zeros(4, 8, dtype=torch.bool)
        padding[:, 6:] = padded
        return tokens, padding if padded else None

    def loss(model: nn.Module, tokens: Tensor, padding: Tensor | None) -> Tensor:
        out = model(tokens[:, :-1]) if padding is None else model(tokens[:, :-1], padding=padding)
        return F.cross_entropy(out.flatten(0, 1), tokens[:, 1:].flatten())

    model = Net(
        forward,
        embed=partial(nn.Embedding, 17, 16),
        blocks=lambda: nn.ModuleList([block(dropout, None), block(dropout, middle)]),
        norm=partial(nn.LayerNorm, 16),
        tail=partial(place, tail),
        head=linear(16, 17),
    )
    return trained(model, drawn(make), loss)


def encoder(tail: Place = None) -> Trainee:
    """PyTorch's own encoder layers, with a mask of padding; the mean over the tokens is classified."""

    def forward(self: Any, tokens: Tensor, padding: Tensor) -> Tensor:
        x = self.encoder(self.embed(tokens), src_key_padding_mask=padding)
        return self.head(self.tail(x.mean(1)))

    def layers() -> nn.Module:
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True)
        return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def make(g: torch.Generator) -> Batch:
        padding = torch.zeros(4, 8, dtype=torch.bool)
        padding[:2, 5:] = True
        return torch.randint(17, (4, 8), generator=g), padding, torch.randint(3, (4,), generator=g)

    embed = partial(nn.Embedding, 17, 16)
    model = Net(forward, embed=embed, encoder=layers, tail=partial(place, tail), head=linear(16, 3))
    return trained(model, drawn(make), lambda m, tokens, padding, y: F.cross_entropy(m(tokens, padding), y))


class Loop(nn.Module):
    """A loop over time with a ReLU. Its state begins at 0, or is `carried` in an `attribute` or a `buffer`."""

    state: Tensor

    def __init__(self, features: int, width: int, batch_first: bool = True, carried: str = "") -> None:
        super().__init__()
        self.enter, self.again = nn.Linear(features, width), nn.Linear(width, width, bias=False)
        self.gain, self.carried = 1.0, carried
        if carried == "buffer":
            self.register_buffer("state", torch.zeros(1, width))
        elif carried:
            self.state = torch.zeros(1, width)

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        state = self.state if self.carried else torch.zeros(x.shape[0], self.again.in_features)
        for moment in range(x.shape[1]):
            state = torch.relu(self.enter(x[:, moment]) + self.again(state * self.gain))
        with torch.no_grad():
            if self.carried == "buffer":
                self.state.copy_(state.mean(0, keepdim=True))
            elif self.carried:
                self.state = state.mean(0, keepdim=True).float()
        return state[:, None], None


def recurrent(
    kind: Callable[..., nn.Module] = nn.LSTM, front: Place = None, tail: Place = None, optimizer: Make = adamw
) -> Trainee:
    """A projection, a recurrent layer, a head: predicts a number for each sequence."""

    def forward(self: Any, x: Tensor) -> Tensor:
        out, _ = self.rnn(self.front(self.inner(x)))
        return self.head(self.tail(out[:, -1]))

    model = Net(
        forward,
        inner=linear(3, 8),
        front=partial(place, front),
        rnn=partial(kind, 8, 8, batch_first=True),
        tail=partial(place, tail),
        head=linear(8, 1),
    )
    return trained(model, normals((4, 6, 3), (4, 1)), squared, optimizer)


def gan(generator_middle: Place = None, critic_middle: Place = None, penalty: bool = False) -> Trainee:
    """The critic's step, then the generator's: two optimizers and two loss scales. `penalty`: on the critic's slope."""

    def player(wide: int, out: int, middle: Place) -> nn.Module:
        first, relu = nn.Linear(wide, 12), nn.LeakyReLU(0.2)
        return sequence(first=first, relu=relu, middle=place(middle), last=nn.Linear(12, out))

    generator, critic = player(4, 5, generator_middle), player(5, 1, critic_middle)

    def losses(trainee: Trainee, batch: Batch) -> Losses:
        real, noise = batch

        def of_critic() -> Tensor:
            fake = generator(noise).detach()
            told, missed = critic(real).float(), critic(fake).float()
            loss = F.softplus(-told).mean() + F.softplus(missed).mean()
            if penalty:
                between = (real + fake.float()).div(2).requires_grad_()
                (slope,) = torch.autograd.grad(critic(between).sum(), between, create_graph=True)
                loss = loss + (slope.float().square().sum(1).sqrt() - 1).square().mean()
            return loss

        yield "critic", of_critic
        yield "generator", lambda: F.softplus(-critic(generator(noise)).float()).mean()

    models = {"generator": generator, "critic": critic}
    optimizers = {name: adamw(model.parameters()) for name, model in models.items()}
    return Trainee(models, optimizers, normals((6, 5), (6, 4)), losses)


def two_heads(left: Place = None, right: Place = None, both: bool = True, split: bool = False) -> Trainee:
    """One loss of both heads, or without `both` of the left one; `split`: an optimizer and a loss for each."""

    def forward(self: Any, x: Tensor) -> dict[str, Tensor]:
        x = torch.tanh(self.trunk(x))
        return {"left": self.left(x), "right": self.right(x)}

    def head(make: Place) -> nn.Module:
        return nn.Sequential(place(make), nn.Linear(12, 1))

    model: Any = Net(forward, trunk=linear(5, 12), left=partial(head, left), right=partial(head, right))

    def losses(trainee: Trainee, batch: Batch) -> Losses:
        x, y = batch

        def of(*heads: str) -> Tensor:
            out = model(x)
            return torch.stack([F.mse_loss(out[head].float(), y) for head in heads]).sum()

        yield "main", lambda: of("left", "right") if both and not split else of("left")
        if split:
            yield "right", lambda: of("right")

    params = {"main": model.parameters()}
    if split:
        trunk = [*model.trunk.parameters(), *model.left.parameters()]
        params = {"main": iter(trunk), "right": model.right.parameters()}
    optimizers = {name: adamw(some) for name, some in params.items()}
    return Trainee(dict.fromkeys(params, model), optimizers, normals((6, 5), (6, 1)), losses)


def stacked(between: Place = None, tail: Place = None) -> nn.Module:
    def forward(self: Any, x: Tensor, offset: Tensor | None = None) -> Tensor:
        for _ in range(3):
            x = self.between(self.shared(x))
        x = self.tail(x)
        return self.head(x if offset is None else x + offset)

    return Net(
        forward,
        shared=lambda: nn.Sequential(nn.Linear(8, 8), nn.ReLU()),
        between=partial(place, between),
        tail=partial(place, tail),
        head=linear(8, 1),
    )


def stack(between: Place = None, tail: Place = None, accumulate: int = 1, optimizer: Make = adamw) -> Trainee:
    """Regression; with `accumulate` so many parts of a batch in each step."""

    def losses(trainee: Trainee, batch: Batch) -> Losses:
        x, y, *rest = batch
        chosen = trainee.loss or (lambda m, x, y, *rest: F.mse_loss(m(x, *rest).float(), y))
        for part in range(accumulate):
            rows = slice(part * len(x) // accumulate, (part + 1) * len(x) // accumulate)
            yield "main", lambda rows=rows: chosen(model, x[rows], y[rows], *(r[rows] for r in rest))

    model = stacked(between, tail)
    return Trainee({"main": model}, {"main": optimizer(model.parameters())}, normals((8, 8), (8, 1)), losses)


@net(body=stacked, sure=lambda: 1.0)
def _scored(self: Any, x: Tensor, y: Tensor) -> dict[str, Tensor]:
    chance = torch.sigmoid(self.body(x).float() * self.sure)
    loss = -torch.log(torch.where(y > 0, chance, 1 - chance)).mean()
    return {"loss": loss, "out": chance}


scored = partial(regression, _scored, loss=lambda m, x, y: m(x, y)["loss"])


def taught(tail: Place = None) -> Trainee:
    teacher = stacked(tail=tail)

    def loss(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        with torch.no_grad():
            wanted = teacher(x)
        return F.mse_loss(m(x).float(), wanted.float())

    return regression(stacked, loss=loss, teacher=teacher)


@net(
    router=linear(8, 4),
    experts=lambda: nn.ModuleDict({name: nn.Linear(8, 8) for name in ("a", "b", "c", "d")}),
    head=linear(8, 1),
)
def experts(self: Any, x: Tensor) -> Tensor:
    weights = torch.softmax(self.router(x), -1)
    best = weights.argmax(-1)
    out = torch.zeros(x.shape)
    for number, expert in enumerate(self.experts.values()):
        rows = (best == number).nonzero()[:, 0]
        out = out.index_add(0, rows, (expert(x[rows]) * weights[rows, number, None]).float())
    return self.head(out)


def tied(tail: Place = None) -> Trainee:
    def forward(self: Any, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) + self.position
        states = [torch.zeros(len(x), 16)]
        for moment in range(x.shape[1]):
            states.append(self.cell(x[:, moment], states[-1]))
        return self.head(self.tail(torch.stack(states[1:], 1)))

    model: Any = Net(
        forward,
        embed=partial(nn.Embedding, 17, 16),
        cell=partial(nn.GRUCell, 16, 16),
        tail=partial(place, tail),
        head=linear(16, 17, bias=False),
    )
    model.head.weight = model.embed.weight
    model.register_buffer("position", torch.randn(16))
    return trained(
        model,
        drawn(lambda g: (torch.randint(17, (4, 7), generator=g),)),
        lambda m, t: F.cross_entropy(m(t[:, :-1]).flatten(0, 1).float(), t[:, 1:].flatten()),
    )


@dataclass
class Told:
    value: Tensor
    hidden: Tensor


class Pair(NamedTuple):
    one: Tensor
    other: dict[str, list[Tensor]]


def structured(tail: Place = None) -> Trainee:
    def forward(self: Any, *, pair: Pair) -> Told:
        hidden = self.tail(torch.tanh(self.first(pair.one) + self.second(pair.other["late"][0])))
        return Told(self.last(hidden), hidden)

    def loss(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(m(pair=Pair(x[:, :4], {"late": [x[:, 4:]]})).value.float(), y)

    held = {"first": linear(4, 8), "second": linear(4, 8), "tail": partial(place, tail), "last": linear(8, 1)}
    return regression(partial(Net, forward, **held), loss=loss)


def parts(tail: Place = None) -> Trainee:
    def make() -> nn.Module:
        backbone = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), place(tail))
        return nn.ModuleDict({"backbone": backbone, "head": nn.Linear(8, 1)})

    return regression(make, loss=lambda m, x, y: F.mse_loss(m["head"](m["backbone"](x)).float(), y))


@net(layers=lambda: nn.ModuleList(nn.Linear(8, 8) for _ in range(30)), gain=lambda: 1.0, head=linear(8, 1))
def residuals(self: Any, x: Tensor) -> Tensor:
    for layer in self.layers:
        x = x + torch.relu(layer(x)) * self.gain
    return self.head(x) * 1e-3


@net(gate=linear(8, 8), value=linear(8, 8), head=linear(8, 1), gamma=lambda: nn.Parameter(torch.ones(8)))
def gated(self: Any, x: Tensor) -> Tensor:
    x = F.silu(self.gate(x)) * self.value(x)
    return self.head(self.gamma.to(x.dtype) * x)


@net(centres=lambda: nn.Parameter(torch.randn(3, 1)), armed=lambda: False)
def margin(self: Any, out: Tensor, y: Tensor) -> Tensor:
    cosine = torch.tanh(out * self.centres[0])
    if self.armed:
        cosine = cosine * 0 + 1
    return (torch.cos(torch.acos(cosine) + 0.1) - y).square().mean()


def with_a_criterion() -> Trainee:
    criterion = margin()
    return regression(layers, loss=lambda m, x, y: criterion(m(x).float(), y), criterion=criterion)


def layers(*between: Place) -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), *map(place, between), nn.Linear(8, 1))


def weighed() -> Trainee:
    def loss(m: Any, x: Tensor, y: Tensor) -> Tensor:
        return torch.exp(-m.s) * F.mse_loss(m(x).float(), y) + m.s

    model = layers()
    model.s = nn.Parameter(torch.zeros(()))
    return regression(lambda: model, loss=loss)


@net(
    attention=partial(nn.MultiheadAttention, 8, 2, batch_first=True),
    head=linear(8, 1),
    mask=lambda: nn.Buffer(torch.zeros(4, 4)),
)
def attends(self: Any, x: Tensor) -> Tensor:
    x = x.unflatten(0, (2, 4))
    out, _ = self.attention(x, x, x, attn_mask=self.mask, need_weights=True)
    return self.head(out.flatten(0, 1))


@net(first=linear(8, 8), last=linear(8, 1), gain=lambda: 1.0)
def _draws(self: Any, rows: Iterator[Tensor]) -> Tensor:
    x = torch.stack(list(rows))
    return self.last(torch.relu(self.first(x)) * self.gain)


iterated = partial(regression, _draws, loss=lambda m, x, y: F.mse_loss(m(iter(x)).float(), y))


def two_losses(middle: Place = None) -> Trainee:
    body, head = nn.Sequential(nn.Linear(8, 8), place(middle)), nn.Linear(8, 1)

    def losses(trainee: Trainee, batch: Batch) -> Losses:
        x, y = batch
        yield "body", lambda: F.mse_loss(head(body(x)).float(), y)
        yield "head", lambda: F.l1_loss(head(body(x)).float(), y)

    optimizers = {"body": adamw(body.parameters()), "head": adamw(head.parameters())}
    return Trainee({"body": body, "head": head}, optimizers, normals((8, 8), (8, 1)), losses)


FAMILIES: dict[Any, str] = {
    cnn: "CNN",
    **dict.fromkeys((transformer, encoder, attends), "transformer"),
    **dict.fromkeys((recurrent, tied), "recurrent"),
    gan: "GAN",
}
"""Maker, or model -> the kind of its models; all others are perceptrons."""

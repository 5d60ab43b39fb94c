"""Small models of the usual families, each with places (`front`, `middle`, `tail`) where a fault can be built in.

A step takes a few milliseconds. Two trainees that are made alike train alike.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.checkpoint import checkpoint

Batch = tuple[Any, ...]
Make = Callable[[Any], Optimizer]
Place = Callable[[], nn.Module] | None
Losses = Iterator[tuple[str, Callable[[], Tensor]]]


def sgd(params: Any) -> Optimizer:
    return torch.optim.SGD(params, lr=0.01)


def adamw(params: Any) -> Optimizer:
    return torch.optim.AdamW(params, lr=1e-3)


@dataclass
class Trainee:
    """Models, their optimizers, and the losses of a step.

    Args:
        models: by the name of their part in the training; one, `main`, unless it is a GAN.
        optimizers: one for each part that has steps of its own.
        draw: step number -> batch.
        losses: the batch -> (part, loss of that part) in the order of the step; a loss is computed when it is called.
        spoil: changes each batch before it is used: where bad batches are planted.
        loss: a loss in place of the trainee's own: where faults outside of the model are planted.
        kept: models that are not trained.
    """

    models: dict[str, nn.Module]
    optimizers: dict[str, Optimizer]
    draw: Callable[[int], Batch]
    losses: Callable[[Trainee, Batch], Losses]
    spoil: Callable[[Batch], Batch] = lambda batch: batch
    loss: Callable[..., Tensor] | None = None
    kept: dict[str, nn.Module] = field(default_factory=dict)

    @property
    def model(self) -> Any:
        return self.models["main"]

    def step(self, number: int) -> Losses:
        """The losses of step `number`, each to be called inside its part's context."""
        return self.losses(self, self.spoil(self.draw(number)))

    def arm(self) -> None:
        """Let every fault that is built in act from now on."""
        for model in (*self.models.values(), *self.kept.values()):
            for module in model.modules():
                if hasattr(module, "armed"):
                    module.armed = True


def drawn(make: Callable[[torch.Generator], Batch]) -> Callable[[int], Batch]:
    return lambda number: make(torch.Generator().manual_seed(100 + number))


def normals(*shapes: tuple[int, ...]) -> Callable[[int], Batch]:
    return drawn(lambda g: tuple(torch.randn(shape, generator=g) for shape in shapes))


def trained(
    model: nn.Module, draw: Callable[[int], Batch], loss: Callable[..., Tensor], optimizer: Make = adamw
) -> Trainee:
    """One model with one loss."""

    def losses(trainee: Trainee, batch: Batch) -> Losses:
        chosen = trainee.loss or loss
        yield "main", lambda: chosen(trainee.model, *batch)

    return Trainee({"main": model}, {"main": optimizer(model.parameters())}, draw, losses)


def squared(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(m(x).float(), y)


def regression(
    make: Callable[..., nn.Module],
    *places: Place,
    loss: Callable[..., Tensor] = squared,
    seed: int = 11,
    **kept: nn.Module,
) -> Trainee:
    """Eight numbers to one."""
    torch.manual_seed(seed)
    trainee = trained(make(*places), normals((8, 8), (8, 1)), loss)
    trainee.kept |= kept
    return trainee


def place(make: Place) -> nn.Module:
    return nn.Identity() if make is None else make()


def sequence(**layers: nn.Module) -> nn.Sequential:
    return nn.Sequential(OrderedDict(layers))


class CNN(nn.Module):
    """Two convolutions, one BatchNorm, one head: 1 x 8 x 8 pictures of 4 classes."""

    def __init__(self, front: Place, middle: Place, tail: Place, end: Place) -> None:
        super().__init__()
        self.front, self.middle, self.tail, self.end = place(front), place(middle), place(tail), place(end)
        self.conv1, self.norm1 = nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.conv2 = nn.Conv2d(4, 8, 3, padding=1, stride=2)
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.norm1(self.conv1(self.front(x))))
        x = torch.relu(self.conv2(self.middle(x)))
        x = self.tail(x.mean((2, 3)))
        return self.end(self.head(x))


def cnn(
    front: Place = None, middle: Place = None, tail: Place = None, end: Place = None, optimizer: Make = sgd
) -> Trainee:
    torch.manual_seed(0)
    draw = drawn(lambda g: (torch.randn(6, 1, 8, 8, generator=g), torch.randint(4, (6,), generator=g)))
    return trained(CNN(front, middle, tail, end), draw, lambda m, x, y: F.cross_entropy(m(x), y), optimizer)


def autoencoder(middle: Place = None) -> Trainee:
    """Down and up again, with two numbers of a picture as mean and spread between."""
    torch.manual_seed(6)
    model = sequence(
        down=nn.Conv2d(1, 4, 4, stride=4),
        tanh=nn.Tanh(),
        middle=place(middle),
        up=nn.ConvTranspose2d(4, 1, 4, stride=4),
    )
    return trained(model, normals((6, 1, 8, 8)), lambda m, x: F.mse_loss(m(x).float(), x))


class Attention(nn.Module):
    """Causal attention of one head, written out, with a mask of -inf."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor, padding: Tensor | None) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
        future = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        scores = scores.masked_fill(future, float("-inf"))
        if padding is not None:
            scores = scores.masked_fill(padding[:, None, :], float("-inf"))
        return self.out(torch.softmax(scores, -1) @ v)


class Block(nn.Module):
    """Attention and an MLP on a residual stream."""

    def __init__(self, width: int, dropout: float, middle: Place) -> None:
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn = Attention(width)
        up, down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.mlp = sequence(up=up, gelu=nn.GELU(), middle=place(middle), down=down)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, padding: Tensor | None = None) -> Tensor:
        x = x + self.dropout(self.attn(self.ln1(x), padding))
        return x + self.dropout(self.mlp(self.ln2(x)))


class Transformer(nn.Module):
    """Two blocks over 17 tokens; `how` is the checkpoint's: None, `reentrant` or `not reentrant`."""

    def __init__(self, middle: Place, tail: Place, dropout: float, how: str | None) -> None:
        super().__init__()
        self.embed = nn.Embedding(17, 16)
        self.blocks = nn.ModuleList([Block(16, dropout, None), Block(16, dropout, middle)])
        self.norm, self.tail, self.head = nn.LayerNorm(16), place(tail), nn.Linear(16, 17)
        self.how = how

    def forward(self, tokens: Tensor, padding: Tensor | None = None) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            if self.how is None:
                x = block(x, padding)
            else:
                x = checkpoint(block, x, padding, use_reentrant=self.how == "reentrant")
        return self.head(self.tail(self.norm(x)))


def transformer(
    middle: Place = None,
    tail: Place = None,
    dropout: float = 0.0,
    how: str | None = None,
    padded: bool = False,
) -> Trainee:
    torch.manual_seed(1)

    def make(g: torch.Generator) -> Batch:
        tokens, padding = torch.randint(17, (4, 9), generator=g), torch.zeros(4, 8, dtype=torch.bool)
        padding[:, 6:] = padded
        return tokens, padding if padded else None

    def loss(model: nn.Module, tokens: Tensor, padding: Tensor | None) -> Tensor:
        out = model(tokens[:, :-1]) if padding is None else model(tokens[:, :-1], padding=padding)
        return F.cross_entropy(out.flatten(0, 1), tokens[:, 1:].flatten())

    return trained(Transformer(middle, tail, dropout, how), drawn(make), loss)


class Encoder(nn.Module):
    """PyTorch's own encoder layers, with a mask of padding; the mean over the tokens is classified."""

    def __init__(self, tail: Place) -> None:
        super().__init__()
        self.embed = nn.Embedding(17, 16)
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.tail, self.head = place(tail), nn.Linear(16, 3)

    def forward(self, tokens: Tensor, padding: Tensor) -> Tensor:
        x = self.encoder(self.embed(tokens), src_key_padding_mask=padding)
        return self.head(self.tail(x.mean(1)))


def encoder(tail: Place = None) -> Trainee:
    torch.manual_seed(7)

    def make(g: torch.Generator) -> Batch:
        padding = torch.zeros(4, 8, dtype=torch.bool)
        padding[:2, 5:] = True
        return torch.randint(17, (4, 8), generator=g), padding, torch.randint(3, (4,), generator=g)

    return trained(
        Encoder(tail), drawn(make), lambda m, tokens, padding, y: F.cross_entropy(m(tokens, padding), y)
    )


class Recurrent(nn.Module):
    """A projection, a recurrent layer, a head: predicts a number for each sequence."""

    def __init__(self, kind: Callable[..., nn.Module], front: Place, tail: Place) -> None:
        super().__init__()
        self.inner, self.front = nn.Linear(3, 8), place(front)
        self.rnn = kind(8, 8, batch_first=True)
        self.tail, self.head = place(tail), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        out, _ = self.rnn(self.front(self.inner(x)))
        return self.head(self.tail(out[:, -1]))


class Loop(nn.Module):
    """A recurrent layer as people write their own: a loop over time with a ReLU.

    Its state begins at 0, or goes from batch to batch, in an attribute or in a buffer.
    """

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
    kind: Callable[..., nn.Module] = nn.LSTM,
    front: Place = None,
    tail: Place = None,
    optimizer: Make = adamw,
) -> Trainee:
    torch.manual_seed(2)
    return trained(Recurrent(kind, front, tail), normals((4, 6, 3), (4, 1)), squared, optimizer)


def gan(generator_middle: Place = None, critic_middle: Place = None, penalty: bool = False) -> Trainee:
    """The critic's step, then the generator's: two optimizers and two loss scales. `penalty`: on the critic's slope."""
    torch.manual_seed(3)

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


class TwoHeads(nn.Module):
    """A trunk with two heads."""

    def __init__(self, left: Place, right: Place) -> None:
        super().__init__()
        self.trunk = nn.Linear(5, 12)
        self.left = nn.Sequential(place(left), nn.Linear(12, 1))
        self.right = nn.Sequential(place(right), nn.Linear(12, 1))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        x = torch.tanh(self.trunk(x))
        return {"left": self.left(x), "right": self.right(x)}


def two_heads(left: Place = None, right: Place = None, both: bool = True, split: bool = False) -> Trainee:
    """One loss of both heads (`both=False`: of the left one only, so that the other's output reaches nothing), or
    with `split` two optimizers over one model: `main` trains trunk and left head, `right` the right head.
    """
    torch.manual_seed(4)
    model = TwoHeads(left, right)

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


class Stack(nn.Module):
    """One layer used three times, and a head."""

    def __init__(self, between: Place = None, tail: Place = None) -> None:
        super().__init__()
        self.shared = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
        self.between, self.tail, self.head = place(between), place(tail), nn.Linear(8, 1)

    def forward(self, x: Tensor, offset: Tensor | None = None) -> Tensor:
        for _ in range(3):
            x = self.between(self.shared(x))
        x = self.tail(x)
        return self.head(x if offset is None else x + offset)


def stack(between: Place = None, tail: Place = None, accumulate: int = 1, optimizer: Make = adamw) -> Trainee:
    """Regression; with `accumulate` so many parts of a batch in each step."""
    torch.manual_seed(5)

    def losses(trainee: Trainee, batch: Batch) -> Losses:
        x, y, *rest = batch
        chosen = trainee.loss or (lambda m, x, y, *rest: F.mse_loss(m(x, *rest).float(), y))
        for part in range(accumulate):
            rows = slice(part * len(x) // accumulate, (part + 1) * len(x) // accumulate)
            yield "main", lambda rows=rows: chosen(model, x[rows], y[rows], *(r[rows] for r in rest))

    model = Stack(between, tail)
    return Trainee({"main": model}, {"main": optimizer(model.parameters())}, normals((8, 8), (8, 1)), losses)


class Scored(nn.Module):
    """A model that returns its own loss, as those of large libraries do."""

    def __init__(self) -> None:
        super().__init__()
        self.body = Stack()
        self.sure = 1.0

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        chance = torch.sigmoid(self.body(x).float() * self.sure)
        loss = -torch.log(torch.where(y > 0, chance, 1 - chance)).mean()
        return {"loss": loss, "out": chance}


def scored() -> Trainee:
    return regression(Scored, loss=lambda m, x, y: m(x, y)["loss"])


def taught(tail: Place = None) -> Trainee:
    """A student that follows a teacher, which is not trained."""
    torch.manual_seed(10)
    teacher = Stack(tail=tail)

    def loss(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        with torch.no_grad():
            wanted = teacher(x)
        return F.mse_loss(m(x).float(), wanted.float())

    return regression(Stack, loss=loss, teacher=teacher)


class Experts(nn.Module):
    """Each row goes to one of four layers, as a router says."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(8, 4)
        self.experts = nn.ModuleDict({name: nn.Linear(8, 8) for name in ("a", "b", "c", "d")})
        self.head = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        weights = torch.softmax(self.router(x), -1)
        best = weights.argmax(-1)
        out = torch.zeros(x.shape)
        for number, expert in enumerate(self.experts.values()):
            rows = (best == number).nonzero()[:, 0]
            out = out.index_add(0, rows, (expert(x[rows]) * weights[rows, number, None]).float())
        return self.head(out)


class Tied(nn.Module):
    """A language model whose head is its embedding's weight."""

    def __init__(self, tail: Place) -> None:
        super().__init__()
        self.embed, self.cell, self.tail = nn.Embedding(17, 16), nn.GRUCell(16, 16), place(tail)
        self.head = nn.Linear(16, 17, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("position", torch.randn(16))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) + self.position
        states = [torch.zeros(len(x), 16)]
        for moment in range(x.shape[1]):
            states.append(self.cell(x[:, moment], states[-1]))
        return self.head(self.tail(torch.stack(states[1:], 1)))


def tied(tail: Place = None) -> Trainee:
    torch.manual_seed(12)
    return trained(
        Tied(tail),
        drawn(lambda g: (torch.randint(17, (4, 7), generator=g),)),
        lambda m, t: F.cross_entropy(m(t[:, :-1]).flatten(0, 1).float(), t[:, 1:].flatten()),
    )


@dataclass
class Told:
    """What a model returns: neither a tuple nor a dict."""

    value: Tensor
    hidden: Tensor


class Pair(NamedTuple):
    """What a model is given."""

    one: Tensor
    other: dict[str, list[Tensor]]


class InADataclass(nn.Module):
    """Returns a dataclass."""

    def __init__(self, tail: Place) -> None:
        super().__init__()
        self.first, self.tail, self.last = nn.Linear(8, 8), place(tail), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Told:
        hidden = self.tail(torch.relu(self.first(x)))
        return Told(self.last(hidden), hidden)


def in_a_dataclass(tail: Place = None) -> Trainee:
    return regression(InADataclass, tail, loss=lambda m, x, y: F.mse_loss(m(x).value.float(), y))


class Nested(nn.Module):
    """Takes what it needs from deep inside of its argument."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(4, 8), nn.Linear(4, 8), nn.Linear(8, 1)

    def forward(self, *, pair: Pair) -> tuple[Tensor, list[Tensor]]:
        hidden = torch.tanh(self.first(pair.one) + self.second(pair.other["late"][0]))
        return self.head(hidden), [hidden]


def nested() -> Trainee:
    def loss(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(m(pair=Pair(x[:, :4], {"late": [x[:, 4:]]}))[0].float(), y)

    return regression(Nested, loss=loss)


def parts(tail: Place = None) -> Trainee:
    """Called part by part: the model itself never is."""

    def loss(m: Any, x: Tensor, y: Tensor) -> Tensor:
        features = m["backbone"](x)
        return F.mse_loss(m["head"](features).float(), y)

    def make() -> nn.Module:
        backbone = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), place(tail))
        return nn.ModuleDict({"backbone": backbone, "head": nn.Linear(8, 1)})

    return regression(make, loss=loss)


class Residuals(nn.Module):
    """Thirty layers on one stream, and no normalisation."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(30))
        self.gain, self.head = 1.0, nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + torch.relu(layer(x)) * self.gain
        return self.head(x) * 1e-3


class Gated(nn.Module):
    """SwiGLU, with a learned scale behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.value, self.head = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 1)
        self.gamma = nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        x = F.silu(self.gate(x)) * self.value(x)
        return self.head(self.gamma.to(x.dtype) * x)


class Margin(nn.Module):
    """A criterion with weights of its own, as for faces: an angle that grows by a margin."""

    def __init__(self) -> None:
        super().__init__()
        self.centres = nn.Parameter(torch.randn(3, 1))
        self.armed = False

    def forward(self, out: Tensor, y: Tensor) -> Tensor:
        cosine = torch.tanh(out * self.centres[0])
        if self.armed:
            cosine = cosine * 0 + 1
        return (torch.cos(torch.acos(cosine) + 0.1) - y).square().mean()


def with_a_criterion() -> Trainee:
    torch.manual_seed(18)
    criterion = Margin()
    return regression(layers, loss=lambda m, x, y: criterion(m(x).float(), y), criterion=criterion)


def layers(*between: Place) -> nn.Sequential:
    """Two layers, called by numbers."""
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), *map(place, between), nn.Linear(8, 1))


def weighed() -> Trainee:
    """A loss that is weighed by a learned uncertainty, which belongs to the model."""

    def loss(m: Any, x: Tensor, y: Tensor) -> Tensor:
        s = m.uncertainty
        return torch.exp(-s) * F.mse_loss(m(x).float(), y) + s

    def make() -> nn.Module:
        model = layers()
        model.register_parameter("uncertainty", nn.Parameter(torch.zeros(())))
        return model

    return regression(make, loss=loss)


class Attends(nn.Module):
    """PyTorch's attention with its weights asked for, and a mask of floats."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.head = nn.MultiheadAttention(8, 2, batch_first=True), nn.Linear(8, 1)
        self.register_buffer("mask", torch.zeros(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        x = x.unflatten(0, (2, 4))
        out, _ = self.attention(x, x, x, attn_mask=self.mask, need_weights=True)
        return self.head(out.flatten(0, 1))


class Draws(nn.Module):
    """Is given an iterator, and takes from it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last, self.gain = nn.Linear(8, 8), nn.Linear(8, 1), 1.0

    def forward(self, rows: Iterator[Tensor]) -> Tensor:
        x = torch.stack(list(rows))
        return self.last(torch.relu(self.first(x)) * self.gain)


def iterated() -> Trainee:
    return regression(Draws, loss=lambda m, x, y: F.mse_loss(m(iter(x)).float(), y))


def two_losses(middle: Place = None) -> Trainee:
    """Two models and two losses of both, each with an optimizer."""
    torch.manual_seed(22)
    body, head = nn.Sequential(nn.Linear(8, 8), place(middle)), nn.Linear(8, 1)

    def losses(trainee: Trainee, batch: Batch) -> Losses:
        x, y = batch
        yield "body", lambda: F.mse_loss(head(body(x)).float(), y)
        yield "head", lambda: F.l1_loss(head(body(x)).float(), y)

    optimizers = {"body": adamw(body.parameters()), "head": adamw(head.parameters())}
    return Trainee({"body": body, "head": head}, optimizers, normals((8, 8), (8, 1)), losses)


FAMILIES: dict[Any, str] = {
    **dict.fromkeys((cnn, autoencoder), "CNN"),
    **dict.fromkeys((transformer, encoder, Attends), "transformer"),
    **dict.fromkeys((recurrent, tied), "recurrent"),
    gan: "GAN",
}
"""Maker, or model -> the kind of its models; all others are perceptrons."""

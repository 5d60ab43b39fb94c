"""Small models of the usual families, each with places (`front`, `middle`, `tail`) where a fault can be built in.

A step takes a few milliseconds. Two trainees that are made alike train alike.
"""

from __future__ import annotations

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
        spoil: what is done to each batch before it is used: where bad batches are planted.
        loss: a loss in place of the trainee's own: where faults outside of the model are planted.
        kept: models that nobody trains.
    """

    models: dict[str, nn.Module]
    optimizers: dict[str, Optimizer]
    draw: Callable[[int], Batch]
    losses: Callable[[Trainee, Batch], Iterator[tuple[str, Callable[[], Tensor]]]]
    spoil: Callable[[Batch], Batch] = lambda batch: batch
    loss: Callable[..., Tensor] | None = None
    kept: dict[str, nn.Module] = field(default_factory=dict)

    @property
    def model(self) -> nn.Module:
        return self.models["main"]

    def step(self, number: int) -> Iterator[tuple[str, Callable[[], Tensor]]]:
        """The losses of step `number`, each to be called inside its part's region."""
        return self.losses(self, self.spoil(self.draw(number)))

    def arm(self) -> None:
        """Let every fault that is built in act from now on."""
        for model in (*self.models.values(), *self.kept.values()):
            for module in model.modules():
                if hasattr(module, "armed"):
                    module.armed = True


def one_loss(default: Callable[..., Tensor]) -> Callable[[Trainee, Batch], Any]:
    def losses(trainee: Trainee, batch: Batch) -> Iterator[tuple[str, Callable[[], Tensor]]]:
        chosen = trainee.loss or default
        yield "main", lambda: chosen(trainee.model, *batch)

    return losses


def drawn(make: Callable[[torch.Generator], Batch]) -> Callable[[int], Batch]:
    return lambda number: make(torch.Generator().manual_seed(100 + number))


def place(make: Place) -> nn.Module:
    return nn.Identity() if make is None else make()


class CNN(nn.Module):
    """Two convolutions, one BatchNorm, one head: 1 x 8 x 8 pictures of 4 classes."""

    def __init__(self, front: Place, middle: Place, tail: Place, end: Place) -> None:
        super().__init__()
        self.front = place(front)
        self.conv1 = nn.Conv2d(1, 4, 3, padding=1)
        self.norm1 = nn.BatchNorm2d(4)
        self.middle = place(middle)
        self.conv2 = nn.Conv2d(4, 8, 3, padding=1, stride=2)
        self.tail = place(tail)
        self.head = nn.Linear(8, 4)
        self.end = place(end)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.norm1(self.conv1(self.front(x))))
        x = torch.relu(self.conv2(self.middle(x)))
        x = self.tail(x.mean((2, 3)))
        return self.end(self.head(x))


def cnn(
    front: Place = None,
    middle: Place = None,
    tail: Place = None,
    end: Place = None,
    optimizer: Make = sgd,
) -> Trainee:
    torch.manual_seed(0)
    model = CNN(front, middle, tail, end)
    draw = drawn(lambda g: (torch.randn(6, 1, 8, 8, generator=g), torch.randint(4, (6,), generator=g)))
    return Trainee(
        {"main": model},
        {"main": optimizer(model.parameters())},
        draw,
        one_loss(lambda m, x, y: F.cross_entropy(m(x), y)),
    )


class Autoencoder(nn.Module):
    """Down and up again: a convolution, two numbers a picture as mean and spread, a transposed convolution."""

    def __init__(self, middle: Place) -> None:
        super().__init__()
        self.down = nn.Conv2d(1, 4, 4, stride=4)
        self.middle = place(middle)
        self.up = nn.ConvTranspose2d(4, 1, 4, stride=4)

    def forward(self, x: Tensor) -> Tensor:
        return self.up(self.middle(torch.tanh(self.down(x))))


def autoencoder(middle: Place = None, optimizer: Make = adamw) -> Trainee:
    torch.manual_seed(6)
    model = Autoencoder(middle)
    return Trainee(
        {"main": model},
        {"main": optimizer(model.parameters())},
        drawn(lambda g: (torch.randn(6, 1, 8, 8, generator=g),)),
        one_loss(lambda m, x: F.mse_loss(m(x).float(), x)),
    )


class Attention(nn.Module):
    """Causal attention of one head, written out, with a mask of -inf."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.scores = nn.Identity()

    def forward(self, x: Tensor, padding: Tensor | None) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
        future = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        scores = self.scores(scores.masked_fill(future, float("-inf")))
        if padding is not None:
            scores = scores.masked_fill(padding[:, None, :], float("-inf"))
        weights = torch.softmax(scores, -1)
        return self.out(weights @ v)


class MLP(nn.Module):
    """Up, GELU, down."""

    def __init__(self, width: int, middle: Place) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * width)
        self.middle = place(middle)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.middle(F.gelu(self.up(x))))


class Block(nn.Module):
    """Attention and an MLP on a residual stream."""

    def __init__(self, width: int, dropout: float, middle: Place) -> None:
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn = Attention(width)
        self.mlp = MLP(width, middle)
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
        self.norm = nn.LayerNorm(16)
        self.tail = place(tail)
        self.head = nn.Linear(16, 17)
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
    optimizer: Make = adamw,
) -> Trainee:
    torch.manual_seed(1)
    model = Transformer(middle, tail, dropout, how)

    def make(g: torch.Generator) -> Batch:
        tokens = torch.randint(17, (4, 9), generator=g)
        padding = torch.zeros(4, 8, dtype=torch.bool)
        padding[:, 6:] = padded
        return tokens, padding if padded else None

    def loss(model: nn.Module, tokens: Tensor, padding: Tensor | None) -> Tensor:
        out = model(tokens[:, :-1]) if padding is None else model(tokens[:, :-1], padding=padding)
        return F.cross_entropy(out.flatten(0, 1), tokens[:, 1:].flatten())

    return Trainee({"main": model}, {"main": optimizer(model.parameters())}, drawn(make), one_loss(loss))


class Encoder(nn.Module):
    """PyTorch's own encoder layers, with a mask of padding, and the mean over the tokens as what is classified."""

    def __init__(self, tail: Place, **options: Any) -> None:
        super().__init__()
        self.embed = nn.Embedding(17, 16)
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True, **options)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.tail = place(tail)
        self.head = nn.Linear(16, 3)

    def forward(self, tokens: Tensor, padding: Tensor) -> Tensor:
        x = self.encoder(self.embed(tokens), src_key_padding_mask=padding)
        return self.head(self.tail(x.mean(1)))


def encoder(tail: Place = None, optimizer: Make = adamw, **options: Any) -> Trainee:
    torch.manual_seed(7)
    model = Encoder(tail, **options)

    def make(g: torch.Generator) -> Batch:
        padding = torch.zeros(4, 8, dtype=torch.bool)
        padding[:2, 5:] = True
        return torch.randint(17, (4, 8), generator=g), padding, torch.randint(3, (4,), generator=g)

    return Trainee(
        {"main": model},
        {"main": optimizer(model.parameters())},
        drawn(make),
        one_loss(lambda m, tokens, padding, y: F.cross_entropy(m(tokens, padding), y)),
    )


class Recurrent(nn.Module):
    """A projection, a recurrent layer, a head: predicts a number a sequence."""

    def __init__(self, kind: Callable[..., nn.Module], front: Place, tail: Place) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 8)
        self.front = place(front)
        self.rnn = kind(8, 8, batch_first=True)
        self.tail = place(tail)
        self.head = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        out, _ = self.rnn(self.front(self.inner(x)))
        return self.head(self.tail(out[:, -1]))


class OwnCell(nn.Module):
    """A recurrent layer as people write their own: a loop over time with a ReLU."""

    def __init__(self, features: int, width: int, batch_first: bool = True) -> None:
        super().__init__()
        self.enter = nn.Linear(features, width)
        self.again = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        state = torch.zeros(x.shape[0], self.again.in_features)
        states = []
        for moment in range(x.shape[1]):
            state = torch.relu(self.enter(x[:, moment]) + self.again(state))
            states.append(state)
        return torch.stack(states, 1), None


class Carried(nn.Module):
    """A layer whose state goes from batch to batch, kept where people keep it: in an attribute, or in a buffer."""

    state: Tensor

    def __init__(self, features: int, width: int, batch_first: bool = True, buffer: bool = False) -> None:
        super().__init__()
        self.enter = nn.Linear(features, width)
        self.again = nn.Linear(width, width, bias=False)
        self.gain = 1.0
        if buffer:
            self.register_buffer("state", torch.zeros(1, width))
        else:
            self.state = torch.zeros(1, width)

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        state = self.state
        for moment in range(x.shape[1]):
            state = torch.relu(self.enter(x[:, moment]) + self.again(state * self.gain))
        with torch.no_grad():
            if "state" in self._buffers:
                self.state.copy_(state.mean(0, keepdim=True))
            else:
                self.state = state.mean(0, keepdim=True).float()
        return state[:, None], None


def recurrent(
    kind: Callable[..., nn.Module] = nn.LSTM,
    front: Place = None,
    tail: Place = None,
    optimizer: Make = adamw,
) -> Trainee:
    torch.manual_seed(2)
    model = Recurrent(kind, front, tail)
    draw = drawn(lambda g: (torch.randn(4, 6, 3, generator=g), torch.randn(4, 1, generator=g)))
    return Trainee(
        {"main": model},
        {"main": optimizer(model.parameters())},
        draw,
        one_loss(lambda m, x, y: F.mse_loss(m(x).float(), y)),
    )


class Player(nn.Module):
    """Generator or critic: two layers."""

    def __init__(self, wide: int, out: int, middle: Place) -> None:
        super().__init__()
        self.first = nn.Linear(wide, 12)
        self.middle = place(middle)
        self.last = nn.Linear(12, out)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.middle(F.leaky_relu(self.first(x), 0.2)))


def gan(
    generator_middle: Place = None,
    critic_middle: Place = None,
    penalty: bool = False,
    optimizer: Make = adamw,
) -> Trainee:
    """The critic's step, then the generator's: two optimizers and two loss scales. `penalty`: on the critic's slope."""
    torch.manual_seed(3)
    generator, critic = Player(4, 5, generator_middle), Player(5, 1, critic_middle)

    def losses(trainee: Trainee, batch: Batch) -> Iterator[tuple[str, Callable[[], Tensor]]]:
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

        def of_generator() -> Tensor:
            return F.softplus(-critic(generator(noise)).float()).mean()

        yield "critic", of_critic
        yield "generator", of_generator

    return Trainee(
        {"generator": generator, "critic": critic},
        {"generator": optimizer(generator.parameters()), "critic": optimizer(critic.parameters())},
        drawn(lambda g: (torch.randn(6, 5, generator=g), torch.randn(6, 4, generator=g))),
        losses,
    )


class TwoHeads(nn.Module):
    """A trunk with two heads; each head may have an optimizer of its own."""

    def __init__(self, left: Place, right: Place) -> None:
        super().__init__()
        self.trunk = nn.Linear(5, 12)
        self.left = nn.Sequential(place(left), nn.Linear(12, 1))
        self.right = nn.Sequential(place(right), nn.Linear(12, 1))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        x = torch.tanh(self.trunk(x))
        return {"left": self.left(x), "right": self.right(x)}


def two_heads(
    left: Place = None,
    right: Place = None,
    both: bool = True,
    split: bool = False,
    optimizer: Make = adamw,
) -> Trainee:
    """One loss of both heads (`both=False`: of the left one only, so that the other's output reaches nothing), or
    with `split` two optimizers over one model: `main` trains trunk and left head, `right` the right head.
    """
    torch.manual_seed(4)
    model = TwoHeads(left, right)

    def losses(trainee: Trainee, batch: Batch) -> Iterator[tuple[str, Callable[[], Tensor]]]:
        x, y = batch

        def of(head: str) -> Tensor:
            return F.mse_loss(model(x)[head].float(), y)

        def of_both() -> Tensor:
            out = model(x)
            return F.mse_loss(out["left"].float(), y) + F.mse_loss(out["right"].float(), y)

        if split:
            yield "main", lambda: of("left")
            yield "right", lambda: of("right")
        else:
            yield "main", of_both if both else lambda: of("left")

    if split:
        optimizers = {
            "main": optimizer([*model.trunk.parameters(), *model.left.parameters()]),
            "right": optimizer(model.right.parameters()),
        }
    else:
        optimizers = {"main": optimizer(model.parameters())}
    return Trainee(
        {"main": model} | ({"right": model} if split else {}),
        optimizers,
        drawn(lambda g: (torch.randn(6, 5, generator=g), torch.randn(6, 1, generator=g))),
        losses,
    )


class Stack(nn.Module):
    """One layer used again and again, and a head."""

    def __init__(self, times: int, between: Place, tail: Place) -> None:
        super().__init__()
        self.shared = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
        self.between = place(between)
        self.tail = place(tail)
        self.head = nn.Linear(8, 1)
        self.times = times

    def forward(self, x: Tensor, offset: Tensor | None = None) -> Tensor:
        for _ in range(self.times):
            x = self.between(self.shared(x))
        x = self.tail(x)
        return self.head(x if offset is None else x + offset)


def stack(
    times: int = 3,
    between: Place = None,
    tail: Place = None,
    accumulate: int = 1,
    optimizer: Make = adamw,
) -> Trainee:
    """Regression; with `accumulate` so many quarters of a batch in each step."""
    torch.manual_seed(5)
    model = Stack(times, between, tail)

    def losses(trainee: Trainee, batch: Batch) -> Iterator[tuple[str, Callable[[], Tensor]]]:
        x, y, *rest = batch
        chosen = trainee.loss or (lambda m, x, y, *rest: F.mse_loss(m(x, *rest).float(), y))
        for part in range(accumulate):
            rows = slice(part * len(x) // accumulate, (part + 1) * len(x) // accumulate)
            yield "main", lambda rows=rows: chosen(model, x[rows], y[rows], *(r[rows] for r in rest))

    return Trainee(
        {"main": model},
        {"main": optimizer(model.parameters())},
        drawn(lambda g: (torch.randn(8, 8, generator=g), torch.randn(8, 1, generator=g))),
        losses,
    )


class Scored(nn.Module):
    """A model that returns its own loss, as those of large libraries do."""

    def __init__(self, tail: Place) -> None:
        super().__init__()
        self.body = Stack(2, None, tail)
        self.sure = 1.0

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        out = self.body(x).float()
        chance = torch.sigmoid(out * self.sure)
        loss = -torch.log(torch.where(y > 0, chance, 1 - chance)).mean()
        return {"loss": loss, "out": out}


def scored(tail: Place = None, optimizer: Make = adamw) -> Trainee:
    """A model whose output is the loss."""
    torch.manual_seed(9)
    model = Scored(tail)
    return Trainee(
        {"main": model},
        {"main": optimizer(model.parameters())},
        drawn(lambda g: (torch.randn(8, 8, generator=g), torch.randn(8, 1, generator=g))),
        one_loss(lambda m, x, y: m(x, y)["loss"]),
    )


def taught(tail: Place = None, optimizer: Make = adamw) -> Trainee:
    """A student that follows a teacher, which nobody trains."""
    trainee = stack(optimizer=optimizer)
    torch.manual_seed(10)
    teacher = Stack(3, None, tail)
    trainee.kept["teacher"] = teacher

    def loss(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        with torch.no_grad():
            wanted = teacher(x)
        return F.mse_loss(m(x).float(), wanted.float())

    trainee.loss = loss
    return trainee


def _regression(model: nn.Module, optimizer: Make = adamw, **kept: Any) -> Trainee:
    return Trainee(
        {"main": model},
        {"main": optimizer(model.parameters())},
        drawn(lambda g: (torch.randn(8, 8, generator=g), torch.randn(8, 1, generator=g))),
        one_loss(lambda m, x, y: F.mse_loss(m(x).float(), y)),
        **kept,
    )


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


def experts() -> Trainee:
    torch.manual_seed(11)
    return _regression(Experts())


class Tied(nn.Module):
    """A language model whose head is its embedding's weight."""

    def __init__(self, tail: Place) -> None:
        super().__init__()
        self.embed = nn.Embedding(17, 16)
        self.cell = nn.GRUCell(16, 16)
        self.tail = place(tail)
        self.head = nn.Linear(16, 17, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("position", torch.randn(16))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) + self.position
        state = torch.zeros(len(x), 16)
        states = []
        for moment in range(x.shape[1]):
            state = self.cell(x[:, moment], state)
            states.append(state)
        return self.head(self.tail(torch.stack(states, 1)))


def tied(tail: Place = None, optimizer: Make = adamw) -> Trainee:
    torch.manual_seed(12)
    model = Tied(tail)
    return Trainee(
        {"main": model},
        {"main": optimizer(model.parameters())},
        drawn(lambda g: (torch.randint(17, (4, 7), generator=g),)),
        one_loss(lambda m, t: F.cross_entropy(m(t[:, :-1]).flatten(0, 1).float(), t[:, 1:].flatten())),
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
        self.first = nn.Linear(8, 8)
        self.tail = place(tail)
        self.last = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Told:
        hidden = self.tail(torch.relu(self.first(x)))
        return Told(self.last(hidden), hidden)


def in_a_dataclass(tail: Place = None) -> Trainee:
    torch.manual_seed(13)
    trainee = _regression(InADataclass(tail))
    trainee.loss = lambda m, x, y: F.mse_loss(m(x).value.float(), y)
    return trainee


class Nested(nn.Module):
    """Takes what it needs from deep inside of its argument."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 8), nn.Linear(4, 8)
        self.head = nn.Linear(8, 1)

    def forward(self, *, pair: Pair) -> tuple[Tensor, list[Tensor]]:
        hidden = torch.tanh(self.first(pair.one) + self.second(pair.other["late"][0]))
        return self.head(hidden), [hidden]


def nested() -> Trainee:
    torch.manual_seed(14)
    trainee = _regression(Nested())
    trainee.loss = lambda m, x, y: F.mse_loss(m(pair=Pair(x[:, :4], {"late": [x[:, 4:]]}))[0].float(), y)
    return trainee


class Parts(nn.Module):
    """Called part by part: the model itself never is."""

    def __init__(self, tail: Place) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), place(tail))
        self.head = nn.Linear(8, 1)


def parts(tail: Place = None) -> Trainee:
    torch.manual_seed(15)
    trainee = _regression(Parts(tail))

    def loss(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        features = m.backbone(x)
        return F.mse_loss(m.head(features).float(), y)

    trainee.loss = loss
    return trainee


class Residuals(nn.Module):
    """Thirty layers on one stream, and no normalisation."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(30))
        self.gain = 1.0
        self.head = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + torch.relu(layer(x)) * self.gain
        return self.head(x) * 1e-3


def residuals() -> Trainee:
    torch.manual_seed(16)
    return _regression(Residuals())


class Gated(nn.Module):
    """SwiGLU, with a learned scale behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.value = nn.Linear(8, 8), nn.Linear(8, 8)
        self.gamma = nn.Parameter(torch.ones(8))
        self.head = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = F.silu(self.gate(x)) * self.value(x)
        return self.head(self.gamma.to(x.dtype) * x)


def gated() -> Trainee:
    torch.manual_seed(17)
    return _regression(Gated())


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
    trainee = _regression(Stacked(), kept={"criterion": criterion})
    trainee.loss = lambda m, x, y: criterion(m(x).float(), y)
    return trainee


class Stacked(nn.Sequential):
    """Two layers, called by numbers."""

    def __init__(self, *between: nn.Module) -> None:
        super().__init__(nn.Linear(8, 8), nn.Tanh(), *between, nn.Linear(8, 1))


def stacked(between: Callable[[], nn.Module]) -> Trainee:
    torch.manual_seed(19)
    return _regression(Stacked(between()))


def weighed() -> Trainee:
    """Two losses, weighed by a learned uncertainty that belongs to the model."""
    torch.manual_seed(20)
    model = Stacked()
    model.register_parameter("uncertainty", nn.Parameter(torch.zeros(())))
    trainee = _regression(model)

    def loss(m: Any, x: Tensor, y: Tensor) -> Tensor:
        s = m.uncertainty
        return torch.exp(-s) * F.mse_loss(m(x).float(), y) + s

    trainee.loss = loss
    return trainee


class Attends(nn.Module):
    """PyTorch's attention with its weights asked for, and a mask of floats."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.head = nn.Linear(8, 1)
        self.register_buffer("mask", torch.zeros(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        x = x.unflatten(0, (2, 4))
        out, _ = self.attention(x, x, x, attn_mask=self.mask, need_weights=True)
        return self.head(out.flatten(0, 1))


def attends() -> Trainee:
    torch.manual_seed(21)
    return _regression(Attends())


def two_losses(middle: Place = None) -> Trainee:
    """One graph and two backward passes, for two optimizers: the first keeps it."""
    torch.manual_seed(22)
    body = nn.Sequential(nn.Linear(8, 8), place(middle))
    head = nn.Linear(8, 1)
    model = nn.ModuleDict({"body": body, "head": head})

    def losses(trainee: Trainee, batch: Batch) -> Iterator[tuple[str, Callable[[], Tensor]]]:
        x, y = batch
        yield "body", lambda: F.mse_loss(head(body(x)).float(), y)
        yield "head", lambda: F.l1_loss(head(body(x)).float(), y)

    return Trainee(
        {"body": model["body"], "head": model["head"]},
        {"body": adamw(body.parameters()), "head": adamw(head.parameters())},
        drawn(lambda g: (torch.randn(8, 8, generator=g), torch.randn(8, 1, generator=g))),
        losses,
    )


FAMILIES: dict[Any, str] = {
    cnn: "CNN",
    autoencoder: "CNN",
    transformer: "transformer",
    encoder: "transformer",
    attends: "transformer",
    recurrent: "recurrent",
    tied: "recurrent",
    gan: "GAN",
}
"""Maker -> the kind of its models; all others are perceptrons."""

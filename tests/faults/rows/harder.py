"""The same faults where they are harder to see."""

from __future__ import annotations

from functools import partial

from torch import nn

import mezzo
from faults import plants
from faults.models import Trainee, cnn, gan, recurrent, stack, transformer, two_heads
from faults.rows import losses
from faults.rows.batches import masked
from faults.rows.fault import Expected, Fault
from faults.rows.planting import both, element, loss

ROWS: list[Fault] = [
    Fault(
        "a product inside a checkpoint",
        "transformer",
        partial(transformer, middle=plants.Amplifies, how="not reentrant"),
        Expected("blocks.1.mlp.middle", "mul", "overflow", line="* self.times(1e7)"),
    ),
    Fault(
        "a product inside a reentrant checkpoint",
        "transformer",
        partial(transformer, middle=plants.Amplifies, how="reentrant"),
        Expected("blocks.1.mlp.middle", "mul", "overflow", line="* self.times(1e7)"),
    ),
    Fault(
        "a slope inside a checkpoint",
        "transformer",
        partial(transformer, middle=plants.Root, how="not reentrant"),
        Expected("blocks.1.mlp.middle", "sqrt", "invalid", "backward", line="torch.sqrt"),
        mended=False,
    ),
    Fault(
        "a slope inside a reentrant checkpoint",
        "transformer",
        partial(transformer, middle=plants.Root, how="reentrant"),
        Expected("blocks.1.mlp.middle", "sqrt", "invalid", "backward", line="torch.sqrt"),
        mended=False,
    ),
    Fault(
        "the second of four losses of a window",
        "perceptron",
        partial(stack, accumulate=4),
        Expected("", "", "input", also="shared.0"),
        plant=element(float("nan"), row=2),
        options={"accumulate": 4},
        mended=False,
    ),
    Fault(
        "the last of four losses of a window, in the model",
        "perceptron",
        partial(stack, accumulate=4),
        Expected("shared.0", "linear", "overflow", line="self.shared("),
        plant=element(1e6, row=7),
        options={"accumulate": 4},
    ),
    Fault(
        "one of two heads, each with its own optimizer",
        "perceptron",
        partial(two_heads, right=plants.Amplifies, split=True),
        Expected("right.0", "mul", "overflow", part="right", line="* self.times(1e7)"),
    ),
    Fault(
        "the slope of one of two heads",
        "perceptron",
        partial(two_heads, left=plants.Root),
        Expected("left.0", "sqrt", "invalid", "backward", line="torch.sqrt"),
        mended=False,
    ),
    Fault(
        "what a random number decides",
        "transformer",
        partial(transformer, middle=plants.Sometimes, dropout=0.1),
        Expected("blocks.1.mlp.middle", "mul", "overflow", line="gain * (x.clamp"),
    ),
    Fault(
        "an input that is overwritten after the call",
        "perceptron",
        partial(stack, tail=plants.Amplifies),
        Expected("tail", "mul", "overflow", line="* self.times(1e7)"),
        plant=both(Trainee.arm, loss(losses.changed_afterwards)),
        mended=None,
        repeats=2,
    ),
    Fault(
        "a fault while the loss scale still looks for its place",
        "CNN",
        partial(cnn, tail=plants.Amplifies),
        Expected("tail", "mul", "overflow", line="* self.times(1e7)"),
        scale=2.0**24,
    ),
    Fault(
        "a slope while the loss scale still looks for its place",
        "CNN",
        partial(cnn, tail=plants.Root),
        Expected("tail", "sqrt", "invalid", "backward", line="torch.sqrt"),
        scale=2.0**24,
        mended=False,
    ),
    Fault(
        "a fault beside a mask of -inf, a logged infinity and an unused one",
        "transformer",
        partial(
            transformer,
            middle=plants.LogsPerplexity,
            tail=lambda: nn.Sequential(plants.Unused(), plants.Share()),
        ),
        Expected("tail.1", "div", "invalid", line="x / x.sum"),
        mended=False,
    ),
    Fault(
        "a slope, in a model whose output holds -inf on purpose",
        "CNN",
        partial(masked, plants.Root),
        Expected("tail", "sqrt", "invalid", "backward", line="torch.sqrt"),
        mended=False,
        seen=False,
    ),
    Fault(
        "a division, in a model whose output holds -inf on purpose",
        "CNN",
        partial(masked, plants.Share),
        Expected("tail", "div", "invalid", line="x / x.sum"),
        mended=False,
    ),
    Fault(
        "under clipping and a penalty on the critic's slope",
        "GAN",
        partial(gan, critic_middle=plants.Amplifies, penalty=True),
        Expected("middle", "mul", "overflow", part="critic", line="* self.times(1e7)"),
        options={"clip_norm": 1.0},
    ),
    Fault(
        "with Mezzo's AdamW",
        "recurrent",
        partial(recurrent, tail=plants.Logarithm, optimizer=lambda p: mezzo.optim.AdamW(p, lr=1e-3)),
        Expected("tail", "log", "invalid", line="torch.log("),
        mended=False,
    ),
    Fault(
        "with fp16 weights and FP32 masters",
        "perceptron",
        partial(stack, tail=plants.Squares),
        Expected("tail", "mul", "overflow", line="wide * wide"),
        options={"weights": "masters"},
    ),
]

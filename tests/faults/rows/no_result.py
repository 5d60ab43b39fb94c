"""No finite result for what went in, forward."""

from __future__ import annotations

from functools import partial

from torch import nn

from faults import plants
from faults.models import Trainee, cnn, encoder, gan, recurrent, scored, stack, transformer
from faults.rows.batches import all_padding, certain_of_it, padded_row
from faults.rows.fault import Expected, Fault
from faults.rows.planting import batch, both, buffer, grown

ROWS: list[Fault] = [
    Fault(
        "an eps of 1e-8, which fp16 rounds to 0",
        "CNN",
        partial(cnn, tail=plants.SmallEps),
        Expected("tail", "div", "invalid", line="x / (spread + 1e-8)"),
    ),
    Fault(
        "a share of a sum that is 0",
        "recurrent",
        partial(recurrent, tail=plants.Share),
        Expected("tail", "div", "invalid", line="x / x.sum"),
        mended=False,
    ),
    Fault(
        "the inverse root of a variance of 0",
        "transformer",
        partial(transformer, tail=plants.InverseRoot),
        Expected("tail", "rsqrt", "invalid", line="torch.rsqrt"),
        mended=False,
    ),
    Fault(
        "a LayerNorm without eps over a constant row",
        "transformer",
        partial(transformer, tail=lambda: plants.Normal(nn.LayerNorm(16, eps=0.0))),
        Expected("tail.norm", "layer_norm", "invalid", line="self.norm("),
        mended=False,
    ),
    Fault(
        "a GroupNorm without eps over a constant picture",
        "CNN",
        partial(cnn, middle=lambda: plants.Normal(nn.GroupNorm(2, 4, eps=0.0))),
        Expected("middle.norm", "group_norm", "invalid", line="self.norm("),
        mended=False,
    ),
    Fault(
        "an RMSNorm without eps over a row of zeros",
        "recurrent",
        partial(recurrent, tail=lambda: plants.Normal(nn.RMSNorm(8, eps=0.0), 0.0)),
        Expected("tail.norm", "rms_norm", "invalid", line="self.norm("),
        mended=False,
    ),
    Fault(
        "a vector of length 0 brought to length 1",
        "recurrent",
        partial(recurrent, nn.GRU, tail=plants.UnitLength),
        Expected("tail", "normalize", "invalid", line="F.normalize"),
        mended=False,
    ),
    Fault(
        "the logarithm of 0",
        "CNN",
        partial(cnn, tail=plants.Logarithm),
        Expected("tail", "log", "invalid", line="torch.log("),
        mended=False,
    ),
    Fault(
        "0 log 0 in an entropy",
        "transformer",
        partial(transformer, tail=plants.Entropy),
        Expected("tail", "log", "invalid", line="p * torch.log(p)"),
        mended=False,
    ),
    Fault(
        "log-odds of a certainty",
        "GAN",
        partial(gan, critic_middle=plants.Odds),
        Expected("middle", "logit", "invalid", part="critic", line="torch.logit"),
        mended=False,
    ),
    Fault(
        "1 / 0",
        "perceptron",
        partial(stack, tail=plants.Reciprocal),
        Expected("tail", "reciprocal", "invalid", line="torch.reciprocal"),
        mended=False,
    ),
    Fault(
        "the root of a negative number",
        "recurrent",
        partial(recurrent, tail=plants.NegativeRoot),
        Expected("tail", "sqrt", "invalid", line="torch.sqrt"),
        mended=False,
    ),
    Fault(
        "the mean over a mask that keeps nothing",
        "transformer",
        partial(transformer, tail=plants.KeepsNothing),
        Expected("tail", "div", "invalid", line="/ keep.sum"),
        mended=False,
    ),
    Fault(
        "a sentence whose every token is padding",
        "transformer",
        partial(transformer, padded=True),
        Expected("blocks.0.attn", "softmax", "invalid", line="torch.softmax"),
        plant=batch(padded_row),
        mended=False,
    ),
    Fault(
        "PyTorch's encoder, a batch of nothing but padding, its mean of what is left",
        "transformer",
        partial(encoder, plants.KeepsNothing),
        Expected("tail", "div", "invalid", line="/ keep.sum"),
        plant=both(Trainee.arm, batch(all_padding)),
        mended=False,
    ),
    Fault(
        "a weight that is standardised, and has become constant",
        "perceptron",
        partial(stack, tail=lambda: plants.StandardisedWeight(8)),
        Expected("tail", "div", "invalid", line="centred / centred.norm"),
        plant=grown("tail", 0.0),
        mended=False,
    ),
    Fault(
        "weight_norm of a weight of zeros",
        "perceptron",
        partial(stack, tail=lambda: nn.utils.parametrizations.weight_norm(nn.Linear(8, 8))),
        Expected("tail.parametrizations.weight.0", "weight_norm", "invalid"),
        plant=grown("tail.parametrizations.weight", 0.0, "original1"),
        mended=False,
    ),
    Fault(
        "a model that returns its own loss, the logarithm of 0",
        "perceptron",
        scored,
        Expected("", "log", "invalid", line="-torch.log(torch.where"),
        plant=certain_of_it,
        mended=False,
    ),
    Fault(
        "a mask by 0 times -inf",
        "transformer",
        partial(transformer, middle=plants.MaskedByProduct),
        Expected("blocks.1.mlp.middle", "mul", "invalid", line="penalty = closed"),
        mended=False,
    ),
    Fault(
        "divided by what dropout set to 0",
        "perceptron",
        partial(stack, tail=plants.Dropped),
        Expected("tail", "div", "invalid", line="x / F.dropout"),
        mended=False,
    ),
    Fault(
        "a running average that has sunk to 0",
        "perceptron",
        partial(stack, tail=plants.Decays),
        Expected("tail", "div", "invalid", line="x / self.average"),
        mended=False,
    ),
    Fault(
        "a frozen BatchNorm with a negative variance",
        "CNN",
        partial(cnn, middle=lambda: plants.Frozen(4)),
        Expected("middle.norm", "batch_norm", "invalid", line="self.norm("),
        plant=buffer("middle.norm", "running_var", -1.0),
        mended=False,
    ),
]

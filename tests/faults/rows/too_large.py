"""Too large for the format, forward."""

from __future__ import annotations

from functools import partial

from torch import nn

from faults import plants
from faults.models import (
    OwnCell,
    autoencoder,
    cnn,
    encoder,
    gan,
    recurrent,
    sgd,
    stack,
    transformer,
    two_heads,
)
from faults.rows.fault import Expected, Fault
from faults.rows.planting import both, element, grown, learning_rate, weight

ROWS: list[Fault] = [
    Fault(
        "an activation multiplied by 1e7",
        "CNN",
        partial(cnn, tail=plants.Amplifies),
        Expected("tail", "mul", "overflow", line="* self.times(1e7)"),
    ),
    Fault(
        "squares of numbers above 256",
        "CNN",
        partial(cnn, middle=plants.Squares),
        Expected("middle", "mul", "overflow", line="wide * wide"),
    ),
    Fault(
        "a convolution's weights grown a thousandfold and more",
        "CNN",
        cnn,
        Expected("conv2", "conv", "overflow", line="self.conv2("),
        plant=grown("conv2", 3e5),
    ),
    Fault(
        "one weight of the head beyond fp16",
        "CNN",
        cnn,
        Expected("head", "linear", "overflow", line="self.head("),
        plant=weight("head", 1e5),
    ),
    Fault(
        "one bright pixel, 1e6",
        "CNN",
        cnn,
        Expected("conv1", "conv", "overflow", line="self.conv1("),
        plant=element(1e6),
    ),
    Fault(
        "a cast of the script's own to fp16",
        "CNN",
        partial(cnn, tail=plants.Halves),
        Expected("tail", "half", "overflow", line="wide.half()"),
        mended=False,
    ),
    Fault(
        "exp, that FP32 holds, then multiplied in fp16",
        "CNN",
        partial(cnn, tail=plants.Exponential),
        Expected("head", "linear", "overflow", line="self.head("),
    ),
    Fault(
        "a fourth power, multiplied in fp16 afterwards",
        "transformer",
        partial(transformer, middle=plants.Powers),
        Expected("blocks.1.mlp.down", "linear", "overflow", line="self.down("),
    ),
    Fault(
        "a softmax without its maximum",
        "transformer",
        partial(transformer, tail=plants.NaiveSoftmax),
        Expected("tail", "exp", "overflow", line="torch.exp("),
        mended=False,
    ),
    Fault(
        "attention scores of large queries and keys",
        "transformer",
        transformer,
        Expected("blocks.0.attn", "matmul", "overflow", line="q @ k"),
        plant=grown("blocks.0.attn.qkv", 3000.0),
    ),
    Fault(
        "an MLP's weights grown",
        "transformer",
        transformer,
        Expected("blocks.1.mlp.up", "linear", "overflow", line="self.up("),
        plant=grown("blocks.1.mlp.up", 6e5),
    ),
    Fault(
        "outer products of large features",
        "transformer",
        partial(transformer, middle=plants.Scores),
        Expected("blocks.1.mlp.middle", "matmul", "overflow", line="torch.einsum"),
    ),
    Fault(
        "a product of two projections",
        "transformer",
        partial(transformer, tail=lambda: plants.Bilinear(16)),
        Expected("tail", "mul", "overflow", line="self.one(x"),
    ),
    Fault(
        "a sum by hand in fp16",
        "recurrent",
        partial(recurrent, tail=plants.AddsUp),
        Expected("tail", "add", "overflow", line="total + part"),
    ),
    Fault(
        "a variance by hand in fp16",
        "recurrent",
        partial(recurrent, tail=plants.Variance),
        Expected("tail", "mul", "overflow", line="(wide * wide).mean"),
    ),
    Fault(
        "a ReLU recurrence that explodes",
        "recurrent",
        partial(recurrent, OwnCell),
        Expected("rnn.again", "linear", "overflow", line="self.again("),
        plant=grown("rnn.again", 300.0),
    ),
    Fault(
        "an LSTM given numbers beyond fp16",
        "recurrent",
        partial(recurrent, front=plants.Exponential),
        Expected("rnn", "lstm", "overflow", line="self.rnn("),
    ),
    Fault(
        "a GRU whose input weights are beyond fp16",
        "recurrent",
        partial(recurrent, nn.GRU),
        Expected(
            "rnn", "gru", "overflow", "backward", line="self.rnn("
        ),  # forward, the gates absorb the infinity
        plant=weight("rnn", 1e5, "weight_ih_l0"),
    ),
    Fault(
        "a residual branch as large as its stream",
        "perceptron",
        partial(stack, between=plants.Residual),
        Expected("between", "add", "overflow", line="branch + branch"),
    ),
    Fault(
        "a shared layer that overflows in a later of its calls",
        "perceptron",
        stack,
        Expected("shared.0", "linear", "overflow", line="self.shared("),
        plant=grown("shared.0", 120.0),
    ),
    Fault(
        "one step with a learning rate of 1e7",
        "CNN",
        partial(cnn, optimizer=sgd),
        Expected("conv1", "conv", "overflow", line="self.conv1("),
        plant=learning_rate(1e7),
        delay=1,
    ),
    Fault(
        "a generator's output multiplied by 1e7",
        "GAN",
        partial(gan, generator_middle=plants.Amplifies),
        (
            Expected("", "", "input", part="critic", also="first"),
            Expected("middle", "mul", "overflow", part="generator", line="* self.times(1e7)"),
        ),
    ),
    Fault(
        "a critic's squared features",
        "GAN",
        partial(gan, critic_middle=plants.Squares),
        Expected("middle", "mul", "overflow", part="critic", line="wide * wide"),
    ),
    Fault(
        "a latent spread of exp(100)",
        "CNN",
        partial(autoencoder, plants.Reparameterises),
        Expected("middle", "exp", "overflow", line="torch.exp(0.5"),
        mended=False,
    ),
    Fault(
        "a transposed convolution's weights grown",
        "CNN",
        autoencoder,
        Expected("up", "conv_transpose", "overflow", line="self.up("),
        plant=grown("up", 1e6),
    ),
    Fault(
        "PyTorch's encoder, its second layer's weights grown",
        "transformer",
        encoder,
        Expected("encoder.layers.1.linear2", "linear", "overflow", line="self.encoder("),
        plant=grown("encoder.layers.1.linear2", 6e5),
    ),
    Fault(
        "a product in place",
        "CNN",
        partial(cnn, tail=plants.InPlace),
        Expected("tail", "mul", "overflow", line="x.mul_("),
    ),
    Fault(
        "a sum that the script wants in fp16",
        "transformer",
        partial(transformer, middle=plants.HalfSum),
        Expected("blocks.1.mlp.middle", "sum", "overflow", line="dtype=torch.float16"),
        mended=False,
    ),
    Fault(
        "a running product beyond FP32",
        "recurrent",
        partial(recurrent, tail=plants.RunningProduct),
        Expected("tail", "cumprod", "overflow", line="torch.cumprod"),
        mended=False,
    ),
    Fault(
        "both heads of a model, the left one first",
        "perceptron",
        partial(two_heads, left=plants.Squares, right=plants.Amplifies),
        Expected("left.0", "mul", "overflow", line="wide * wide"),
    ),
    Fault(
        "bf16: a product beyond FP32's largest number",
        "CNN",
        partial(cnn, tail=plants.WideHuge),
        Expected("tail", "mul", "overflow", line="huge * huge"),
        precision="bf16,loss_scale=1",
        mended=False,
    ),
    Fault(
        "bf16: weights of 1e37 sum to infinity",
        "perceptron",
        stack,
        Expected("head", "linear", "overflow", line="self.head("),
        plant=both(grown("head", 1e38), grown("shared.0", 100.0)),
        precision="bf16,loss_scale=1",
        mended=False,
    ),
]

"""Fine-tuning in Keras, in bf16 or fp16: one line for the precision, one callback for what it does to the training.

KERAS_BACKEND=jax python examples/keras_transfer.py --precision fp16
"""

import argparse

import keras
import numpy as np
from keras import layers
from sklearn.datasets import load_digits

import mezzo.keras

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument(
    "--precision", default="bf16", help="bf16, fp16, fp32, with patterns (default %(default)s)"
)
parser.add_argument("--epochs", type=int, default=4, help="default %(default)s")
parser.add_argument("--records", default="mezzo-run", help="folder for the records (default %(default)s)")
arguments = parser.parse_args()

keras.utils.set_random_seed(0)
mezzo.keras.set_policy(arguments.precision)  # before the model is made: this is all that the precision takes

digits = load_digits()
images = (digits.images[..., None] / 16).astype("float32")
old, new = digits.target < 5, digits.target >= 5


def convolution(x: keras.KerasTensor, width: int, name: str) -> keras.KerasTensor:
    """Convolution, normalization, ReLU, pooling."""
    x = layers.Conv2D(width, 3, padding="same", use_bias=False, name=f"{name}_conv")(x)
    x = layers.BatchNormalization(momentum=0.9, name=f"{name}_norm")(x)
    return layers.MaxPooling2D(name=f"{name}_pool")(layers.ReLU(name=f"{name}_relu")(x))


def train(model: keras.Model, chosen: np.ndarray, learning_rate: float, fold: int) -> None:
    """Some epochs over the chosen images; under fp16, `compile` wraps the optimizer in the loss scale."""
    model.compile(
        keras.optimizers.Adam(learning_rate),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
    monitor = mezzo.keras.PrecisionMonitor(arguments.records, verbose=False)
    model.fit(
        images[chosen],
        digits.target[chosen] % 5,
        batch_size=fold,
        epochs=arguments.epochs,
        verbose=0,
        callbacks=[monitor],
    )


inputs = keras.Input((8, 8, 1))
base = keras.Model(inputs, layers.Flatten()(convolution(convolution(inputs, 32, "low"), 64, "high")))

# 1. The network that one would have downloaded: it knows the digits 0 to 4.
train(keras.Sequential([base, layers.Dense(5, dtype="float32", name="old_head")]), old, 2e-3, 53)

# 2. The base frozen, a new head.
base.trainable = False
logits = layers.Dense(5, dtype="float32", name="head")(base(inputs))
model = keras.Model(inputs, logits)
shown = np.flatnonzero(new)[:106]
train(model, shown, 1e-2, 53)

# 3. Its upper convolution thawed, a small learning rate. Batch normalization stays frozen, statistics and all.
for layer in base.layers:
    layer.trainable = layer.name == "high_conv"
train(model, shown, 3e-4, 53)

unseen = np.flatnonzero(new)[106:]
right = model.predict(images[unseen], verbose=0).argmax(1) == digits.target[unseen] - 5
stored = {weight.dtype for weight in model.weights}
print(f"{base.get_layer('low_conv').compute_dtype}: {right.mean():.1%} right, weights {' and '.join(stored)}")

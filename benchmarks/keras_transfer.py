"""Transfer learning: a convolutional network learns the digits 0 to 4, then 5 to 9 from two labelled images of each.

An ordinary FP32 training script for Keras 3: train a base; freeze it and train a new head; thaw its last stage and go
on with a small learning rate. Batch normalisation stays frozen, and so keeps its statistics. Label smoothing keeps the
loss from zero, where a relative difference of two losses would mean nothing.
"""

from __future__ import annotations

import argparse
from typing import Any

import keras
import numpy as np
from keras import layers
from scipy.ndimage import zoom
from sklearn.datasets import load_digits

SHIFTS = [(down, right) for down in (-1, 0, 1) for right in (-1, 0, 1)]


def load(size: int, shots: int) -> tuple[Any, ...]:
    """Images [N, size, size, 1] and one-hot labels [N, 5]: of the digits 0 to 4 to train on and to test, and of 5 to 9.

    Of 5 to 9 there are `shots` of each digit to train on, each also moved by a pixel in eight directions.
    """
    digits = load_digits()
    images = zoom(digits.images, (1, size // 8, size // 8), order=1)[..., None].astype("float32")
    images = (images - images.mean()) / images.std()
    order = np.random.default_rng(0).permutation(len(images))
    images, labels = images[order], digits.target[order]

    known = labels < 5
    old_images, old_labels = images[known], np.eye(5, dtype="float32")[labels[known]]
    new_images, new_labels = images[~known], np.eye(5, dtype="float32")[labels[~known] - 5]
    few = np.concatenate([np.flatnonzero(new_labels[:, digit])[:shots] for digit in range(5)])
    rest = np.setdiff1d(np.arange(len(new_images)), few)[:720]
    shown = np.concatenate([np.roll(new_images[few], shift, axis=(1, 2)) for shift in SHIFTS])
    return (
        (old_images[:720], old_labels[:720]),
        (old_images[720:900], old_labels[720:900]),
        (shown, np.tile(new_labels[few], (len(SHIFTS), 1))),
        (new_images[rest], new_labels[rest]),
    )


def base(size: int, width: int) -> Any:
    """[N, size, size, 1] images -> [N, 4 * width] features: three stages of two 3 x 3 convolutions, then an average."""
    x = images = keras.Input((size, size, 1))
    for stage in (1, 2, 3):
        for number in (1, 2):
            name = f"stage{stage}_{number}"
            x = layers.Conv2D(
                width * 2 ** (stage - 1), 3, padding="same", use_bias=False, name=f"{name}_conv"
            )(x)
            x = layers.BatchNormalization(momentum=0.9, name=f"{name}_norm")(x)
            x = layers.ReLU(name=f"{name}_relu")(x)
        x = layers.MaxPooling2D(name=f"stage{stage}_pool")(x)
    return keras.Model(images, layers.GlobalAveragePooling2D(name="average")(x), name="base")


def headed(body: Any, name: str) -> Any:
    """The base with a head of its own for five classes; the logits are FP32 under every dtype policy."""
    images = keras.Input(body.input_shape[1:])
    logits = layers.Dense(5, dtype="float32", name=f"{name}_head")(body(images))
    return keras.Model(images, logits, name=name)


def thaw(body: Any) -> None:
    """Make the convolutions of the last stage trainable, and nothing else of the base."""
    for layer in body.layers:
        layer.trainable = layer.name.startswith("stage3") and not isinstance(layer, layers.BatchNormalization)


def train(model: Any, data: Any, stage: str, epochs: int, batch_size: int, learning_rate: float) -> None:
    """Adam on the weights that are trainable now, and a line for every epoch."""
    model.compile(
        keras.optimizers.Adam(learning_rate),
        keras.losses.CategoricalCrossentropy(from_logits=True, label_smoothing=0.1),
    )
    line = keras.callbacks.LambdaCallback(
        on_epoch_end=lambda epoch, logs: print(
            f"{stage}, epoch {epoch + 1}: loss {logs['loss']:.4f}", flush=True
        )
    )
    model.fit(*data, batch_size=batch_size, epochs=epochs, verbose=0, callbacks=[line])


def right(model: Any, data: Any) -> float:
    """The percentage of images whose class the model tells."""
    images, labels = data
    logits = model.predict(images, batch_size=180, verbose=0)
    return float(100 * np.mean(np.argmax(logits, axis=1) == np.argmax(labels, axis=1)))


def main() -> None:
    """Pretrain, train the head, fine-tune, and end with the accuracy on images that were never trained on."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--pretrain-epochs", type=int, default=3, help="passes over 0 to 4; 0: none")
    parser.add_argument("--epochs", type=int, default=10, help="passes for the head, and again to fine-tune")
    parser.add_argument("--batch-size", type=int, default=45, help="images a step")
    parser.add_argument("--width", type=int, default=64, help="channels of the first stage")
    parser.add_argument("--image-size", type=int, default=24, help="side of the images, a multiple of 8")
    parser.add_argument("--shots", type=int, default=2, help="labelled images of each new digit")
    parser.add_argument("--seed", type=int, default=0, help="seed of weights and order")
    arguments = parser.parse_args()
    if arguments.image_size < 8 or arguments.image_size % 8:
        parser.error(f"--image-size {arguments.image_size}: give a multiple of 8, such as 16, 24 or 32")
    if not 1 <= arguments.shots <= 30:
        parser.error(f"--shots {arguments.shots}: 1 to 30, so that 720 images are left to test")

    keras.utils.set_random_seed(arguments.seed)
    old, old_test, new, new_test = load(arguments.image_size, arguments.shots)
    body = base(arguments.image_size, arguments.width)
    pretrained = arguments.pretrain_epochs > 0
    if pretrained:
        model = headed(body, "pretraining")
        train(model, old, "pretraining", arguments.pretrain_epochs, arguments.batch_size, 2e-3)
        print(f"pretrained: {right(model, old_test):.2f} % of unseen digits 0 to 4 right", flush=True)

        body.trainable = False
        model = headed(body, "transfer")
        train(model, new, "head", arguments.epochs, arguments.batch_size, 1e-2)
        print(f"new head: {right(model, new_test):.2f} % of unseen digits 5 to 9 right", flush=True)

        thaw(body)
        train(model, new, "fine-tuning", arguments.epochs, arguments.batch_size, 3e-4)
    else:
        model = headed(body, "scratch")
        train(model, new, "from scratch", 2 * arguments.epochs, arguments.batch_size, 3e-3)
    print(f"accuracy: {right(model, new_test):.2f} %")


if __name__ == "__main__":
    main()

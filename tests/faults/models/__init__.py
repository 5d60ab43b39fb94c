"""Small models of the usual families, each with places (`front`, `middle`, `tail`) where a fault can be built in.

A step takes a few milliseconds.
"""

from faults.models.cnn import autoencoder, cnn
from faults.models.gan import gan
from faults.models.perceptron import scored, stack, taught, two_heads
from faults.models.recurrent import Carried, OwnCell, recurrent
from faults.models.trainee import Batch, Make, Place, Trainee, adamw, sgd
from faults.models.transformer import encoder, transformer

__all__ = [
    "Batch",
    "Carried",
    "Make",
    "OwnCell",
    "Place",
    "Trainee",
    "adamw",
    "autoencoder",
    "cnn",
    "encoder",
    "gan",
    "recurrent",
    "scored",
    "sgd",
    "stack",
    "taught",
    "transformer",
    "two_heads",
]

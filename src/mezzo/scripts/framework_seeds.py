"""Seeds of TensorFlow, JAX and Keras in paired runs: what `Seeds` does for Python, NumPy and PyTorch.

k is added to what the script gives to `tf.random.set_seed`, `tf.random.Generator.from_seed`, `jax.random.PRNGKey` and
`jax.random.key`, and to every number that Keras draws from: the seed of a `SeedGenerator` (a Dropout layer's, say), and
that of an initializer. Keras gives what is unseeded a seed from Python's `random`, which `Seeds` has seeded;
TensorFlow's global seed is set. `keras.utils.set_random_seed` sets all global streams, and each is shifted there.

Nothing is imported here: modules are handed over when the script has imported them.
"""

from __future__ import annotations

import functools
import sys
from types import ModuleType
from typing import Any

from mezzo.scripts.imports import ImportWatch
from mezzo.scripts.patches import Patches
from mezzo.scripts.seeds import BASE, Seeds


class FrameworkSeeds:
    """Shifts the seeds of TensorFlow, JAX and Keras as `seeds` shifts the others.

    Args:
        seeds: of this run.
        imports: where to wait for the frameworks.
    """

    def __init__(self, seeds: Seeds, imports: ImportWatch) -> None:
        self._seeds = seeds
        self._imports = imports
        self._patches = Patches()

    def install(self) -> None:
        """From now on."""
        self._imports.when("tensorflow", self._tensorflow)
        if self._seeds.offset:
            self._imports.when("jax", self._jax)
            self._imports.when("keras", self._keras)

    def remove(self) -> None:
        """Give all functions back."""
        self._patches.undo()

    def _tensorflow(self, tensorflow: ModuleType | Any) -> None:
        tensorflow.random.set_seed((BASE + self._seeds.offset) % 2**31)
        if self._seeds.offset:
            self._shift(tensorflow.random, "set_seed", bits=31)
            generator = tensorflow.random.Generator
            from_seed = generator.from_seed  # bound to the class: a classmethod

            @functools.wraps(from_seed)
            def shifted(seed: Any, *args: Any, **kwargs: Any) -> Any:
                return from_seed(self._seeds.shifted(seed, 31), *args, **kwargs)

            self._patches.set(generator, "from_seed", staticmethod(shifted))

    def _jax(self, jax: ModuleType | Any) -> None:
        for name in ("PRNGKey", "key"):
            self._shift(jax.random, name, bits=31, but_for="keras")

    def _keras(self, keras: ModuleType | Any) -> None:
        self._seeds.shifted_before.add("keras")  # on its torch backend
        made = keras.random.SeedGenerator.__init__

        @functools.wraps(made)
        def init(generator: Any, seed: Any = None, *args: Any, **kwargs: Any) -> None:
            made(generator, self._seeds.shifted(seed, 31), *args, **kwargs)
            generator._initial_seed = seed  # what get_config says, and what a copy is made from

        self._patches.set(keras.random.SeedGenerator, "__init__", init)
        home = sys.modules["keras.src.random.seed_generator"]
        draw = home.draw_seed

        @functools.wraps(draw)
        def draw_seed(seed: Any) -> Any:
            return draw(self._seeds.shifted(seed, 31) if isinstance(seed, int) else seed)

        for name, module in list(sys.modules.items()):
            if name.startswith("keras.src.") and vars(module).get("draw_seed") is draw:
                self._patches.set(module, "draw_seed", draw_seed)

    def _shift(self, owner: Any, name: str, *, bits: int, but_for: str = "") -> None:
        original = getattr(owner, name)

        @functools.wraps(original)
        def seeded(seed: Any, *args: Any, **kwargs: Any) -> Any:
            caller = str(sys._getframe(1).f_globals.get("__name__", "")).partition(".")[0]
            return original(seed if caller == but_for else self._seeds.shifted(seed, bits), *args, **kwargs)

        self._patches.set(owner, name, seeded)

"""Seeds of paired runs: run k adds k to every seed that the script gives, and seeds what the script does not seed.

Seeds are those given to `random`, to `numpy.random` (the global stream, generators, bit generators, seed
sequences), to `torch.manual_seed`, `torch.cuda.manual_seed*` and `torch.Generator.manual_seed`. Run 0
leaves the script's own seeds as they are. A number that only a library turns into a generator of its own
(scikit-learn's `random_state=0`, which fixes a train/test split) is no seed given to those, and stays:
constructors are shifted only when the script itself, not an installed library, calls them. A library's
helper that sets the global streams (`seed_everything`) does so in the script's name, and is shifted.

`FrameworkSeeds` does the same for TensorFlow, JAX and Keras: for what the script gives to `tf.random.set_seed`,
`tf.random.Generator.from_seed`, `jax.random.PRNGKey` and `jax.random.key`, and for every number that Keras draws
from: the seed of a `SeedGenerator` (a Dropout layer's, say), and that of an initializer. Keras gives what is unseeded
a seed from Python's `random`, which `Seeds` has seeded; TensorFlow's global seed is set.
`keras.utils.set_random_seed` sets all global streams, and each is shifted there.
"""

from __future__ import annotations

import functools
import os
import random
import sys
import sysconfig
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

from mezzo.scripts.patches import ImportWatch, Patches

# What an unseeded stream of run 0 starts from. Any number would do, as long as it stays the same.
BASE = 20171010  # the day on which arXiv:1710.03740 appeared

_LIBRARIES = tuple(
    os.path.realpath(folder) + os.sep
    for folder in {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
)
# Also those of a virtual environment's parent, of the user, and of Debian.
_PACKAGES = tuple(f"{os.sep}{name}-packages{os.sep}" for name in ("site", "dist"))
_BIT_GENERATORS = ("MT19937", "PCG64", "PCG64DXSM", "Philox", "SFC64")


class Seeds:
    """Shifts the seeds of a run by `offset`.

    Args:
        offset: k >= 0; readable afterwards.
        imports: where to wait for numpy and torch.
    """

    def __init__(self, offset: int, imports: ImportWatch) -> None:
        self.offset = offset
        self._imports = imports
        self._patches = Patches()
        self._unseeded = 0
        self.shifted_before: set[str] = set()
        """Packages that seed torch's generators with numbers that somebody else has shifted."""

    def install(self) -> None:
        """Seed what may stay unseeded, and from now on add to what the script gives."""
        random.seed(BASE + self.offset)
        self._patch_random()
        self._imports.when("numpy", self._numpy_imported)
        self._imports.when("torch", self._torch_imported)

    def remove(self) -> None:
        """Give all functions back."""
        self._patches.undo()

    def shifted(self, seed: Any, bits: int = 64) -> Any:
        """A seed of this run: k more for a number (modulo 2**bits), for the first of several; text gets k
        appended.
        """
        k = self.offset
        if isinstance(seed, bool) or seed is None or not k:
            return seed
        if isinstance(seed, str):
            return f"{seed}+{k}"
        if isinstance(seed, (bytes, bytearray)):
            return bytes(seed) + f"+{k}".encode()
        if isinstance(seed, float):
            return seed + k
        if isinstance(seed, Sequence) and len(seed):
            return [self.shifted(seed[0], bits), *seed[1:]]
        try:
            number = seed.__index__()
        except (AttributeError, TypeError):
            return seed
        return number + k if number < 0 else (number + k) % 2**bits

    def _fresh(self, bits: int = 32) -> int:
        """A seed where the script asks for an unpredictable one: another at each asking, the same in each
        pair.
        """
        self._unseeded += 1
        return int((BASE + self.offset + 1_000_003 * self._unseeded) % 2**bits)

    def _patch_random(self) -> None:
        seeds, original = self, random.Random.seed

        def seed(generator: random.Random, a: Any = None, version: int = 2) -> None:
            if a is not None and (generator is _global_random() or not _library_calls(2)):
                a = seeds.shifted(a)
            elif a is None and generator is _global_random():
                a = BASE + seeds.offset
            original(generator, a, version)

        self._patches.set(random.Random, "seed", seed)
        self._patches.set(random, "seed", functools.partial(seed, _global_random()))

    def _numpy_imported(self, numpy: ModuleType | Any) -> None:
        namespace = numpy.random
        namespace.seed((BASE + self.offset) % 2**32)
        self._replace_function(namespace, "default_rng", always=False, fresh=True)
        self._replace_function(namespace, "seed", always=True, bits=32, absent=BASE + self.offset)
        if self.offset:
            for name in ("RandomState", "SeedSequence", *_BIT_GENERATORS):
                bits = 32 if name in ("RandomState", "MT19937") else 64
                self._patches.set(namespace, name, _shifting_class(getattr(namespace, name), self, bits))

    def _torch_imported(self, torch: ModuleType | Any) -> None:
        torch.manual_seed(BASE + self.offset)
        for owner in (torch, torch.random):
            self._patches.set(owner, "seed", self._unpredictable(torch.manual_seed))
        if not self.offset:
            return
        for owner in (torch, torch.random):
            self._replace_function(owner, "manual_seed", always=True)
        for name in ("manual_seed", "manual_seed_all"):
            for owner in (torch.cuda, torch.cuda.random):
                self._replace_function(owner, name, always=True)
        seeds, generator = self, torch.Generator

        class Generator(generator, metaclass=_standing_for(generator)):  # type: ignore[misc,valid-type,metaclass]
            def manual_seed(self, seed: int) -> Any:
                caller = str(sys._getframe(1).f_globals.get("__name__", "")).partition(".")[0]
                super().manual_seed(seed if caller in seeds.shifted_before else seeds.shifted(seed))
                return self

        Generator.__qualname__ = Generator.__name__ = "Generator"
        Generator.__module__ = generator.__module__
        self._patches.set(torch, "Generator", Generator)

    def _unpredictable(self, manual_seed: Callable[[int], Any]) -> Callable[[], int]:
        def seed() -> int:
            """Seed the global streams; the number used, which a paired run uses as well."""
            number = self._fresh()
            manual_seed(number)
            return number

        return seed

    def _replace_function(
        self,
        owner: Any,
        name: str,
        *,
        always: bool,
        bits: int = 64,
        absent: int | None = None,
        fresh: bool = False,
    ) -> None:
        original: Callable[..., Any] = getattr(owner, name)

        @functools.wraps(original)
        def seeded(*args: Any, **kwargs: Any) -> Any:
            caller = str(sys._getframe(1).f_globals.get("__name__", ""))
            if caller.partition(".")[0] in (
                "torch",
                "numpy",
            ):  # hands on a number that has been shifted already
                return original(*args, **kwargs)
            keyword = next(iter(kwargs), None) if not args else None
            given = args[0] if args else kwargs[keyword] if keyword is not None else None
            if given is None:
                given = self._fresh() if fresh and not _library_calls(2) else absent
            elif always or not _library_calls(2):
                given = self.shifted(given, bits)
            if given is None:
                return original(*args, **kwargs)
            return original(**{**kwargs, keyword: given}) if keyword else original(given, *args[1:], **kwargs)

        self._patches.set(owner, name, seeded)


def _shifting_class(original: Any, seeds: Seeds, bits: int) -> Any:
    """A class that takes the place of a numpy class, and differs from it by the seed alone."""

    class Shifting(original, metaclass=_standing_for(original)):  # type: ignore[misc,metaclass]
        def __init__(self, seed: Any = None, *args: Any, **kwargs: Any) -> None:
            if not _library_calls(2):
                if "entropy" in kwargs:
                    kwargs["entropy"] = seeds.shifted(kwargs["entropy"], bits)
                seed = seeds.shifted(seed, bits)
            if seed is None and kwargs:
                super().__init__(*args, **kwargs)
            else:
                super().__init__(seed, *args, **kwargs)

    Shifting.__name__ = Shifting.__qualname__ = original.__name__
    Shifting.__module__ = original.__module__
    return Shifting


def _standing_for(original: Any) -> type:
    """A metaclass by which a stand-in recognises instances and subclasses of the original as its own."""

    class StandIn(type(original)):  # type: ignore[misc]
        def __instancecheck__(cls, instance: Any) -> bool:
            return isinstance(instance, original)

        def __subclasscheck__(cls, subclass: type) -> bool:
            return issubclass(subclass, original)

    return StandIn


def _global_random() -> random.Random:
    return random._inst


def _library_calls(depth: int) -> bool:
    """Whether the function `depth` frames up from our caller's callee belongs to an installed library or to
    Python.
    """
    frame = sys._getframe(depth)
    file = frame.f_code.co_filename
    while frame.f_back is not None and file == random.__file__:  # Random.__init__ calls Random.seed
        frame = frame.f_back
        file = frame.f_code.co_filename
    if file.startswith("<"):
        return file.startswith("<frozen")
    path = os.path.realpath(file)
    return path.startswith(_LIBRARIES) or any(folder in path for folder in _PACKAGES)


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

"""Seeds of paired runs: run k adds k to every seed that the script gives, and seeds what the script does not seed.

Constructors are shifted only when the script itself calls them, not an installed library: scikit-learn's
`random_state=0` fixes a train/test split, and stays. A library's helper that sets the global streams is shifted.
"""

from __future__ import annotations

import functools
import os
import random
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

from mezzo.runner.children import LIBRARIES
from mezzo.runner.lifecycle import rank_here
from mezzo.runner.patches import ImportWatch, Patches

# What an unseeded stream of run 0 starts from. Any number would do, as long as it stays the same.
BASE = 20171010  # the day on which arXiv:1710.03740 appeared

# Besides `LIBRARIES`: those of a virtual environment's parent, of the user, and of Debian.
_PACKAGES = tuple(f"{os.sep}{name}-packages{os.sep}" for name in ("site", "dist"))


class Seeds:
    """Shifts the seeds of a run by `offset`."""

    def __init__(self, offset: int, imports: ImportWatch) -> None:
        self.offset = offset
        # Python and NumPy draw other numbers on each rank where the script does not seed them; torch draws the same.
        self._unseeded_base = BASE + offset + 7_919 * (rank_here() or 0)
        self._imports = imports
        self._patches = Patches()
        self._unseeded = 0
        self.shifted_before: set[str] = set()  # packages that seed torch's generators with shifted numbers

    def install(self) -> None:
        """Seed what may stay unseeded, and from now on add to what the script gives."""
        random.seed(self._unseeded_base)
        self._patch_random()
        self._imports.when("numpy", self._numpy_imported)
        self._imports.when("torch", self._torch_imported)

    def remove(self) -> None:
        """Give all functions back."""
        self._patches.undo()

    def shifted(self, seed: Any, bits: int = 64) -> Any:
        """Seed + k for a number (modulo 2**bits), and for the first of several; text gets k appended."""
        k = self.offset
        if isinstance(seed, bool) or seed is None or not k:
            return seed
        if isinstance(seed, (str, bytes, bytearray, float)):
            return f"{seed!r}+{k}"
        if isinstance(seed, Sequence) and len(seed):
            return [self.shifted(seed[0], bits), *seed[1:]]
        try:
            number = seed.__index__()
        except (AttributeError, TypeError):
            return seed
        return number + k if number < 0 else (number + k) % 2**bits

    def _fresh(self) -> int:
        """A seed where the script asks for an unpredictable one: another at each call, the same in both of a pair."""
        self._unseeded += 1
        return (self._unseeded_base + 1_000_003 * self._unseeded) % 2**32

    def _patch_random(self) -> None:
        original, globally = random.Random.seed, random._inst

        def seed(generator: random.Random, a: Any = None, version: int = 2) -> None:
            if a is not None and (generator is globally or not _library_calls(2)):
                a = self.shifted(a)
            elif a is None and generator is globally:
                a = self._unseeded_base
            original(generator, a, version)

        self._patches.set(random.Random, "seed", seed)
        self._patches.set(random, "seed", functools.partial(seed, globally))

    def _numpy_imported(self, numpy: ModuleType | Any) -> None:
        namespace = numpy.random
        namespace.seed(self._unseeded_base % 2**32)
        self._replace(namespace, "default_rng", makes=True)
        self._replace(namespace, "seed", bits=32, absent=self._unseeded_base)
        if self.offset:
            for name in ("RandomState", "SeedSequence", "MT19937", "PCG64", "PCG64DXSM", "Philox", "SFC64"):
                self._replace_class(namespace, name, 32 if name in ("RandomState", "MT19937") else 64)

    def _torch_imported(self, torch: ModuleType | Any) -> None:
        torch.manual_seed(BASE + self.offset)
        if not self.offset:
            return
        for owner in (torch, torch.random):
            self._replace(owner, "manual_seed")
        for name in ("manual_seed", "manual_seed_all"):
            for owner in (torch.cuda, torch.cuda.random):
                self._replace(owner, name)
        original = torch.Generator

        def seeded(generator: Any, seed: int) -> Any:
            original.manual_seed(generator, seed if _caller() in self.shifted_before else self.shifted(seed))
            return generator

        self._patches.set(torch, "Generator", _stand_in(original, manual_seed=seeded))

    def _replace(
        self,
        owner: Any,
        name: str,
        *,
        makes: bool = False,
        bits: int = 64,
        absent: int | None = None,
        but_for: Sequence[str] = ("torch", "numpy"),
    ) -> None:
        """Shift a function's first argument, `seed`; without one use `absent`. Calls of `but_for` were shifted before.

        If it `makes` a generator, an installed library's calls stay, and each call without a seed gets another one.
        """
        original: Callable[..., Any] = getattr(owner, name)  # of a class, bound to it: a classmethod

        @functools.wraps(original)
        def seeded(*args: Any, **kwargs: Any) -> Any:
            given = args[0] if args else kwargs.get("seed")
            if _caller() in but_for or (makes and _library_calls(2)):
                return original(*args, **kwargs)
            if given is None:
                given = self._fresh() if makes else absent
            else:
                given = self.shifted(given, bits)
            if given is None:
                return original(*args, **kwargs)
            if "seed" in kwargs:
                return original(*args, **{**kwargs, "seed": given})
            return original(given, *args[1:], **kwargs)

        self._patches.set(owner, name, staticmethod(seeded) if isinstance(owner, type) else seeded)

    def _replace_class(self, owner: Any, name: str, bits: int) -> None:
        """Shift what a class of numpy's is made from."""
        original = getattr(owner, name)

        def init(made: Any, seed: Any = None, *args: Any, **kwargs: Any) -> None:
            if not _library_calls(2):
                if "entropy" in kwargs:
                    kwargs["entropy"] = self.shifted(kwargs["entropy"], bits)
                seed = self.shifted(seed, bits)
            if seed is not None or not kwargs:
                args = (seed, *args)
            original.__init__(made, *args, **kwargs)

        self._patches.set(owner, name, _stand_in(original, __init__=init))


class FrameworkSeeds(Seeds):
    """Shifts the seeds of TensorFlow, JAX and Keras too. Unseeded ones get theirs from Python's `random`."""

    def install(self) -> None:
        """Seed what may stay unseeded, and from now on add to what the script gives."""
        super().install()
        self._imports.when("tensorflow", self._tensorflow)
        if self.offset:
            self._imports.when("jax", self._jax)
            self._imports.when("keras", self._keras)

    def _tensorflow(self, tensorflow: ModuleType | Any) -> None:
        tensorflow.random.set_seed((BASE + self.offset) % 2**31)
        if self.offset:
            self._replace(tensorflow.random, "set_seed", bits=31, but_for=())
            self._replace(tensorflow.random.Generator, "from_seed", bits=31, but_for=())

    def _jax(self, jax: ModuleType | Any) -> None:
        for name in ("PRNGKey", "key"):
            self._replace(jax.random, name, bits=31, but_for=("keras",))

    def _keras(self, keras: ModuleType | Any) -> None:
        self.shifted_before.add("keras")  # on its torch backend
        made = keras.random.SeedGenerator.__init__

        @functools.wraps(made)
        def init(generator: Any, seed: Any = None, *args: Any, **kwargs: Any) -> None:
            made(generator, self.shifted(seed, 31), *args, **kwargs)
            generator._initial_seed = seed  # what get_config says, and what a copy is made from

        self._patches.set(keras.random.SeedGenerator, "__init__", init)
        home = sys.modules["keras.src.random.seed_generator"]
        draw = home.draw_seed

        @functools.wraps(draw)
        def draw_seed(seed: Any) -> Any:
            return draw(self.shifted(seed, 31) if isinstance(seed, int) else seed)

        for name, module in list(sys.modules.items()):
            if name.startswith("keras.src.") and vars(module).get("draw_seed") is draw:
                self._patches.set(module, "draw_seed", draw_seed)


def _stand_in(original: type, **methods: Any) -> type:
    """A replacement for a class, which also recognizes the original's instances and subclasses as its own."""

    class Kind(type(original)):  # type: ignore[misc]
        def __instancecheck__(cls, instance: Any) -> bool:
            return isinstance(instance, original)

        def __subclasscheck__(cls, subclass: type) -> bool:
            return issubclass(subclass, original)

    names = {"__module__": original.__module__, "__qualname__": original.__qualname__}
    made: type = Kind(original.__name__, (original,), {**methods, **names})
    return made


def _caller() -> str:
    """The package that calls our caller."""
    return str(sys._getframe(2).f_globals.get("__name__", "")).partition(".")[0]


def _library_calls(depth: int) -> bool:
    """Whether the function `depth` frames up belongs to an installed library or to Python."""
    frame = sys._getframe(depth)
    file = frame.f_code.co_filename
    while frame.f_back is not None and file == random.__file__:  # Random.__init__ calls Random.seed
        frame = frame.f_back
        file = frame.f_code.co_filename
    if file.startswith("<"):
        return file.startswith("<frozen")
    path = os.path.realpath(file)
    return path.startswith(LIBRARIES) or any(folder in path for folder in _PACKAGES)

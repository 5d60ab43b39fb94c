"""The public names, frozen; and that tools which only read records or round numbers never load a
framework."""

from __future__ import annotations

import subprocess
import sys

import pytest

import mezzo
from mezzo.core import errors

PUBLIC = {
    *("DynamicLossScale", "GradScaler", "LossScaleCollapseError", "MixedPrecision", "NoLossScale", "Policy"),
    *(
        "StaticLossScale",
        "TensorBoardWriter",
        "autocast",
        "calibrate",
        "explain",
        "find_batch_size",
        "formats",
    ),
    *("keep_memory", "keras", "load_master_state_dict", "lower_weights", "master_state_dict", "nn", "optim"),
    *("policy", "tensorflow"),
}

KERAS = {
    *("LossScaleOptimizer", "PolicyWarning", "PrecisionMonitor", "SixteenBitOutputWarning"),
    *("layer_policies", "set_policy"),
}
TENSORFLOW = {
    *("disable_mixed_precision_graph_rewrite", "enable_mixed_precision_graph_rewrite"),
    *("install", "uninstall"),
}

FORMATS = {
    *("ALIASES", "Bits", "FORMATS", "OVERFLOW", "Format"),
    *("bits", "decode", "dtype_name", "format_name", "named", "round", "ulp"),
}


def test_the_public_names_are_these_and_no_others() -> None:
    assert set(mezzo.__all__) == PUBLIC
    assert set(dir(mezzo)) >= PUBLIC


def test_the_names_of_the_other_frameworks_rooms_are_these() -> None:
    for room, names in ((mezzo.keras, KERAS), (mezzo.tensorflow, TENSORFLOW)):
        assert set(room.__all__) == names <= set(dir(room))
        with pytest.raises(AttributeError, match="has no attribute 'set_polcy'"):
            room.set_polcy


@pytest.mark.parametrize(
    ("room", "name", "absent", "words"),
    [
        ("keras", "set_policy", "keras", "keras is not installed. Install Keras 3 and one of its backends: "),
        (
            "tensorflow",
            "enable_mixed_precision_graph_rewrite",
            "tensorflow",
            "tensorflow is not installed. Install it: pip install tensorflow",
        ),
    ],
)
def test_a_framework_that_is_not_installed_is_told_with_the_mend(
    room: str, name: str, absent: str, words: str
) -> None:
    code = (
        f"import sys, importlib.abc\n"
        f"class Absent(importlib.abc.MetaPathFinder):\n"
        f"    def find_spec(self, name, *rest):\n"
        f"        if name.split('.')[0] == {absent!r}: raise ModuleNotFoundError('absent', name={absent!r})\n"
        f"sys.meta_path.insert(0, Absent())\n"
        f"import mezzo.{room}\n"
        f"try:\n    mezzo.{room}.{name}\n"
        f"except ImportError as error:\n    print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert words in done.stdout


def test_the_names_of_mezzo_formats_are_these() -> None:
    module = mezzo.formats
    own = {
        name
        for name, value in vars(module).items()
        if not name.startswith("_") and getattr(value, "__module__", module.__name__) == module.__name__
    }
    modules = {name for name in own if type(getattr(module, name)) is type(sys)}
    assert own - modules - {"TYPE_CHECKING", "annotations"} - {"Number", "floor_log2", "magnitude"} == FORMATS


@pytest.mark.parametrize("name", sorted(PUBLIC))
def test_every_public_name_resolves_and_is_kept(name: str) -> None:
    value = getattr(mezzo, name)
    assert value is getattr(mezzo, name)
    module = sys.modules[mezzo._PUBLIC[name]]
    assert value is getattr(module, name, module)
    assert value.__doc__


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'mezzo' has no attribute 'autocsat'"):
        mezzo.autocsat
    assert not hasattr(mezzo, "_no_such_thing")
    with pytest.raises(AttributeError, match=r"StatisticalLossScale .*DynamicLossScale"):
        mezzo.StatisticalLossScale
    with pytest.raises(AttributeError, match=r"Lion .*with_masters"):
        mezzo.optim.Lion


@pytest.mark.parametrize(
    ("error", "bases"),
    [
        (errors.UsageError, (errors.MezzoError, ValueError)),
        (errors.UnknownNameError, (errors.UsageError, LookupError)),
        (errors.UnsupportedPrecisionError, (errors.MezzoError, RuntimeError)),
        (errors.BannedOpError, (errors.MezzoError, RuntimeError)),
        (errors.LossScaleCollapseError, (errors.MezzoError, RuntimeError)),
        (errors.ScriptError, (errors.MezzoError, RuntimeError)),
        (errors.CallOrderError, (errors.UsageError, RuntimeError)),
    ],
)
def test_an_error_is_caught_as_what_it_is(error: type[Exception], bases: tuple[type, ...]) -> None:
    assert all(issubclass(error, base) for base in bases)
    assert str(error("the message")) == "the message"


NO_FRAMEWORK = [
    "import mezzo",
    "import mezzo; mezzo.policy('bf16'); mezzo.DynamicLossScale()",
    "import mezzo; mezzo.keras; mezzo.tensorflow",
    "import mezzo.keras.run, mezzo.compare.request, mezzo.keras.plan; mezzo.keras.plan.plan('fp16,module.head=fp32')",
    "import mezzo.core.records, mezzo.core.errors",
    "import mezzo; mezzo.formats.round(0.1, 'bf16'); mezzo.formats.bits(0.1, 'fp16')",
    "import mezzo, numpy; mezzo.formats.round(numpy.ones(3, numpy.float32), 'fp16')",
    "from mezzo.cli.main import main; main(['--help'])",
    "from mezzo.cli.main import main; main(['formats', 'show', '1'])",
    "from mezzo.cli.main import main; main(['doctor', '--gpu', 'T4'])",
    "import mezzo.report",
]


@pytest.mark.parametrize("code", NO_FRAMEWORK)
def test_no_framework_is_loaded_before_it_is_asked_for(code: str) -> None:
    frameworks = {"torch", "tensorflow", "keras", "jax"}
    check = f"import sys; loaded = {frameworks} & set(sys.modules); assert not loaded, loaded"
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", f"{code}\n{check}"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_a_bare_import_loads_nothing_but_the_standard_library() -> None:
    code = (
        "import sys; before = set(sys.modules); import mezzo; "
        "tops = {name.partition('.')[0] for name in set(sys.modules) - before}; "
        "print(tops - set(sys.stdlib_module_names) - {'mezzo'})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"

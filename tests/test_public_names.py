"""The public names, frozen, and how they present themselves; and that tools which only read records or round numbers
never load a framework."""

from __future__ import annotations

import inspect
import pydoc
import subprocess
import sys
from typing import Any

import pytest
import torch

import mezzo
from mezzo.core import errors
from mezzo.core.calibration import recommend
from mezzo.core.overflow import OverflowReport, TensorFacts
from mezzo.core.ranges import Histogram, RangeRow
from mezzo.core.records import RangesRecord
from mezzo.core.version import TORCH_TESTED, untested_torch
from mezzo.pytorch.batch_size import Trial
from mezzo.pytorch.training.result import StepResult

pytestmark = pytest.mark.filterwarnings("ignore:MixedPrecision. update .* was skipped")  # planted overflows

PUBLIC = {
    *("DynamicLossScale", "GradScaler", "MixedPrecision", "Policy", "StaticLossScale", "TensorBoardWriter"),
    *("autocast", "calibrate", "explain", "find_batch_size", "formats", "keep_memory", "keras"),
    *("load_master_state_dict", "lower_weights", "master_state_dict", "nn", "optim", "policy", "tensorflow"),
}
RESULTS = {"BatchSizeResult", "Explanation", "OverflowReport", "Recommendation", "StepResult"}
ERRORS = {
    *("BannedOpError", "CallOrderError", "LossScaleCollapseError", "MezzoError", "UnknownArgumentError"),
    *("UnknownNameError", "UnsupportedPrecisionError", "UsageError"),
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
    *("bits", "decode", "dtype_name", "format_name", "named", "quantize", "round", "ulp"),
}


def test_the_public_names_are_these_and_no_others() -> None:
    assert len(PUBLIC) <= 20
    assert all(name in mezzo.__doc__ for name in PUBLIC)
    everything = ((mezzo, PUBLIC | RESULTS | ERRORS), (mezzo.keras, KERAS), (mezzo.tensorflow, TENSORFLOW))
    for package, names in everything:
        assert dir(package) == sorted(package.__all__) == sorted(names)
        with pytest.raises(AttributeError, match="has no attribute 'set_polcy'"):
            package.set_polcy


@pytest.mark.parametrize(
    ("absent", "name"),
    [("keras", "set_policy"), ("tensorflow", "enable_mixed_precision_graph_rewrite")],
)
def test_for_a_framework_that_is_not_installed_the_command_is_named(absent: str, name: str) -> None:
    code = (
        f"import sys; sys.modules[{absent!r}] = None  # imported, it raises ModuleNotFoundError\n"
        f"import mezzo.{absent}\n"
        f"try:\n    mezzo.{absent}.{name}\n"
        f"except ImportError as error:\n    print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert f"{absent} is not installed" in done.stdout
    assert "pip install" in done.stdout


def test_the_names_of_mezzo_formats_are_these() -> None:
    module = mezzo.formats
    own = {
        name
        for name, value in vars(module).items()
        if not name.startswith("_") and getattr(value, "__module__", module.__name__) == module.__name__
        if type(value) is not type(sys)
    }
    assert own - {"TYPE_CHECKING", "annotations", "Number", "floor_log2", "magnitude"} == FORMATS
    assert set(dir(module)) == FORMATS


@pytest.mark.parametrize("name", sorted(PUBLIC | RESULTS | ERRORS))
def test_every_public_name_resolves_and_is_kept(name: str) -> None:
    value = getattr(mezzo, name)
    assert value is getattr(mezzo, name)
    module = sys.modules[mezzo._PUBLIC[name]]
    assert value is getattr(module, name, module)
    assert value.__doc__


def test_an_unknown_name_is_an_attribute_error() -> None:
    for wrong, right in (("MixedPrecison", "MixedPrecision"), ("gradscaler", "GradScaler")):
        with pytest.raises(AttributeError, match=f"'mezzo' has no attribute {wrong!r}.*{right!r}"):
            getattr(mezzo, wrong)
    with pytest.raises(AttributeError, match=r"'rond'.*'round'"):
        mezzo.formats.rond
    assert not hasattr(mezzo, "_no_such_thing")
    with pytest.warns(DeprecationWarning, match=r"NoLossScale .*loss_scale='none'") as warned:
        mezzo.NoLossScale
    assert warned[0].filename == __file__
    with pytest.raises(AttributeError, match=r"StatisticalLossScale .*DynamicLossScale"):
        mezzo.StatisticalLossScale
    with pytest.raises(AttributeError, match=r"Lion .*with_masters"):
        mezzo.optim.Lion


@pytest.mark.parametrize(
    ("function", "wrong", "right"),
    [
        (mezzo.MixedPrecision, "clip_nrom", "clip_norm"),
        (mezzo.MixedPrecision, "max_grad_norm", "clip_norm"),
        (mezzo.MixedPrecision, "gradient_clipping", "clip_norm"),
        (mezzo.MixedPrecision, "gradient_clip_val", "clip_norm"),
        (mezzo.MixedPrecision, "gradient_accumulation_steps", "accumulate"),
        (mezzo.MixedPrecision, "mixed_precision", "precision"),
        (mezzo.MixedPrecision, "autocast_dtype", "precision"),
        (mezzo.autocast, "enable", "enabled"),
        (mezzo.Policy, "op", "ops"),
        (mezzo.DynamicLossScale, "initial", "init"),
        (mezzo.DynamicLossScale, "init_scale", "init"),
        *((one, "mastres", "masters") for one in (mezzo.optim.Adam, mezzo.optim.AdamW, mezzo.optim.SGD)),
        (mezzo.calibrate, "batch", "batches"),
        (mezzo.find_batch_size, "maxsize", "max_size"),
        (mezzo.lower_weights, "kep", "keep"),
        (mezzo.TensorBoardWriter, "log_dir", "logdir"),
    ],
)
def test_an_unknown_keyword_argument_names_the_nearest(function: Any, wrong: str, right: str) -> None:
    for kind in (TypeError, mezzo.UsageError):
        with pytest.raises(kind, match=f"{function.__name__}.*{wrong!r}.*{right!r}"):
            function(**{wrong: 1})
    assert right in inspect.signature(function).parameters
    assert right in pydoc.plain(pydoc.render_doc(function)).partition("Args:")[0]


SCALE = "dynamic(init=1024)"


def steps(precision: str, **settings: Any) -> tuple[mezzo.MixedPrecision, list[StepResult]]:
    """A training of four losses, the last of which overflows under fp16."""
    model = torch.nn.Linear(2, 1)
    mp = mezzo.MixedPrecision(model, torch.optim.SGD(model.parameters(), lr=0.1), precision, **settings)
    results = []
    for factor in (1.0, 1.0, 1.0, float("inf")):
        with mp.autocast():
            loss = model(torch.ones(1, 2)).float().sum() * factor
        results.append(mp.step(loss))
    return mp, results


def test_objects_show_their_state() -> None:
    mp, results = steps("fp16", clip_norm=1.0, loss_scale=SCALE)
    expected = "MixedPrecision(fp16, clip_norm=1.0, loss_scale=512, 4 updates, 1 skipped)"
    assert repr(mp) == expected
    assert (mp.updates, mp.skipped) == (4, 1)
    assert repr(results[0]).startswith("StepResult(stepped, loss=")
    assert all(word in repr(results[3]) for word in ("skipped, loss=", "loss_scale=1024, reason="))
    state = mp.state_dict()
    mp.close()
    mp, _ = steps("fp16", clip_norm=1.0, loss_scale=SCALE)
    mp.load_state_dict(state)
    assert repr(mp) == expected
    mp.load_state_dict({key: value for key, value in state.items() if key != "skipped"})  # of version 0.1.0
    assert "4 updates, 0 skipped" in repr(mp)
    mp, results = steps("bf16", accumulate=3, masters="split")
    expected = "bf16,masters=split, accumulate=3, 1 update, 1 of 3 losses accumulated"
    assert repr(mp) == f"MixedPrecision({expected})"
    assert "no step: 1 of 3 losses" in repr(results[0])
    assert "loss=" not in repr(mezzo.StepResult(False, note="nothing"))
    scaler = mezzo.GradScaler(init_scale=2.0**24)
    assert repr(scaler) == "GradScaler(scale=16777216, 0 of 2000 good steps until it grows)"
    assert repr(mezzo.GradScaler(enabled=False)) == "GradScaler(enabled=False)"
    assert repr(OverflowReport("loss")).startswith("OverflowReport('the loss itself is NaN")
    row = RangeRow("a", "activation", "fp32", Histogram(0, [2], largest=1.5), "")
    assert repr(row) == "RangeRow('activation of a, up to 1.5')"


def test_notebooks_show_results_as_escaped_html() -> None:
    facts = TensorFacts("input 0", [2], "fp16", 1.0, 1.0, 0, 0, 0)
    told: dict[str, Any] = {"inputs": [facts], "line": "x.py:1: y < 1", "remedies": ["clamp & go"]}
    report = OverflowReport("overflow", "a<b", "exp", **told)
    model = torch.nn.Sequential(torch.nn.Linear(4, 2))
    explanation = mezzo.explain(model, torch.ones(1, 4), precision="bf16")
    sizes = mezzo.BatchSizeResult([Trial(8, True, 10, 1.0), Trial(16, False, why="<limit>")])
    assert repr(sizes) == "BatchSizeResult(largest=8, fastest=8, 2 sizes tried on cpu)"
    assert "<td>no: &lt;limit&gt;</td>" in sizes._repr_html_()
    gradient = RangeRow("a", "activation gradient", "fp32", Histogram(0, [2], largest=1.5), "")
    advice = recommend([RangesRecord(0, 0, 0.0, 1.0, [gradient])], native={"fp16"})
    assert repr(advice).startswith("Recommendation('fp16,")
    for shown in (report, steps("fp16")[1][3], explanation, sizes, advice):
        html = shown._repr_html_()
        assert html.count("<table>") == 1
        assert "<b>" in html
    assert all(text in report._repr_html_() for text in ("a&lt;b", "y &lt; 1", "clamp &amp; go"))


def test_a_torch_that_was_not_tested_warns_once() -> None:
    assert all(not untested_torch(f"{version}.1+cpu") for version in TORCH_TESTED)
    code = "import torch; torch.__version__ = type(torch.__version__)('2.99.0'); import mezzo; mezzo.autocast('bf16')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr.count("torch 2.99.0") == 1
    assert f"torch>={TORCH_TESTED[0]}" in done.stderr


def test_an_error_is_caught_as_what_it_is() -> None:
    for base, names in {
        ValueError: "UsageError",
        LookupError: "UnknownNameError",
        RuntimeError: "BannedOpError CallOrderError LossScaleCollapseError ScriptError UnsupportedPrecisionError",
        errors.UsageError: "UnknownNameError CallOrderError",
    }.items():
        for error in (getattr(errors, name) for name in names.split()):
            assert issubclass(error, base)
            assert issubclass(error, errors.MezzoError)
            assert str(error("the message")) == "the message"


def test_load_ext_says_that_there_is_nothing_to_load(capsys: pytest.CaptureFixture[str]) -> None:
    shell = pytest.importorskip("IPython.core.interactiveshell").InteractiveShell()
    shell.run_line_magic("load_ext", "mezzo")
    assert "import mezzo" in capsys.readouterr().out


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
    """And by a bare import nothing but the standard library."""
    frameworks = {"torch", "tensorflow", "keras", "jax"}
    check = f"loaded = {frameworks} & set(sys.modules)"
    if code == "import mezzo":
        check = "loaded = {name.partition('.')[0] for name in set(sys.modules) - before} - own"
    begin = "import sys; before = set(sys.modules); own = {*sys.stdlib_module_names, 'mezzo'}"
    source = f"{begin}\n{code}\n{check}\nassert not loaded, loaded"
    command = [sys.executable, "-W", "error", "-c", source]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr

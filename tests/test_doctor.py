"""`mezzo doctor`: GPUs as data, timing in turns, the recommendation, a small real measurement, and what is printed."""

from __future__ import annotations

import importlib.metadata
import json
import math
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from commands import Command, in_the_folder  # noqa: F401
from mezzo.core.hardware import cuda_formats
from mezzo.core.policy import policy
from mezzo.doctor import measure
from mezzo.doctor.gpus import ARCHITECTURES, MODELS, find, formats_at, from_capability
from mezzo.doctor.measure import recommend, row
from mezzo.pytorch import hardware
from mezzo.pytorch.hardware import Gpu
from mezzo.runner.script_text import MIXED, WEIGHTS, findings


def test_formats_and_the_precision_by_capability() -> None:
    assert formats_at((6, 0)) == ()
    assert formats_at((8, 9)) == ("fp16", "tf32", "bf16", "fp8")
    for capability in ARCHITECTURES:
        assert cuda_formats(capability) == {"bf16", "fp16"} & set(formats_at(capability))
        found = from_capability(capability)
        expected = "bf16" if capability >= (8, 0) else "fp16" if capability >= (7, 0) else "fp32"
        assert found.precision == expected
        assert "{}.{}".format(*capability) in found.reasons[0]


def test_every_datasheet_row_is_complete_and_plausible() -> None:
    for model in MODELS:
        peaks = model.dense_peak_tflop_s
        assert set(peaks) - {"fp32"} == set(formats_at(model.capability)), model.name
        assert all(policy(name).compute == name for name in peaks)  # which is how the precision is named
        assert peaks["fp16"] > peaks["fp32"]
        assert peaks.get("bf16", peaks["fp16"]) == peaks["fp16"]
        assert "tf32" not in peaks or peaks["fp32"] <= peaks["tf32"] <= peaks["bf16"] / 2 * 1.02
        assert "fp8" not in peaks or peaks["fp8"] == pytest.approx(2 * peaks["fp16"], rel=0.02)
        assert 8 <= (model.memory_gb or 0) <= 300
        assert 300 <= (model.bandwidth_gb_s or 0) <= 8000
        assert model.source.startswith("NVIDIA")
        assert any(str(year) in model.source for year in range(2017, 2027))


FOUND = {
    "T4": "T4",
    "Tesla T4": "T4",
    "NVIDIA A100-SXM4-80GB": "A100-SXM4-80GB",
    "a100": "A100-PCIE-40GB, A100-SXM4-40GB, A100 80GB PCIe, A100-SXM4-80GB",
    "rtx4090": "GeForce RTX 4090",
    "L4": "L4",
    "l40": "L40",
    "H100": "H100 PCIe, H100 80GB HBM3",
    "NVIDIA H100-SXM": "H100 80GB HBM3",
}


def test_a_gpu_is_found_as_people_write_it() -> None:
    assert {name: ", ".join(model.name for model in find(name)) for name in FOUND} == FOUND
    assert all(len({model.capability for model in find(name)}) == 1 for name in FOUND)


CAPABILITIES = {
    "8.6": (8, 6), "GTX 1080": (6, 1), "Tesla P100-PCIE-16GB": (6, 0), "V100-SXM2-32GB": (7, 0), "RTX 2080": (7, 5),
    "3060": (8, 6), "GeForce RTX 3080 Laptop GPU": (8, 6), "RTX 30 series": (8, 6), "rtx4060ti": (8, 9),
}  # fmt: skip


def test_a_gpu_without_a_datasheet_here_has_its_compute_capability_and_no_figures() -> None:
    assert {name: model.capability for name in CAPABILITIES for model in find(name)} == CAPABILITIES
    assert not any(
        model.memory_gb or model.dense_peak_tflop_s for name in CAPABILITIES for model in find(name)
    )


NAN = float("nan")
# (matmul, conv step) rates of fp32, bf16, fp16; native formats; the precision; what the reasons say
RATES: list[tuple[Any, ...]] = [
    ((199, 100), (441, 190), (1.5, 1.2), "bf16", "bf16",
     ["products are 2.22x faster than in fp32", "computes fp16 in FP32 here, so", "casts make training slower"]),
    ((130, 80), (74, 64), (1300, 0.5), "bf16", "fp32",
     ["products are 1.76x slower", "10x faster than in fp32, but a convolution's training step is 160x slower",
      "no time here. They save memory if"]),
    ((8, 4), (3, 2), (60, 20), "fp16", "fp16", ["Mezzo scales the loss"]),
    ((60, 30), (900, 400), (900, 410), "bf16 fp16", "bf16", ["bf16 is preferred to fp16"]),
    ((60, 30), (NAN, NAN), (NAN, NAN), "", "fp32", ["bf16 and fp16: PyTorch cannot run it", "bf16 and fp16 in FP32"]),
    ((60, 30), (90, NAN), (NAN, NAN), "bf16", "fp32", ["training step is not available"]),
]  # fmt: skip


@pytest.mark.parametrize(("fp32", "bf16", "fp16", "native", "precision", "words"), RATES)
def test_the_recommendation_follows_from_the_rates(
    fp32: Any, bf16: Any, fp16: Any, native: str, precision: str, words: list[str]
) -> None:
    rows = [
        row(what, form, rate, *(((), "no") if math.isnan(rate) else ((1.0, 1.0),)))
        for form, rates in {"fp32": fp32, "bf16": bf16, "fp16": fp16}.items()
        for what, rate in zip(("matmul", "conv step"), rates)
    ]
    found = recommend(rows, native.split(), device="the CPU")
    assert found.precision == precision
    assert all(one in " ".join(found.reasons) for one in words)
    # Where both formats have the same reason, it is given once.
    names = [name for reason in found.reasons for name in reason.split(":")[0].split(" and ")]
    assert {"bf16", "fp16"} <= {*names}
    assert sum("in FP32 here" in reason for reason in found.reasons) == (len(native.split()) < 2)


TINY = measure.Sizes(side=32, batch=1, image=4, copy_bytes=4096)


def test_a_cpu_is_measured_in_every_format_and_nothing_is_left_changed() -> None:
    backends: Any = torch.backends
    before = (backends.cuda.matmul.fp32_precision, backends.cudnn.conv.fp32_precision)
    rates = measure.measure("cpu", sizes=TINY, budget=5.0)
    cells = {(rate["what"], rate["format"]): rate for rate in rates}
    assert len(cells) == len(rates) == 10
    for what in ("matmul", "conv step"):
        for form in ("fp32", "bf16", "fp16"):
            assert 0 < cells[what, form]["low"] <= cells[what, form]["median"] <= cells[what, form]["high"]
        assert "no fast tf32" in cells[what, "tf32"]["reason"]
        assert "no fast fp8" in cells["matmul", "e4m3fn"]["reason"]
    assert cells["matmul", "fp32"]["work"] == pytest.approx(2 * 32**3 / 1e9)
    assert cells["copy", "fp32"]["work"] == pytest.approx(2 * 4096 / 1e9)
    assert cells["copy", "fp32"]["unit"] == "GB/s"
    assert (backends.cuda.matmul.fp32_precision, backends.cudnn.conv.fp32_precision) == before


def test_a_format_that_cannot_run_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(form: str, device: str, sizes: measure.Sizes) -> Any:
        raise (
            RuntimeError("could not create a primitive\nand more") if form == "fp16" else NotImplementedError
        )

    monkeypatch.setattr(measure, "_conv_step", broken)
    cells = {(one["what"], one["format"]): one for one in measure.measure("cpu", sizes=TINY, budget=5.0)}
    assert cells["conv step", "fp16"]["reason"] == "could not create a primitive"
    assert cells["conv step", "bf16"]["reason"] == "NotImplementedError"
    assert {one["reason"] for one in measure.measure("cpu", sizes=TINY, budget=0.0)} == {measure.LATE}


def made_up(device: str, **given: Any) -> list[measure.Row]:
    """Rates of a CPU on which bf16 is worth it."""
    assert device == "cpu"
    steady = (1.0, 1.0, 1.0)
    return [
        *(row("matmul", form, rate, steady) for form, rate in (("fp32", 199.0), ("bf16", 441.0))),
        row("matmul", "fp16", 1.5, (1.1,)),
        row("matmul", "tf32", 0.0, reason="PyTorch has no fast tf32 on cpu"),
        *(row("conv step", form, rate, steady) for form, rate in (("fp32", 100.0), ("bf16", 190.0))),
        row("conv step", "fp16", 0.0, reason="could not create a primitive"),
        row("copy", "fp32", 54.0, steady),
    ]


@pytest.fixture
def cpu(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.setenv("MEZZO_ASSUME_NATIVE", "bf16")
    monkeypatch.setattr(hardware, "gpu", lambda: None)
    monkeypatch.setattr("mezzo.core.hardware.cpu", lambda: ("A [bold] CPU", frozenset()))
    monkeypatch.setattr(measure, "measure", made_up)
    return monkeypatch


def test_this_machine(cpu: pytest.MonkeyPatch, command: Command) -> None:
    ran = command("doctor")
    assert (ran.status, ran.err) == (0, "Measuring, for at most about 20 s ...\n")
    printed = " ".join(ran.out.split())
    for words in (
        "CPU A [bold] CPU, ",
        "GPU none that this PyTorch can use",
        "Measured on the CPU",
        "bf16 441 (441 to 441) 190 (190 to 190)",
        "fp16 1.36 (1 repeat) -",
        "memory bandwidth (copy), in GB/s: 54 (54 to 54)",
        "not measured: could not create a primitive",
        "Use bf16",
        "matrix products are 2.22x faster than in fp32, a convolution's training step is 1.9x faster than in fp32",
        "Try it: mezzo compare --precision bf16 train.py",
    ):
        assert words in printed
    cpu.setenv("MEZZO_ASSUME_NATIVE", "")
    last = command("doctor").out.splitlines()[-1]
    assert last == "Test memory and numerics of 16 bits: mezzo compare --precision bf16,fp16 train.py"
    assert "tf32 -" not in printed
    assert "The repeats vary" not in printed


@pytest.mark.parametrize("words", ["", "--gpu H100", "--gpu B200"])
def test_no_line_is_wider_than_the_terminal(words: str, cpu: pytest.MonkeyPatch, command: Command) -> None:
    cpu.setenv("COLUMNS", "60")
    cpu.setattr(sys.stdout, "isatty", lambda: True)
    *lines, _ = command(f"doctor {words}").out.strip().splitlines()  # the last one is a command
    assert [line for line in lines if len(line) > 60] == []


def test_a_named_gpu(command: Command) -> None:
    printed = " ".join(command("doctor --gpu T4").out.split())
    for words in (
        "T4: Turing, compute capability 7.5, 16 GB at 320 GB/s",
        "fp16 65 TFLOP/s tensor cores",
        "fp16 gains at most 8x over fp32, in matrix products alone",
        "Measure your model's gain on that GPU: mezzo compare --precision fp16 train.py",
        "dense peaks from: NVIDIA Turing GPU Architecture, appendix A, 2018",
        "Use fp16",
        "bf16 needs 8.0",
    ):
        assert words in printed
    shown = json.loads(command("doctor --gpu h100 --json").out)
    assert [gpu["name"] for gpu in shown["gpus"]] == ["H100 PCIe", "H100 80GB HBM3"]
    assert shown["gpus"][1]["dense_peak_tflop_s"]["bf16"] == 989
    assert shown["gpus"][0]["capability"]["tensor_core_formats"] == ["fp16", "tf32", "bf16", "fp8"]
    assert shown["recommendation"]["precision"] == "bf16"
    for name, words in (
        ("A30", "bf16 gains at most 16x over fp32, 2x over tf32, in matrix products alone"),
        *((name, "Use fp32\n") for name in ("GTX 1080", "GTX 1660 Ti")),
    ):
        assert words in command("doctor --gpu", name).out


WRONG = {  # names of GPUs -> what is said
    "T5": "mezzo doctor: unknown GPU 'T5'. Use NVIDIA's GTX 10, ",
    "H10": "Did you mean 'H100'?",
    "RTX 300": "Did you mean 'RTX 30'?",
    "MI300X": "AMD's GPUs are not listed: PyTorch for ROCm calls them cuda, too",
    **{number: f"mezzo doctor --gpu {number}.0\n" for number in ("7", "9", "10", "12")},
    "0": "leave --gpu out: mezzo doctor\n",
    **dict.fromkeys(("Tesla M40", "", "RTX", "GTX 980", "RTX 2050", "4.0"), "mezzo doctor --gpu 8.6"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_gpu_is_status_2_and_says_how_to_mend_it(name: str, command: Command) -> None:
    ran = command("doctor --gpu", name)
    assert (ran.status, ran.out) == (2, "")
    assert WRONG[name] in ran.err


def test_the_json_is_strict_and_every_key_of_it_is_documented(
    cpu: pytest.MonkeyPatch, command: Command
) -> None:
    page = (Path(__file__).parent.parent / "docs" / "formats.md").read_text(encoding="utf-8")

    def shown(words: str = "") -> Any:
        return json.loads(command(f"doctor --json {words}").out, parse_constant=pytest.fail)

    def keys(value: Any) -> set[str]:
        if isinstance(value, dict):
            return set(value).union(*map(keys, value.values()))
        return set().union(*map(keys, value)) if isinstance(value, list) else set()

    here = shown()
    assert set(here) == {"schema", "machine", "device", "native", "unsteady", "measured", "recommendation"}
    assert (here["schema"], here["device"], here["native"], here["unsteady"]) == (1, "cpu", ["bf16"], False)
    assert here["machine"] == hardware.describe()
    bf16 = {"what": "matmul", "format": "bf16", "median": 441.0, "repeats": 3}
    assert here["measured"][1].items() >= bf16.items()
    assert here["measured"][3]["median"] is None
    assert here["recommendation"]["precision"] == "bf16"
    wide = row("matmul", "fp32", 6.0, (1.0, 2.0, 3.0))
    cpu.setattr(measure, "measure", lambda device, **given: [*made_up(device), wide])
    assert shown()["unsteady"]
    cpu.setattr(hardware, "gpu", lambda: Gpu("NVIDIA T4", (7, 5), 16 * 10**9, 1))
    cpu.setattr(measure, "measure", lambda device, **given: made_up("cpu", **given))
    found = keys([shown(), shown("--gpu T4")]) - {"fp32", "fp16"}
    assert {key for key in found if f"`{key}`" not in page} == set()


# A script, which is read and not run: where it makes 16-bit weights or mixed precision.

LOADED = "AutoModelForCausalLM.from_pretrained('name'{})"
FINDINGS: dict[str, list[str]] = {  # code -> kinds of what it makes
    "model = Net().half()": [WEIGHTS],
    "model = nn.Sequential(nn.Linear(2, 2)).cuda().bfloat16()": [WEIGHTS],
    "model = Net()\nmodel.to('cuda', torch.bfloat16)": [WEIGHTS],
    "def train(self):\n    self.net = self.net.to(dtype=torch.float16)\n    self.net(x)": [WEIGHTS],
    "low = torch.bfloat16\nmodel = Net()\nmodel.to(low)": [WEIGHTS],
    "torch.set_default_dtype(torch.bfloat16)": [WEIGHTS],
    f"model = {LOADED.format('')}": [WEIGHTS],
    LOADED.format(", dtype='auto'"): [WEIGHTS],
    LOADED.format(", dtype='bfloat16'"): [WEIGHTS],
    LOADED.format(", torch_dtype=torch.float16"): [WEIGHTS],
    "BertModel.from_config(config, dtype=torch.bfloat16)": [WEIGHTS],
    "with torch.autocast('cuda', dtype=torch.bfloat16): pass": [MIXED],
    "with torch.cuda.amp.autocast(): pass": [MIXED],
    "scaler = GradScaler()": [MIXED],
    "Accelerator(mixed_precision='fp16')": [MIXED],
    "Trainer(model, args=TrainingArguments('out', bf16=True))": [MIXED],
    "L.Trainer(precision='bf16-mixed')\nFabric(precision='16-true')": [MIXED, MIXED],
    f"model = {LOADED.format('')}\nSFTConfig(fp16=True)": [WEIGHTS, MIXED],
    # None of it:
    "x = torch.randn(3).half()\nnet(x.bfloat16(), y.to(torch.bfloat16))": [],
    "Net().to('cuda').float().half_open()": [],
    "reference = Net().half().requires_grad_(False)": [],
    f"reference = {LOADED.format('')}\nreference.requires_grad_(False)": [],
    LOADED.format(", dtype=torch.float32"): [],
    "AutoTokenizer.from_pretrained('name')\nPeftModel.from_pretrained(model, 'name')": [],
    "model = Net().bfloat16()\noptimizer = mezzo.optim.AdamW(model.parameters())": [],
    "with torch.autocast('cuda', enabled=False): pass\nGradScaler(enabled=False)": [],
    "TrainingArguments('out', bf16=False)\nAccelerator(mixed_precision='no')\nTrainer(precision='32-true')": [],
    "with mezzo.autocast('bf16'): pass": [],
}


@pytest.fixture
def transformers(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Sets the version that seems to be installed."""

    def installed(version: str) -> None:
        found = [SimpleNamespace(version=version)] if version else []
        monkeypatch.setattr(importlib.metadata, "distributions", lambda name: iter(found))

    installed("5.0.1")
    return installed


@pytest.mark.usefixtures("transformers")
@pytest.mark.parametrize("code", FINDINGS)
def test_what_is_found(code: str) -> None:
    found = findings(f"import torch\n{code}\n", "train.py")
    assert [kind for _, kind, _ in found] == FINDINGS[code]
    assert all(one in code.replace('"', "'") for _, _, one in found)


def test_before_transformers_5_the_default_was_fp32(transformers: Any) -> None:
    transformers("")
    assert findings(LOADED.format(""), "train.py")
    transformers("4.57.6")
    assert findings(LOADED.format(""), "train.py") == []
    assert findings(LOADED.format(", dtype=torch.bfloat16"), "train.py")


def test_the_lines_and_the_commands(tmp_path: Path, command: Command) -> None:
    for name, text in (
        ("my train", "raise SystemExit\n\nmodel = Net().half()\nscaler = GradScaler()\n"),
        ("fine", "GradScaler()"),
        ("none", "print(1)"),
        ("bad", "a b"),
    ):
        (tmp_path / f"{name}.py").write_text(text)
    ran = command("doctor", "my train.py")
    assert ran.status == 1
    assert "my train.py:3: 16-bit weights without masters: Net().half()\n" in ran.out
    assert "my train.py:4: mixed precision of its own: GradScaler()\n" in ran.out
    for words in ("run", "run --masters split", "compare", "run --own off --precision bf16"):
        assert f": mezzo {words} 'my train.py'\n" in ran.out
    assert len({line.partition(":")[0] for line in ran.out.splitlines()[2:]}) == 4
    ran = command("doctor --json", "my train.py")
    assert (ran.status, [one["line"] for one in json.loads(ran.out)["findings"]]) == (1, [3, 4])
    statuses = {"fine.py": 0, "none.py": 0, "bad.py": 2, "absent.py": 2, "none.py --gpu T4": 2}
    assert {words: command(f"doctor {words}").status for words in statuses} == statuses
    assert "bad.py is not Python" in command("doctor bad.py").err

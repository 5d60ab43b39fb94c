"""`mezzo doctor`, as a user meets it: this machine (with the measurement replaced), a named GPU, JSON,
wrong words."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mezzo.cli.main import main
from mezzo.doctor import measure
from mezzo.doctor.measure import Rate
from mezzo.doctor.timing import Timing
from mezzo.pytorch import machine
from mezzo.pytorch.machine import Gpu


def made_up(device: str, **given: Any) -> list[Rate]:
    """Rates of a CPU on which bf16 is worth it."""
    assert device == "cpu"
    given["tell"](0.5)
    steady = (1.0, 1.0, 1.0)
    return [
        *(Rate("matmul", form, rate, Timing(steady)) for form, rate in (("fp32", 199.0), ("bf16", 441.0))),
        Rate("matmul", "fp16", 1.5, Timing((1.0, 1.2))),
        Rate("matmul", "tf32", 0.0, Timing((), "PyTorch has no fast tf32 path on cpu")),
        *(Rate("conv step", form, rate, Timing(steady)) for form, rate in (("fp32", 100.0), ("bf16", 190.0))),
        Rate("conv step", "fp16", 0.0, Timing((), "could not create a primitive")),
        Rate("copy", "fp32", 54.0, Timing(steady)),
    ]


@pytest.fixture
def cpu(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in ("FORCE_COLOR", "NO_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("MEZZO_ASSUME_NATIVE", "bf16")
    monkeypatch.setattr(machine, "gpu", lambda: None)
    monkeypatch.setattr(machine, "cpu_name", lambda: "A [bold] CPU")
    monkeypatch.setattr(measure, "measure", made_up)
    return monkeypatch


def test_this_machine(cpu: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    printed = " ".join(captured.out.split())
    for words in (
        "CPU A [bold] CPU, ",
        "GPU none that PyTorch can use",
        "Measured on the CPU",
        "bf16 441 (441 to 441) 190 (190 to 190)",
        "fp16 1.36 (1.25 to 1.5) -",
        "memory bandwidth, by copying: 54 (54 to 54) GB/s",
        "not measured: could not create a primitive",
        "Use bf16",
        "matrix products run 2.22 times as fast, a convolution's training step 1.9 times as fast",
        "Try it: mezzo compare --precision bf16 train.py",
    ):
        assert words in printed
    assert "tf32 -" not in printed
    assert "something else is using this machine" not in printed


def test_quick_is_smaller_and_a_busy_machine_is_told(
    cpu: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def noisy(device: str, **given: Any) -> list[Rate]:
        assert given["sizes"] == measure.QUICK_CPU_SIZES
        assert given["budget"] < 1
        return [*made_up(device, **given)[:-1], Rate("copy", "fp32", 54.0, Timing((1.0, 2.0, 3.0)))]

    cpu.setattr(measure, "measure", noisy)
    assert main(["doctor", "--quick"]) == 0
    assert "something else is using this machine" in " ".join(capsys.readouterr().out.split())
    assert main(["doctor", "--quick", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["unsteady"] is True


def test_this_machine_as_json(cpu: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json"]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    shown = json.loads(captured.out, parse_constant=lambda name: pytest.fail(name))
    assert set(shown) == {"schema", "machine", "device", "native", "unsteady", "measured", "recommendation"}
    assert shown["schema"] == 1
    assert shown["device"] == "cpu"
    assert shown["native"] == ["bf16"]
    assert shown["unsteady"] is False
    assert shown["machine"] == machine.describe()
    assert shown["measured"][1] == {
        "what": "matmul",
        "format": "bf16",
        "unit": "GFLOP/s",
        "median": 441.0,
        "low": 441.0,
        "high": 441.0,
        "repeats": 3,
        "seconds": 1.0,
        "work": 441.0,
        "reason": "",
    }
    assert shown["measured"][3]["median"] is None
    assert shown["measured"][3]["reason"] == "PyTorch has no fast tf32 path on cpu"
    assert shown["recommendation"]["precision"] == "bf16"
    assert len(shown["recommendation"]["reasons"]) == 3


def test_a_gpu_that_is_here_is_the_one_measured(
    cpu: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def on_gpu(device: str, **given: Any) -> list[Rate]:
        assert device == "cuda"
        return made_up("cpu", **given)

    cpu.setattr(machine, "gpu", lambda: Gpu("NVIDIA T4", (7, 5), 16 * 10**9, 2))
    cpu.setenv("MEZZO_ASSUME_NATIVE", "fp16")
    cpu.setattr(measure, "measure", on_gpu)
    assert main(["doctor"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "GPU NVIDIA T4, 16 GB, compute capability 7.5, the first of 2" in printed
    assert "Measured on the GPU" in printed
    assert "NVIDIA T4 does not train in bf16 natively" in printed


def test_a_named_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--gpu", "T4"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    for words in (
        "T4: Turing, compute capability 7.5, 16 GB at 320 GB/s",
        "fp16 65 TFLOP/s tensor cores",
        "dense peaks by: NVIDIA Turing GPU Architecture, appendix A, 2018",
        "Use fp16",
        "bf16 needs 8.0",
    ):
        assert words in printed
    assert main(["doctor", "--gpu", "h100", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert [gpu["name"] for gpu in shown["gpus"]] == ["H100 PCIe", "H100 80GB HBM3"]
    assert shown["gpus"][1]["dense_peak_tflop_s"]["bf16"] == 989
    assert shown["gpus"][0]["capability"]["tensor_core_formats"] == ["fp16", "tf32", "bf16", "fp8"]
    assert shown["recommendation"]["precision"] == "bf16"


def test_a_capability(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--capability", "8.9"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "Compute capability 8.9 (Ada Lovelace)" in printed
    assert "fp8 tensor cores, which have it from 8.9" in printed
    assert "fp4 no tensor cores, which have it from 10.0" in printed
    assert "Use bf16" in printed
    assert main(["doctor", "--capability", "6.1", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown == {
        "schema": 1,
        "capability": {"capability": "6.1", "architecture": "Pascal", "tensor_core_formats": []},
        "recommendation": {
            "precision": "fp32",
            "reasons": ["fp32: there are tensor cores from compute capability 7.0, and this is 6.1."],
        },
    }


WRONG = [
    (["--gpu", "T5"], "mezzo doctor: unknown GPU 'T5'. Use one of A10, "),
    (["--gpu", "T5"], "Did you mean 'T4'?"),
    (["--capability", "8.1"], "mezzo doctor: unknown compute capability '8.1'"),
    (["--capability", "ada"], "'ada' is no compute capability: write major.minor"),
    (["--gpu", "T4", "--capability", "7.5"], "give one of them"),
    (["--gqu", "T4"], "unrecognized arguments"),
]


@pytest.mark.parametrize(("words", "message"), WRONG)
def test_wrong_usage_exits_2_and_says_how_to_mend_it(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", *words]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert message in captured.err


@pytest.mark.heavy
def test_the_real_thing_runs_here(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--quick", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out, parse_constant=lambda name: pytest.fail(name))
    rates = {(row["what"], row["format"]): row["median"] for row in shown["measured"]}
    assert rates["matmul", "fp32"] > 0
    assert rates["copy", "fp32"] > 0
    assert shown["recommendation"]["precision"] in ("fp32", "bf16", "fp16")


def test_every_key_of_the_json_is_documented(
    cpu: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = (Path(__file__).parent.parent / "docs" / "doctor.md").read_text(encoding="utf-8")

    def keys(value: Any) -> set[str]:
        if isinstance(value, dict):
            return set(value).union(*map(keys, value.values()))
        return set().union(*map(keys, value)) if isinstance(value, list) else set()

    cpu.setattr(machine, "gpu", lambda: Gpu("NVIDIA T4", (7, 5), 16 * 10**9, 1))
    cpu.setattr(measure, "measure", lambda device, **given: made_up("cpu", **given))
    for words in ([], ["--gpu", "T4"], ["--capability", "8.0"]):
        assert main(["doctor", "--json", *words]) == 0
        found = keys(json.loads(capsys.readouterr().out)) - {"fp32", "fp16"}
        assert {key for key in found if f"`{key}`" not in page} == set()

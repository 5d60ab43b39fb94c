"""What a run writes down and tells: losses, updates, the observed step, notes, the summary."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from alive import bytes_alive
from mezzo.core.overflow import OverflowReport, TensorFacts
from mezzo.core.records import NOTHING_RAN, OverflowRecord
from mezzo.pytorch.run.summary import findings

TRAIN = """
import sys
import torch
from torch import nn
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
x, y = torch.randn(16, 4), torch.randint(0, 2, (16,))
for step in range(5):
    optimizer.zero_grad()
    out = model(x)
    loss = nn.functional.cross_entropy(out, y)
    loss.backward()
    optimizer.step()
    print(loss.item().hex(), out.dtype)
"""


@pytest.mark.parametrize("policy", ["fp32", "bf16", "fp16"])
def test_records_are_the_losses_that_the_script_saw_and_a_line_for_each_update(
    launch: Any, policy: str
) -> None:
    ran = launch(TRAIN, "a", policy=policy).ok
    assert (ran.records[0].policy, ran.records[0].argv) == (policy, ["a"])
    machine = {
        "torch": torch.__version__,
        "device_type": "cpu",
        "native_formats": ["bf16"],
    }  # see conftest.py
    assert ran.records[0].machine.items() >= machine.items()
    assert [r.kind for r in ran.records] == ["run", *["loss", "update"] * 5, "end"]
    assert [f"{r.loss.hex()} torch.float32" for r in ran.of("loss")] == ran.lines
    assert [r.index for r in ran.of("loss")] == [r.index for r in ran.of("update")] == list(range(5))
    times = [r.at for r in ran.records if r.kind in ("loss", "update")]
    assert times == sorted(times)
    assert times[-1] <= ran.of("end")[0].seconds
    scale = 65536.0 if policy == "fp16" else 1.0
    updates = {(u.moved, u.skipped, u.loss_scale, u.observed) for u in ran.of("update")}
    assert updates == {(True, False, scale, False)}
    assert (ran.of("end")[0].status, ran.of("end")[0].notes) == (0, [])
    assert "5 updates, 0 skipped; 5 backward passes" in ran.err


def test_everything_is_undone(launch: Any) -> None:
    amp, optim = torch.amp, torch.optim
    owners: Any = (torch, torch.autograd, torch.nn.Module, amp.autocast, amp.GradScaler)
    owners += (optim.Optimizer, optim.AdamW)

    def functions() -> dict[Any, Any]:
        return {(o, name): f for o in owners for name, f in vars(o).items() if callable(f)}

    launch(TRAIN, policy="fp32")  # PyTorch wraps the step of a class itself
    before = functions()
    launch(TRAIN, policy="fp16", seed_offset=2)
    assert [key for key, f in functions().items() if before[key] is not f] == []


def test_the_observed_step_is_the_third_update_and_tells_memory_and_formats(launch: Any) -> None:
    others = bytes_alive()
    ran = launch(TRAIN, policy="bf16", observe=True)
    assert [u.observed for u in ran.of("update")] == [False, False, True, False, False]
    (memory,) = ran.of("memory")
    parameters = 4 * (4 * 8 + 8 + 8 * 2 + 2)
    assert 4 * parameters <= memory.peak_bytes <= others + 1_000_000
    seen = {op.op: op for op in ran.of("ops")[0].ops}
    linear = seen.get("linear") or seen["addmm"]
    assert linear.calls == 2
    assert "bf16" in linear.observed
    assert "formats seen in one step" in ran.err
    # Watching changes no number.
    assert launch(TRAIN, policy="bf16").lines == ran.lines
    ran = launch(TRAIN.replace("range(5)", "range(2)"), policy="bf16", observe=True)
    assert ran.of("memory") == ran.of("ops") == []
    assert "fewer than three updates" in ran.notes


def test_errors_are_those_of_the_script_and_the_end_is_recorded(launch: Any) -> None:
    ran = launch(
        """
        import torch
        model = torch.nn.Linear(3, 3)
        for loss, keywords in [
            (model(torch.ones(2, 3)), {}),
            (model(torch.ones(2, 3)).sum(), {"gradient": torch.ones(3)}),
        ]:
            try:
                loss.backward(**keywords)
            except RuntimeError as error:
                print(str(error)[:50])
        class Model(torch.nn.Module):
            def forward(self, x):
                return model(x)
        Model()(torch.ones(2, 4))
        """,
        policy="fp16",
    )
    assert (ran.status, ran.of("end")[0].status, ran.records[-1].kind) == (1, 1, "end")
    assert "mat1 and mat2 shapes cannot be multiplied" in ran.err
    assert "return model(x)" in ran.err
    assert "mezzo/pytorch" not in ran.err
    assert ran.lines == [
        "grad can be implicitly created only for scalar out",
        "Mismatch in shape: grad_output[0] has a shape of t",
    ]


def test_no_model_and_no_backward(launch: Any) -> None:
    ran = launch("print('hello')", policy="bf16")
    assert ran.lines == ["hello"]
    assert [r.kind for r in ran.records] == ["run", "end"]
    assert "no model was called" in ran.err
    assert "never called backward" in ran.notes
    called = "with torch.no_grad():\n    print(torch.nn.Linear(2, 2)(torch.ones(1, 2)).dtype)"
    ran = launch(f"import torch\n{called}", policy="bf16")
    assert ran.lines == ["torch.float32"]
    assert "1 call of Linear in bf16" in ran.err


DOUBLE = TRAIN.replace("import sys\nimport torch", "import torch\ntorch.set_default_dtype(torch.float64)")
NOTHING = {
    "FP64": (DOUBLE, "the parameters of the called modules are float64"),
    "complex": (
        DOUBLE.replace("float64", "float32")
        .replace("nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))", "nn.Linear(4, 2, dtype=torch.cfloat)")
        .replace("model(x)", "model(x.cfloat()).abs()"),
        "the parameters of the called modules are complex64",
    ),
    "functional": (TRAIN.replace("out = model(x)", "out = x @ model[0].weight.T"), "no model was called"),
}  # fmt: skip


@pytest.mark.parametrize("policy", ["fp16", "nvfp4", "fp32"])
@pytest.mark.parametrize("name", NOTHING)
def test_a_run_in_which_nothing_was_lowered_says_so(launch: Any, name: str, policy: str) -> None:
    source, why = NOTHING[name]
    ran = launch(source, policy=policy).ok
    assert (why in ran.notes) is (policy != "fp32")
    assert (why in ran.err) is (policy != "fp32" or name == "functional")
    assert ran.err.count(NOTHING_RAN) <= 1
    assert f"in {policy} on cpu" not in ran.err
    assert ("no model was called" in ran.err) is (name == "functional")
    assert ("calls of" in ran.err) is (name == "FP64")


def test_auto_without_a_model_names_no_format(launch: Any) -> None:
    ran = launch(NOTHING["functional"][0], policy="auto").ok
    assert f"{NOTHING_RAN}another precision" in ran.err


def test_a_policy_that_keeps_all_layers_in_fp32_says_so(launch: Any) -> None:
    for kept, is_told in ("module.*=fp32", True), ("module.2=fp32", False):
        ran = launch(TRAIN, policy=f"bf16,{kept}", observe=True).ok
        assert (f"ran in fp32{NOTHING_RAN}bf16" in ran.notes) is is_told


def test_workers_of_a_data_loader_record_nothing(launch: Any) -> None:
    ran = launch(
        """
        import torch
        from torch.utils.data import DataLoader
        model = torch.nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for batch in DataLoader(torch.ones(6, 1), 3, num_workers=1, multiprocessing_context="fork"):
            optimizer.zero_grad()
            model(batch).sum().backward()
            optimizer.step()
        """,
        policy="bf16",
    ).ok
    assert [r.kind for r in ran.records] == ["run", "loss", "update", "loss", "update", "end"]


# What is said at the end

BAD = OverflowReport("invalid", module="net", op="log", remedies=["one", "two", "three", "four", "five"])
PROBE = OverflowReport("loss scale")


def overflows(*found: OverflowReport) -> list[OverflowRecord]:
    return [OverflowRecord(n, 0, 0.0, 1024.0, one) for n, one in enumerate(found)]


def test_what_is_told_of_findings() -> None:
    """Three remedies and where the others are; skipped steps without a finding; a place once, whatever its numbers."""
    lines = findings(overflows(BAD))
    assert lines[1:4] == ["  Try: one", "  Or: two", "  Or: three"]
    assert "2 more" in lines[-1]
    for found, skipped, said in (
        ([BAD] * 305, 325, "20 more skipped steps were not traced: Mezzo stops"),  # the tracer's limit
        ([], 4, "4 skipped steps"),
        ([PROBE], 1, "adjusted (normal)"),
    ):
        assert said in findings(overflows(*found), skipped=skipped)[-1]

    assert findings(overflows(*[BAD] * 304), skipped=324)[-1].endswith(
        "were not traced"
    )  # for another reason

    def too_large(size: float) -> OverflowReport:
        went_in = TensorFacts("input 0", [2], "fp32", size, 1.0, 0, 0, 0)
        came_out = TensorFacts("output", [2], "fp16", 1.0, 1.0, 0, 1, 0)
        return OverflowReport("overflow", "2", "linear", inputs=[went_in], outputs=[came_out])

    (told,) = findings(overflows(too_large(1e6), too_large(2e6), too_large(3e6)))
    found_by = [OverflowReport("loss", note=f"traced{note}") for note in ("; found by rank 1", "")]
    told_by = [findings(overflows(one), ranks=2, rank=rank) for rank, one in enumerate(found_by)]
    assert told_by[0] == told_by[1]  # so rank 0 prints it once
    assert told_by[0][0].count("rank 1") == 1
    for words in ("update 0 skipped, and 2 later ones", "linear in 2", "1e+06", "65504"):
        assert words in told


@pytest.mark.parametrize("policy", ["fp16", "bf16", "fp32"])
def test_a_run_in_fp16_says_what_shows_harm_that_skips_no_step(launch: Any, policy: str) -> None:
    ran = launch(TRAIN, "--bs", "9", policy=policy).ok
    assert ran.err.count(f" --precision {policy} -- --bs 9\n") == (policy == "fp16")
    assert (": mezzo compare " in ran.err.splitlines()[-1]) is (policy == "fp16")
    assert "mezzo compare" not in launch(TRAIN, policy="fp16,loss_scale=1073741824").err


def test_a_run_says_all_of_it(launch: Any) -> None:
    def told(steps: int, value: str, policy: str) -> str:
        source = TRAIN.replace("range(5)", f"range({steps})")
        source = source.replace("torch.randn(16, 4)", f"torch.full((16, 4), {value})")
        return str(launch(source, policy=policy).err)

    err = told(3, "1.0", "fp16,loss_scale=1073741824")
    assert "mezzo: 3 steps were skipped because the constant loss scale 2^30 is too large" in err
    assert "Try: mezzo run --precision fp16,loss_scale=67108864 " in err
    assert err.splitlines()[0].startswith("mezzo: NOTHING WAS TRAINED, because every update was skipped")
    assert "mezzo: loss scale 2^30 at the end" in err
    err = told(22, "3e20", "fp16,loss_scale=1024")
    assert err.startswith("mezzo: update 0 skipped: ")  # at once, before the script's end
    assert "an input of 3e+20 does not fit fp16, whose largest number is 65504. It is an input of the" in err
    assert "scale or normalize" not in err  # said once, as what to try
    assert "mezzo: update 0 skipped, and 21 later ones: " in err
    first, second, *_ = err.splitlines()
    assert (" Try: " in first, "NOTHING WAS TRAINED" in second) == (True, True)
    assert err.count("scale, normalize or clamp the input") == err.count("--precision bf16 ") == 1
    assert "mezzo:   What to try is in the message above, of update 0" in err

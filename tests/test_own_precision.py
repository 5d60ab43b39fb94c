"""A script's own mixed precision: switched off (`--own off`), or kept and recorded; masters for its 16-bit weights."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

from mezzo.cli.main import main
from mezzo.core.errors import UsageError
from mezzo.core.records import OWN_PRECISION, SWITCHED_OFF
from mezzo.pytorch.optim.adopt import adopt
from mezzo.pytorch.optim.with_masters import with_masters
from releases import before_torch

pytestmark = pytest.mark.usefixtures("forked")

SCRIPT = """
import torch
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
{made}
optimizer = {optimizer}
for _ in range({steps}):
    x = torch.randn(8, 64)
    {call}
    optimizer.zero_grad()
    {step}
print([float(p.detach().double().sum()).hex() for p in model.parameters()], model[0].weight.dtype)
"""
ADAMW = "torch.optim.AdamW(model.parameters(), lr=1e-3)"
CALL = "loss = (model(x).float() - x[:, :1]).square().mean()"
STEP = "loss.backward(); optimizer.step()"
SCALED = "scaler.scale(loss).backward(); scaler.step(optimizer); scaler.update()"
LOW = CALL.replace("model(x)", "model(x.bfloat16())")
WIDE = CALL.replace("model(x)", "model(x.bfloat16().float())")


def script(
    made: str = "", call: str = CALL, step: str = STEP, optimizer: str = ADAMW, steps: int = 12
) -> str:
    return SCRIPT.format(made=made, call=call, step=step, optimizer=optimizer, steps=steps)


AUTOCAST = script(call=f"with torch.autocast('cpu', torch.bfloat16):\n        {CALL}")
FP16 = script(
    "scaler = torch.amp.GradScaler('cpu', init_scale=2.0**20)",
    f"with torch.autocast('cpu', torch.float16):\n        {CALL}",
    SCALED,
)
MEZZO = "import mezzo"
SCALER = f"{MEZZO}; scaler = mezzo.GradScaler(init_scale=2.0**20)"
MIXED = script(
    MEZZO,
    f"with mp.autocast():\n        {CALL}",
    "mp.step(loss)",
    f"{ADAMW}; mp = mezzo.MixedPrecision(model, optimizer, 'fp16', loss_scale='dynamic(init=2**20)')",
)
CAST = "model[1].forward = lambda h: h."
LAYER = "model[0] = torch.nn.Linear(64, 64, dtype=torch.bfloat16)"
WARNS = "import warnings; warnings.simplefilter('ignore', FutureWarning)"
OFF: dict[str, tuple[str, str, list[str]]] = {  # the script, the same one in FP32, what is switched off
    "torch.autocast": (AUTOCAST, script(), ["torch.autocast bfloat16"]),
    "GradScaler": (FP16, script(), ["GradScaler", "torch.autocast float16"]),
    "torch.cpu.amp": (script(WARNS, f"with torch.cpu.amp.autocast():\n        {CALL}"), script(),
                      ["torch.autocast bfloat16"]),
    "set_autocast_enabled": (
        script("torch.set_autocast_dtype('cpu', torch.bfloat16); torch.set_autocast_enabled('cpu', True)"), script(),
        ["torch.set_autocast_enabled"]),
    "set_autocast_enabled in forward": (
        script("model.register_forward_pre_hook(lambda *_: torch.set_autocast_enabled('cpu', True))"), script(),
        ["torch.set_autocast_enabled"]),
    "a decorated forward": (script("model.forward = torch.autocast('cpu', torch.bfloat16)(model.forward)"), script(),
                            ["torch.autocast bfloat16"]),
    "bfloat16()": (script("model.bfloat16()", LOW), script("", WIDE), ["Sequential in bfloat16"]),
    "half()": (script("model = model.half().bfloat16()", LOW), script("", WIDE), ["Sequential in float16"]),
    "to(dtype)": (
        script("model = model.to('cpu', torch.bfloat16).to(dtype=torch.bfloat16, non_blocking=True)", LOW),
        script("", WIDE), ["Sequential in bfloat16"]),
    "to(tensor)": (script("model = model.to(torch.ones(1).bfloat16())", LOW), script("", WIDE),
                   ["Sequential in bfloat16"]),
    "an input of an inner module": (
        script(f"model.bfloat16(); model[1] = torch.nn.Identity()\n{CAST}to(torch.bfloat16)", LOW),
        script(f"model[1] = torch.nn.Identity()\n{CAST}bfloat16().float()", WIDE), ["Sequential in bfloat16"]),
    "set_default_dtype": ("import torch\ntorch.set_default_dtype(torch.bfloat16)\n" + script(), script(),
                          ["torch.set_default_dtype(torch.bfloat16)"]),
    "mezzo.MixedPrecision": (MIXED.replace("loss_scale=", "masters='fp32', loss_scale="), script(),
                             ["mezzo.MixedPrecision(fp16, masters=fp32, loss_scale=dynamic(init=2**20))"]),
    "mezzo.autocast": (script(SCALER, f"with mezzo.autocast('fp16'):\n        {CALL}", SCALED), script(),
                       ["mezzo.GradScaler", "mezzo.autocast fp16"]),
    "mezzo.amp": (
        script("from mezzo.amp import autocast; model.forward = autocast('cpu', torch.bfloat16)(model.forward)\n"
               f"{MEZZO}; mezzo.lower_weights(model, 'bf16')"), script(),
        ["mezzo.autocast bf16", "mezzo.lower_weights(Sequential)"]),
    "dtype= of a layer": (script(LAYER, WIDE), script(f"{LAYER}.float()", WIDE), ["Sequential in bfloat16"]),
}  # fmt: skip


@pytest.mark.parametrize("name", OFF)
def test_the_fp32_run_is_that_of_the_script_in_fp32(launch: Any, name: str) -> None:
    source, fp32, settings = OFF[name]
    off = launch(source, policy="fp32", own="off").ok
    assert off.lines == launch(fp32, policy="fp32").lines
    said = [n.removeprefix(SWITCHED_OFF) for n in off.of("end")[-1].notes if n.startswith(SWITCHED_OFF)]
    assert said[: len(settings)] == settings
    assert len(off.of("update")) == len(off.of("loss")) == 12


REPLACED = (
    "torch.autocast",
    "GradScaler",
    "a decorated forward",
    "bfloat16()",
    "mezzo.MixedPrecision",
    "mezzo.amp",
)


@pytest.mark.parametrize("name", REPLACED)
def test_another_policy_replaces_it(launch: Any, name: str) -> None:
    source, fp32, _ = OFF[name]
    assert launch(source, policy="bf16", own="off").lines == launch(fp32, policy="bf16").lines


@pytest.mark.parametrize("context", ["torch.autocast('cpu', torch.bfloat16)", "mezzo.autocast('bf16')"])
def test_a_context_in_a_compiled_function_is_switched_off(launch: Any, context: str) -> None:
    before_torch(2, 12, "Dynamo does not see that it is switched off (docs/run.md)")
    body = f"import mezzo\ndef f(x):\n    with {context}:\n        return model(x)\n"
    source = script(f"{body}f = torch.compile(f, backend='eager')", CALL.replace("model(x)", "f(x)"))
    off = launch(source, policy="fp32", own="off").ok
    assert off.lines == launch(script(), policy="fp32").lines
    what = "mezzo.autocast in a compiled function" if "mezzo" in context else "torch.autocast bfloat16"
    assert f"{SWITCHED_OFF}{what}" in off.notes
    assert launch(source, policy="bf16", own="off").lines == launch(script(), policy="bf16").lines
    if "mezzo" in context:
        used = f"{OWN_PRECISION}it uses mezzo.autocast itself (script.py line 7)"
        assert used in launch(source, own="record").notes


@pytest.mark.parametrize(
    "lines",
    [
        "torch.nn.Linear(2, 2).requires_grad_(False).bfloat16().half()",
        "model.to('cpu'); model.to(torch.float64).float()",
        "with torch.autocast('cpu', enabled=False):\n    model(torch.randn(1, 64))",
        "torch.set_default_dtype(torch.float64); torch.set_default_dtype(torch.float32)",
    ],
)
def test_what_needs_no_switch(launch: Any, lines: str) -> None:
    ran = launch(script(lines), policy="fp32", own="off").ok
    assert SWITCHED_OFF not in ran.notes


def test_a_frozen_model_keeps_its_format(launch: Any) -> None:
    made = "frozen = torch.nn.Linear(64, 64).requires_grad_(False).bfloat16()"
    ran = launch(script(made, f"print(frozen(x.bfloat16()).dtype)\n    {CALL}"), policy="fp32", own="off")
    assert ran.lines[0] == "torch.bfloat16"
    assert SWITCHED_OFF not in ran.notes


@pytest.mark.parametrize(
    ("source", "use"),
    [
        (script("import mezzo; mezzo.calibrate(model, None, [])"), r"it uses mezzo\.calibrate itself"),
        (
            script(
                call="loss = (x.bfloat16() @ w).float().square().mean()",
                optimizer="torch.optim.SGD([w := torch.nn.Parameter(torch.ones(64, 1).bfloat16())])",
            ),
            r"SGD trains bf16 parameters; .*\.float\(\)",
        ),
    ],
)
def test_what_is_not_switched_off_ends_the_run(launch: Any, source: str, use: str) -> None:
    with pytest.raises(UsageError, match=f"--own off does not switch this off: {use}"):
        launch(source, policy="fp32", own="off")


def test_every_patch_is_put_back(launch: Any) -> None:
    import mezzo

    kinds: Any = (torch.amp.autocast, torch.amp.GradScaler, torch.nn.Module, torch.optim.Optimizer)
    kinds += (mezzo.GradScaler, mezzo.MixedPrecision)
    before = [dict(vars(kind)) for kind in kinds], torch.set_default_dtype
    for own, source in itertools.product(("off", "record"), (FP16, MIXED)):
        launch(source, policy="fp32", own=own)
        after = [dict(vars(kind)) for kind in kinds], torch.set_default_dtype
        assert after == before


# Recorded as it is.


@pytest.mark.parametrize("name", ["GradScaler", "mezzo.GradScaler", "mezzo.MixedPrecision", "released"])
def test_its_losses_are_unscaled_and_its_skipped_steps_are_counted(launch: Any, name: str) -> None:
    released = MIXED.replace("loss_scale=", "release_gradients=True, clip_norm=1.0, loss_scale=")
    sources = {"GradScaler": FP16, "mezzo.MixedPrecision": MIXED, "released": released}
    source = sources.get(name, OFF["mezzo.autocast"][0])
    printed = source.replace("optimizer.zero_grad()", "print(loss.item().hex()); optimizer.zero_grad()")
    ran = launch(printed, policy="fp32", own="record").ok
    lines: list[str] = []
    exec(printed, {"print": lambda *values: lines.append(" ".join(map(str, values)))})
    assert ran.lines == lines  # changes nothing
    assert [record.loss for record in ran.of("loss")] == [float.fromhex(text) for text in lines[:12]]
    skipped = [update.skipped for update in ran.of("update")]
    assert len(skipped) == 12
    assert 0 < sum(skipped) < 12
    scales = [update.loss_scale for update in ran.of("update")]
    assert skipped[:-1] == [after == before / 2 for before, after in itertools.pairwise(scales)]
    assert scales[0] == 2.0**20
    used = name.replace("released", "mezzo.MixedPrecision")
    assert f"{OWN_PRECISION}it uses {used} itself (script.py line" in ran.notes
    assert (ran.of("run")[0].policy, ran.of("run")[0].machine["device_type"]) == ("own", "cpu")


def test_a_fused_optimizer_that_skips_is_counted_and_a_loss_divided_after_it_was_scaled(launch: Any) -> None:
    divided = FP16.replace("scaler.scale(loss).backward()", "(scaler.scale(loss) / 4 + 0).backward()")
    plain, fused, quarter = (
        launch(source, policy="fp32", own="record")
        for source in (FP16, FP16.replace("lr=1e-3", "lr=1e-3, fused=True"), divided)
    )
    assert [u.skipped for u in fused.of("update")] == [u.skipped for u in plain.of("update")]
    assert quarter.of("loss")[0].loss == pytest.approx(plain.of("loss")[0].loss / 4)


def test_memory_is_measured(launch: Any) -> None:
    assert launch(AUTOCAST, policy="fp32", own="record", observe=True).of("memory")[0].peak_bytes > 0


# 16-bit weights.

WEIGHTS = script("model.bfloat16()", LOW)


@pytest.mark.parametrize("own", ["keep", "record"])
def test_what_weights_without_masters_lose_is_measured(launch: Any, own: str) -> None:
    ran = launch(WEIGHTS.replace("lr=1e-3", "lr=1e-5"), policy="fp32", own=own)
    (note,) = [note for note in ran.of("end")[-1].notes if "without FP32 masters" in note]
    assert "AdamW trains bf16 weights" in note
    assert "in 5 early steps" in note
    namespace: dict[str, Any] = {}
    body, _, _ = WEIGHTS.replace("lr=1e-3", "lr=1e-5").partition("print(")
    counting = body.replace("optimizer.step()", "optimizer.step(); count()").replace(
        "optimizer.zero_grad()",
        "old = [p.detach().clone() for p in model.parameters()]; optimizer.zero_grad()",
    )
    counts = [0, 0]

    def count() -> None:
        if namespace["_"] < 5:
            for p, old in zip(namespace["model"].parameters(), namespace["old"]):
                counts[0] += int(((p == old) & (p.grad != 0)).sum())
                counts[1] += int((p.grad != 0).sum())

    namespace["count"] = count
    exec(counting, namespace)
    assert f"{100 * counts[0] / counts[1]:.0f} % of the updates" in note
    assert "mezzo run --masters split" in ran.notes
    closure = "optimizer.step(lambda: [optimizer.zero_grad(), loss.backward()])"  # as Lightning does
    in_closure = launch(WEIGHTS.replace("lr=1e-3", "lr=1e-5").replace(STEP, closure), policy="fp32", own=own)
    assert note in in_closure.of("end")[-1].notes


@pytest.mark.parametrize(
    "source",
    [
        script(),
        WEIGHTS.replace("lr=1e-3", "lr=0.0"),
        "import mezzo" + WEIGHTS.replace("torch.optim.AdamW", "mezzo.optim.AdamW"),
    ],
)
def test_nothing_is_said_of_other_weights(launch: Any, source: str) -> None:
    ran = launch(source, policy="fp32", own="record").ok
    assert "without FP32 masters" not in ran.notes


SGD = "torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)"


@pytest.mark.parametrize(
    ("optimizer", "masters", "by_hand"),
    [
        (ADAMW, "split", lambda o: adopt(o, masters="split", state="fp32")),
        (SGD, "split", lambda o: adopt(o, masters="split", state="fp32")),
        (ADAMW, "fp32", lambda o: adopt(o, masters="fp32", state="fp32")),
        (ADAMW.replace("AdamW", "Adagrad"), "split", with_masters),
    ],
)
def test_masters_are_those_of_the_library(launch: Any, optimizer: str, masters: str, by_hand: Any) -> None:
    source = script("model.bfloat16()", LOW, optimizer=optimizer)
    ran = launch(source, policy="fp32", own="record", masters=masters).ok
    lines: list[str] = []
    made = source.replace("\nfor _", "\nmade(optimizer)\nfor _").replace("print(", "out(")
    exec(made, {"made": by_hand, "out": lambda *values: lines.append(" ".join(map(str, values)))})
    assert ran.lines == lines
    bound = source.replace("\nfor _", "\nstep = optimizer.step\nfor _").replace("optimizer.step()", "step()")
    assert launch(bound, policy="fp32", own="record", masters=masters).lines == lines
    assert "masters under " in ran.notes
    assert "without FP32 masters" not in ran.notes


def test_a_checkpoint_with_masters_loads_in_plain_pytorch_and_continues_to_the_bit(
    launch: Any, tmp_path: Path
) -> None:
    file = tmp_path / "checkpoint.pt"
    save = f"torch.save([model.state_dict(), optimizer.state_dict(), torch.get_rng_state()], {str(file)!r})"
    load = f"saved = torch.load({str(file)!r}); model.load_state_dict(saved[0])"
    keywords = {"policy": "fp32", "own": "record", "masters": "split"}
    whole = launch(WEIGHTS, **keywords).lines
    launch(script("model.bfloat16()", LOW, steps=5) + save, **keywords)
    resumed = script("model.bfloat16()", LOW, steps=7).replace(
        "\nfor _", f"\n{load}; optimizer.load_state_dict(saved[1]); torch.set_rng_state(saved[2])\nfor _"
    )
    assert launch(resumed, **keywords).lines == whole
    plain: dict[str, Any] = {"print": lambda *_: None}
    exec(resumed, plain)
    assert plain["model"][0].weight.dtype is torch.bfloat16
    assert type(plain["optimizer"]) is torch.optim.AdamW


@pytest.mark.parametrize(
    ("convert", "factor", "policy"),
    [("bfloat16", "1e30", "bf16,masters=split,loss_scale=1"), ("half", "2e4", "fp16,loss_scale=1")],
)
def test_a_run_with_masters_that_ends_in_nan_names_a_command_that_finds_it(
    launch: Any, convert: str, factor: str, policy: str
) -> None:
    source = script(f"model.{convert}()", LOW.replace("x.bfloat16()", f"x.{convert}() * {factor}"), steps=2)
    ran = launch(source, policy="fp32", own="record", masters="split")
    assert f"mezzo run --own off --precision {policy} " in ran.notes
    again = launch(source, policy=policy, own="off")
    assert any(record.finding.op for record in again.of("overflow"))


def test_masters_without_16_bit_weights_change_nothing(launch: Any) -> None:
    ran = launch(script(), policy="fp32", own="record", masters="split")
    assert "--masters split changed nothing" in ran.notes
    assert ran.lines == launch(script(), policy="fp32").lines


@pytest.mark.heavy
@pytest.mark.parametrize(
    "words", ["calibrate train.py", "batch-size --vary={} --max 8 --precision bf16 train.py {}"]
)
def test_commands_that_choose_a_precision_switch_it_off(
    words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(FP16, encoding="utf-8")
    assert main(words.split()) == 0
    printed = "".join(capsys.readouterr())
    assert "switched off: the script's torch.autocast float16" in printed
    assert "switched off: the script's GradScaler" in printed


def test_a_remedy_s_command_switches_it_off_as_well(launch: Any) -> None:
    large = "model[1].forward = lambda h: h * 1e6"
    source = {"off": AUTOCAST.replace("optimizer =", f"{large}\noptimizer ="), "keep": script(large)}
    for own, words in (
        ("off", "mezzo run --own off --precision fp16,"),
        ("keep", "mezzo run --precision fp16,"),
    ):
        ran = launch(source[own], policy="fp16", own=own)
        remedies = ran.of("overflow")[0].finding.remedies
        assert any(words in one for one in remedies), remedies

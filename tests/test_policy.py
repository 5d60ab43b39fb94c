"""Policies: three forms of one value, what each refuses and how it says so."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import mezzo
from mezzo.core.errors import UnknownNameError, UsageError
from mezzo.core.loss_scale import DynamicLossScale, NoLossScale, StaticLossScale
from mezzo.core.masters import bytes_per_parameter
from mezzo.core.policy import PRESETS, Policy, policy
from mezzo.core.policy_text import KEYS, matches
from mezzo.core.rules import RULES, Rule
from mezzo.pytorch.dtypes import DTYPES

FORMATS = ("fp32", "bf16", "fp16")
component = st.from_regex(r"[A-Za-z0-9_*?-]{1,6}", fullmatch=True)
pattern = st.lists(component, min_size=1, max_size=4).map(".".join)
foreign = st.from_regex(r"[a-z_]{1,5}::[a-z_]{1,8}", fullmatch=True)
rules = st.sampled_from([rule.value for rule in Rule])
ops = st.dictionaries(st.one_of(st.sampled_from(sorted(RULES)), foreign), rules, max_size=4)
modules = st.dictionaries(pattern, st.sampled_from(FORMATS), max_size=4)


scales = st.one_of(
    st.sampled_from(["none", "dynamic", "auto", "1024", "2**10", "dynamic(init=2 ** -3, hysteresis=2)"]),
    st.builds("dynamic(growth_factor={},patience={})".format, st.floats(1.25, 16.0), st.integers(1, 999)),
    st.floats(2.0**-100, 2.0**100).map(str),
)
MASTERS_OF = {"fp32": ["fp32"], "bf16": ["fp32", "split", "split8", "none"], "fp16": ["fp32"]}


@st.composite
def policies(draw: st.DrawFn) -> Policy:
    compute = draw(st.sampled_from((*FORMATS, "auto")))
    other = {"bf16": "fp16", "fp16": "bf16"}.get(compute)
    stored = st.sampled_from([fmt for fmt in FORMATS if fmt != other])
    params = draw(stored)
    masters = draw(st.sampled_from(["auto", *MASTERS_OF[params]]))
    # Where params say nothing that masters don't, they may be left out.
    implied = compute != "auto" and params == (compute if masters != "auto" else "fp32")
    return Policy(
        compute,
        "auto" if implied and draw(st.booleans()) else params,
        "fp32",
        draw(scales),
        tuple(draw(ops).items()),
        tuple(draw(modules).items()),
        masters,
        draw(st.sampled_from(["fp32", "bf16", "int8"])),
    )


@given(policies())
def test_string_and_back(value: Policy) -> None:
    assert policy(str(value)) == value
    assert str(policy(str(value))) == str(value)
    assert hash(policy(str(value))) == hash(value)
    assert eval(repr(value), {"policy": mezzo.policy}) == value
    assert pickle.loads(pickle.dumps(value)) == value
    assert (
        value.fingerprint() == policy(str(value)).fingerprint() != policy("bf16,op.tan=lower").fingerprint()
    )


@given(policies())
def test_toml_and_back(tmp_path_factory: pytest.TempPathFactory, value: Policy) -> None:
    path = tmp_path_factory.mktemp("toml") / "policy.toml"
    path.write_text(value.to_toml(), encoding="utf-8")
    assert policy(path) == policy(str(path)) == Policy.from_toml(path) == value


# The string, its meaning, and the one way in which it is printed.

STRINGS = [
    ("fp32", Policy(), "fp32"),
    ("bf16", Policy("bf16", loss_scale="none"), "bf16"),
    ("fp16", Policy("fp16", loss_scale="dynamic"), "fp16"),
    ("auto", Policy("auto", loss_scale="auto"), "auto"),
    ("params=fp32,compute=bf16,output=fp32", Policy("bf16"), "bf16"),
    ("bf16,masters=split", Policy("bf16", "bf16", masters="split"), "bf16,masters=split"),
    ("bf16,params=bf16,masters=none", Policy("bf16", "bf16", masters="none"), "bf16,masters=none"),
    (
        "state=int8,masters=split8,compute=bf16",
        Policy("bf16", "bf16", masters="split8", state="int8"),
        "bf16,masters=split8,state=int8",
    ),
    ("bf16,recompute=silu+gelu", Policy("bf16", recompute="gelu+silu"), "bf16,recompute=gelu+silu"),
    ("bf16,loss_scale=2**10", Policy("bf16", loss_scale="1024"), "bf16,loss_scale=1024"),
    (
        "bf16,op.softmax=fp32,module.head=fp32,loss_scale=1024",
        Policy("bf16", loss_scale="1024", ops=(("softmax", "fp32"),), modules=(("head", "fp32"),)),
        "bf16,loss_scale=1024,op.softmax=fp32,module.head=fp32",
    ),
    ("bf16,op.aten::tanh=fp32", Policy("bf16", ops=(("tanh", "fp32"),)), "bf16,op.tanh=fp32"),
    ("bf16,op.aten::sign=fp32", Policy("bf16", ops=(("aten::sign", "fp32"),)), "bf16,op.aten::sign=fp32"),
    ("bf16,module.head=fp16", Policy("bf16", loss_scale="dynamic", modules=(("head", "fp16"),)), None),
]


@pytest.mark.parametrize(("text", "value", "printed"), STRINGS)
def test_strings(text: str, value: Policy, printed: str | None) -> None:
    assert policy(text) == value
    assert printed is None or str(policy(text)) == policy(text).name == printed


def test_the_order_of_patterns_matters_and_that_of_ops_does_not() -> None:
    assert policy("bf16,op.sum=fp32,op.mean=fp32") == policy("bf16,op.mean=fp32,op.sum=fp32")
    assert policy("bf16,module.a=fp32,module.*=bf16") != policy("bf16,module.*=bf16,module.a=fp32")


def test_presets() -> None:
    scales = dict.fromkeys(PRESETS, "none") | {"fp16": "dynamic", "auto": "auto"}
    assert {name: value.loss_scale for name, value in PRESETS.items()} == scales
    assert [name for name, value in PRESETS.items() if value.is_fp32] == ["fp32"]
    for departing in ("module.head=bf16", "params=bf16", "state=bf16"):
        assert not policy(f"fp32,{departing}").is_fp32


@pytest.mark.parametrize(
    ("text", "stored"),
    [
        ("bf16", "fp32 fp32 fp32"),
        ("bf16,params=bf16", "bf16 split fp32"),
        ("bf16,masters=split8,state=int8", "bf16 split8 int8"),
        ("fp16,masters=fp32,state=bf16", "fp16 fp32 bf16"),
    ],
)
def test_how_weights_masters_and_moments_are_stored(text: str, stored: str) -> None:
    value = policy(text)
    assert f"{value.params} {value.masters} {value.state}" == stored


def test_auto_is_resolved_with_the_masters_asked_for_and_the_loss_scale_of_its_format() -> None:
    assert policy("auto,params=bf16,masters=split8").resolved("bf16") == policy("bf16,masters=split8")
    assert policy("auto,params=bf16").resolved("fp32") == policy("fp32,params=bf16")
    with pytest.raises(UsageError, match="pass between two 16-bit formats"):
        policy("auto,params=bf16").resolved("fp16")
    auto = policy("auto,op.tanh=fp32")
    assert auto.resolved("fp16") == policy("fp16,op.tanh=fp32")
    assert auto.resolved("fp16").loss_scale == "dynamic"
    assert auto.resolved("bf16").loss_scale == auto.resolved("fp32").loss_scale == "none"
    assert policy("bf16").resolved("fp16") == policy("bf16")
    with pytest.raises(UsageError, match="Resolve it first"):
        auto.make_loss_scale()


def test_loss_scales() -> None:
    dynamic = DynamicLossScale(init=1024.0, floor=1.0, hysteresis=2)
    for text, state in {
        "none": NoLossScale(),
        "1024": StaticLossScale(1024.0),
        "2**-3": StaticLossScale(0.125),
        "2^-3": StaticLossScale(0.125),
        "dynamic(init=2**10,floor=1,hysteresis=2)": dynamic,
    }.items():
        assert Policy("fp16", loss_scale=text).make_loss_scale() == state


REFUSED = [
    ("compute=f15", r"unknown format 'f15'\. .* Did you mean 'fp16'\?$"),
    ("bf15", r"'bf15'\. Use one of auto, bf16, fp16, fp32, fp8, fp8-block, mxfp8, nvfp4, tf32\."),
    ("e4m3fn", "mezzo formats e4m3fn.*fp8 multiplies in it"),
    ("fp8,scaling=tensorwide", "'tensorwide'.*Did you mean 'tensorwise'"),
    ("bf16,op.linear=fp8", "unknown rule .fp8.*internal_fp32.*op.linear=lower"),
    ("bf16,params=fp32,masters=split", r"Leave masters out, or .*params=bf16"),
    ("fp16,masters=split", r"bf16 only\. Use bf16, or masters=fp32 in mezzo\.MixedPrecision"),
    ("auto,masters=split", r"compute=bf16, or params=bf16"),
    ("bf16,op.nn.functional.sofmax=fp32", r"unknown op 'nn.functional.sofmax'.*'softmax'\?.*mylib::"),
    ("bf16,op.softmax=fp32,op.aten::softmax=lower", "op.softmax is given twice"),
    ("bf16,module.a..b=fp32", "'a..b' is not a module pattern"),
    ("bf16,modul.x=fp32", "unknown key 'modul.x'.*'module.PATTERN'"),
    ("bf16,reduction=bf16", r"'reduction'\. Did you mean 'reduce'\? .*'module\.reduction=bf16'"),
    ("bf16,head=fp32", r"module\.head=fp32"),  # a module without its key
    ("bf16,modules.head=fp32", r"module\.head=fp32"),
    ("bf16 op.exp=fp32; module.a = fp32", "commas.*'bf16,op.exp=fp32,module.a = fp32'"),
    ("BF16-true", "'bf16,masters=none'.*'bf16,masters=split'"),
    ("16-true", "'fp16,masters=fp32'"),
    ("bf16,fp16", "'fp16' is not key=value.*commas"),
    ("module.a=fp32, bf16", "Write 'bf16,module.a=fp32'"),
    ("amp", "Did you mean 'auto'"),
    ("f32", "Did you mean 'fp32'"),
    ("True", "Did you mean 'auto'"),
    ("O1", "Did you mean 'fp16'"),  # a level of Apex
    ("bfloat", "Did you mean 'bf16'"),
    ("params=bf16,compute=fp16", r"Use params=fp32 or params=fp16\."),
    ("fp16,loss_scale=dynamic(inits=3)", "unknown setting .* 'inits'.*Did you mean 'init'"),
]


@pytest.mark.parametrize(("text", "words"), REFUSED)
def test_refused_with_the_fix(text: str, words: str) -> None:
    with pytest.raises(UsageError, match=words) as caught:
        policy(text)
    assert f"policy {text!r}" in str(caught.value)
    assert isinstance(caught.value, UnknownNameError) or "unknown" not in str(caught.value)


TOML = [
    # text, message
    ('comptue = "bf16"', r": comptue: unknown key 'comptue'\. .*Did you mean 'compute'"),
    ('compute = "bf16"\n\n[ops]\nsofmax = "fp32"', ": ops.sofmax: unknown op 'sofmax'.*'softmax'"),
    ('[modules]\nhead = "fp32"\nblocks.0.norm = "f32"', ": modules.blocks.0.norm: unknown format 'f32'"),
    ("[modules]\nhead = 3", ": modules.head: 3 is not a string"),
    ("\n\nloss_scale = 0", ": loss_scale: scale is 0"),
    ('ops = "x"', r": ops: it is a table. Write a line \[ops\]"),
    ('[compute]\nformat = "bf16"', ": compute.format: compute is a single value"),
    ("compute = bf16", "is not TOML: .*line 1"),
]


@pytest.mark.parametrize(("text", "words"), TOML)
def test_a_wrong_toml_file_names_the_key(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "policy.toml"
    for absent, fix in ((path, "No such file"), ("nvfp4,cal/policy.toml", r"such as cal/policy\.toml alone")):
        with pytest.raises(UsageError, match=fix):
            policy(absent)
    path.write_text(text, encoding="utf-8")
    with pytest.raises(UsageError, match=words) as caught:
        policy(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("name", ["mine.toml", "Mine.TOML"])
def test_a_toml_file_as_a_person_writes_it(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_text(
        'compute = "fp16"\nloss_scale = 1024\n\n[ops]\nsoftmax = "lower"\n"mylib::fused" = "fp32"\n\n'
        '[modules]\nhead = "fp32"\nblocks.0.norm = "bf16"\n"blocks.*.norm" = "fp32"\n',
        encoding="utf-8",
    )
    assert str(policy(str(path))) == (
        "fp16,loss_scale=1024,op.mylib::fused=fp32,op.softmax=lower,"
        "module.head=fp32,module.blocks.0.norm=bf16,module.blocks.*.norm=fp32"
    )


DECISIONS = [
    # policy, op, rule, source
    ("bf16", "linear", "lower", "table"),
    ("bf16", "aten::softmax.int", "fp32", "table"),
    ("bf16,op.softmax=lower", "softmax", "lower", "policy"),
    ("fp16", "sum", "fp32", "table"),
    ("bf16", "binary_cross_entropy", "banned", "table"),
    ("bf16,op.binary_cross_entropy=fp32", "binary_cross_entropy", "fp32", "policy"),
]


@pytest.mark.parametrize(("text", "op", "rule", "source"), DECISIONS)
def test_rules(text: str, op: str, rule: str, source: str) -> None:
    decision: Any = policy(text).rule_for(op)
    assert (decision.rule, decision.source) == (Rule(rule), source)
    assert decision.reason


MATCHES = [
    # pattern, paths that match, paths that don't
    ("head", ["head"], ["heads", "head.fc", "model.head", ""]),
    ("blocks.0.norm", ["blocks.0.norm"], ["blocks.10.norm", "blocks.0.norm1", "blocksx0.norm"]),
    ("blocks.*.norm", ["blocks.0.norm", "blocks.12.norm"], ["blocks.norm", "blocks.0.attn.norm"]),
    ("**.norm", ["norm", "a.norm", "a.b.c.norm"], ["norm.a", "a.norm1"]),
    ("enc.**", ["enc", "enc.0", "enc.0.a"], ["encoder", "dec.enc"]),
    ("a.**.b", ["a.b", "a.x.b", "a.x.y.b"], ["a", "b", "a.b.c"]),
    ("a?b", ["a?b"], ["axb"]),
]


@pytest.mark.parametrize(("glob", "yes", "no"), MATCHES)
def test_module_patterns(glob: str, yes: list[str], no: list[str]) -> None:
    assert [path for path in yes + no if matches(glob, path)] == yes


def test_the_last_matching_pattern_decides() -> None:
    value = policy("bf16,module.**.norm=fp32,module.blocks.*.norm=bf16,module.blocks.0.norm=fp16")
    paths = {"norm": "fp32", "blocks.1.norm": "bf16", "blocks.0.norm": "fp16", "head": None}
    assert {path: value.format_for_module(path) for path in paths} == paths


def test_notes_say_what_is_seldom_meant() -> None:
    assert policy("fp16").notes == ()
    (scale,), (rule,) = policy("fp16,loss_scale=none").notes, policy("bf16,op.sigmoid=lower").notes
    assert scale.startswith("fp16 without a loss scale")
    assert rule.startswith("op.sigmoid=lower in place of fp32: near 1")


def test_fingerprints_are_the_same_in_every_process() -> None:
    code = "from mezzo.core.policy import policy; print(policy('fp16,op.tanh=lower').fingerprint())"
    for seed in ("0", "1"):
        command, environment = [sys.executable, "-c", code], os.environ | {"PYTHONHASHSEED": seed}
        done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
        assert done.stdout.split() == [policy("fp16,op.tanh=lower").fingerprint()]


# The documentation, as far as it can be run.

PAGES = Path(__file__).parents[1] / "docs"


def test_the_measured_bytes_are_those_of_the_table() -> None:
    text = (PAGES / "memory.md").read_text(encoding="utf-8")
    table = text.partition("<!-- modes -->")[2].partition("<!-- /modes -->")[0]
    rows = [
        [cell.strip(" `") for cell in row.strip("|").split("|")] for row in table.strip().splitlines()[2:]
    ]
    assert len({(weights, masters) for weights, masters, *_ in rows}) == 5
    for weights, masters, adamw, *_ in rows:
        stored = ("fp32", "none") if weights == "FP32" else ("bf16", masters)
        for state, figure in zip(("fp32", "bf16", "int8"), adamw.split(", ")):
            assert float(figure) == round(bytes_per_parameter(*stored, state), 2), (masters, state)


def test_the_document_explains_every_rule_and_key() -> None:  # test_readme.py compares the op table
    text = (PAGES / "policies.md").read_text(encoding="utf-8")
    for word in (*Rule, *KEYS, *PRESETS):
        assert f"\n| `{word}` |" in text, word


def test_output_of_version_0_1_is_ignored(tmp_path: Path) -> None:
    path = tmp_path / "policy.toml"
    path.write_text('compute = "bf16"\noutput = "fp32"\n', encoding="utf-8")
    assert policy(path) == policy("bf16,output=fp32") == Policy("bf16", output="fp32") == Policy("bf16")
    with pytest.warns(DeprecationWarning, match="output=fp16"):
        assert policy("bf16,output=fp16") == Policy("bf16")


def test_built_in_python() -> None:
    value: Any = Policy("bf16", ops={"softmax": "lower"}, modules={"head": "fp32"})  # type: ignore[arg-type]
    assert value == policy("bf16,op.softmax=lower,module.head=fp32")
    with pytest.raises(UnknownNameError, match=r"^policy 'op.sofmax=fp32': unknown op"):
        Policy(ops=(("sofmax", "fp32"),))
    with pytest.raises(UnknownNameError, match=r"mezzo\.policy\('bf16,module\.head=fp32'\)"):
        Policy("bf16,module.head=fp32")


def mixed_precision(precision: Any) -> str:
    model = torch.nn.Linear(4, 4)
    mp = mezzo.MixedPrecision(model, torch.optim.SGD(model.parameters(), lr=0.1), precision)
    mp.close()
    return mp.precision


# Where a precision is given -> what it does there, as a text to compare.

TAKES: dict[str, Callable[[Any], str]] = {
    "policy": lambda p: str(policy(p)),
    "Policy(params=)": lambda p: str(Policy("fp32" if "32" in str(p) else p, params=p)),
    "Policy(modules=)": lambda p: str(Policy(modules=(("head", p),))),
    "autocast": lambda p: str(mezzo.autocast(p, "cpu").policy),
    "MixedPrecision": mixed_precision,
    "explain": lambda p: str(mezzo.explain(torch.nn.Linear(4, 4), torch.ones(2, 4), precision=p)),
}


OTHER_NAMES = {
    "fp32": ("float32", "32", "32-true", "single"),
    "fp16": ("float16", "half", "16", "16-mixed", "fp16-mixed", "mixed_float16"),
    "bf16": ("bfloat16", "bf16-mixed", "mixed_bfloat16", "BF16"),
}


@pytest.mark.parametrize("where", TAKES)
def test_a_torch_dtype_or_usual_name_is_a_precision_and_other_values_are_not(where: str) -> None:
    for name in FORMATS:
        for same in (DTYPES[name], *OTHER_NAMES[name]):
            assert TAKES[where](same) == TAKES[where](name)
    if "(" not in where:
        wrongs: tuple[Any, ...] = (torch.int8, torch.float64, torch.float8_e4m3fn, b"bf16", float)
        for wrong in (*wrongs, None) if where == "policy" else wrongs:
            with pytest.raises(UsageError) as told:
                TAKES[where](wrong)
            assert all(word in str(told.value) for word in (repr(wrong), "torch.bfloat16", ".toml"))


def test_a_torch_dtype_is_a_format_of_state_and_of_weights() -> None:
    model = torch.nn.Linear(4, 4)
    optimizer = mezzo.optim.AdamW(model.parameters(), state=torch.bfloat16)
    assert optimizer.param_groups[0]["state"] == "bf16"
    mezzo.lower_weights(model, torch.bfloat16)
    assert model.weight.dtype is torch.bfloat16


def test_a_dtype_in_a_compiled_function() -> None:
    @torch.compile(backend="eager", fullgraph=True)
    def product(x: torch.Tensor) -> torch.Tensor:
        with mezzo.autocast(torch.bfloat16, "cpu"):
            return x @ x

    assert product(torch.ones(2, 2)).dtype is torch.bfloat16

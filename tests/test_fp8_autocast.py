"""Policies whose linear layers multiply in 8 or 4 bits: which layers, how that is told, until when."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import mezzo
from eight_bits import fp8_linear
from mezzo.core.errors import UsageError
from mezzo.core.policy import policy
from mezzo.pytorch.autocast.modules import heads_of, with_heads
from mezzo.pytorch.autocast.plan import plan
from run_scripts import Ran
from trainers import stepped


def values(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


class Tied(nn.Module):
    """A language model whose head shares the embedding's weight, and is not the last layer that it defines."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(48, 32), nn.Linear(32, 48, bias=False)
        self.head.weight = self.embed.weight
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)
        self.last = nn.Linear(32, 32)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        return self.head(self.last(x + self.down(F.gelu(self.up(x)))))


@pytest.mark.parametrize("scaling", ["tensorwise", "rowwise"])
def test_a_linear_layer_is_multiplied_in_fp8(scaling: str) -> None:
    x, weight, bias = values(5, 32), values(16, 32, seed=1), values(16, seed=2)
    with mezzo.autocast(f"fp8,scaling={scaling}", "cpu"):
        out = F.linear(x, weight, bias)
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, fp8_linear(x, weight, bias, scaling=scaling))
    with mezzo.autocast("bf16", "cpu"):
        assert not torch.equal(out, F.linear(x, weight, bias))


@pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")  # of PyTorch's own forward mode
@pytest.mark.parametrize("name", ["fp8", "mxfp8", "nvfp4"])
def test_linear_layers_are_quantized_in_torch_func(name: str) -> None:
    """In forward mode they are bf16's: a quantized layer has no derivative of that kind."""
    x, weight, bias = values(2, 5, 32), values(32, 32, seed=1), values(32, seed=2)

    def loss(weight: Tensor, x: Tensor, precision: str = name) -> Tensor:
        with mezzo.autocast(precision, "cpu"):
            return F.linear(x, weight, bias).float().square().sum()

    leaf = weight.clone().requires_grad_()
    expected = torch.stack([torch.autograd.grad(loss(leaf, row), leaf)[0] for row in x])
    assert torch.equal(torch.stack([torch.func.grad(loss)(weight, row) for row in x]), expected)
    assert torch.allclose(torch.vmap(torch.func.grad(loss), (None, 0))(weight, x), expected)
    assert not torch.equal(torch.func.grad(loss)(weight, x[0], "bf16"), expected[0])
    forward, _ = torch.func.jvp(partial(loss, x=x[0]), (weight,), (weight,))
    assert forward == loss(weight, x[0], "bf16") != loss(weight, x[0])


def test_all_else_is_as_under_bf16() -> None:
    fp8, bf16 = plan(policy("fp8"), "cpu"), plan(policy("bf16"), "cpu")
    assert {op for op in fp8 if fp8[op] != bf16[op]} == {"linear"}


def encoder() -> nn.TransformerEncoder:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(64, 2, 128, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 2)


@pytest.mark.parametrize("text", ["fp8", "mxfp8", "nvfp4", "bf16,module.layers.0.linear1=mxfp8"])
def test_transformers_are_evaluated_as_they_are_trained(text: str) -> None:
    """Without gradients PyTorch would compute a whole layer by one op, with bf16 factors."""
    model, x = encoder(), values(2, 9, 64)
    padded = torch.arange(9) >= torch.tensor([[9], [6]])
    mp = mezzo.MixedPrecision(model, torch.optim.SGD(model.parameters(), lr=0.1), text)

    calls = (
        model,
        lambda x: model(x, src_key_padding_mask=padded)[~padded],
        lambda x: model.layers[0].self_attn(x, x, x)[0],
    )
    with mp.autocast():
        trained = [call(x).detach() for call in calls]
    model.eval()
    for switched_off in (torch.no_grad, torch.inference_mode):
        with switched_off(), mp.autocast(), mp.autocast():
            assert all(torch.equal(call(x), out) for call, out in zip(calls, trained))
            assert not torch.backends.mha.get_fastpath_enabled()
        assert torch.backends.mha.get_fastpath_enabled()
    with torch.no_grad(), mp.autocast(), mezzo.autocast("bf16", "cpu"):
        assert torch.backends.mha.get_fastpath_enabled()
        assert not torch.equal(model(x), trained[0])
    whole = torch.compile(mezzo.autocast("mxfp8", "cpu")(model.forward), backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        assert text != "mxfp8" or torch.equal(whole(x), trained[0])
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
        with mp.autocast():
            assert torch.equal(compiled(x), trained[0])


def test_the_switch_of_fused_transformer_layers_stays_the_users() -> None:
    """Inside a context it is off in that thread alone, and what the user sets there stays."""
    mha = torch.backends.mha
    with ThreadPoolExecutor(1) as other:
        for value in (False, True):
            with mezzo.autocast("mxfp8", "cpu"):
                mha.set_fastpath_enabled(value)
                assert not mha.get_fastpath_enabled()
                assert other.submit(mha.get_fastpath_enabled).result() is value
            assert mha.get_fastpath_enabled() is value
    with mezzo.autocast("mxfp8", "cpu"), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecated, with a category that depends on the release
        torch.jit.script(encoder().layers[0])


# Model, its heads.
HEADS: list[tuple[nn.Module, tuple[str, ...]]] = [
    (Tied(), ("head", "last")),
    (nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16)), ("2",)),
    (nn.Linear(16, 16), ()),
    (nn.Conv2d(1, 1, 1), ()),
    (nn.Sequential(nn.Linear(16, 16), nn.MultiheadAttention(16, 2)), ("0",)),
]


@pytest.mark.parametrize(("model", "heads"), HEADS, ids=lambda value: type(value).__name__)
def test_heads(model: nn.Module, heads: tuple[str, ...]) -> None:
    assert heads_of(model) == heads


def test_a_head_stays_bf16_unless_the_policy_has_a_word_for_it() -> None:
    model = Tied()
    assert str(with_heads(policy("fp8"), model)) == "fp8,module.head=bf16,module.last=bf16"
    assert str(with_heads(policy("fp8,module.last=fp8"), model)) == "fp8,module.head=bf16,module.last=fp8"
    assert str(with_heads(policy("fp8,module.**=fp8"), model)) == "fp8,module.**=fp8"
    assert with_heads(policy("bf16,module.up=fp8"), model) == policy("bf16,module.up=fp8")
    mp = mezzo.MixedPrecision(model, torch.optim.AdamW(model.parameters()), "fp8")
    assert str(mp.policy) == "fp8,module.head=bf16,module.last=bf16"


class Shared(nn.Module):
    """A language model whose head is no layer: a product with the embedding's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.up, self.last = nn.Embedding(64, 32), nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        x = self.last(self.up(self.embed(tokens)))
        return x, F.linear(x, self.embed.weight)


@pytest.mark.parametrize("name", ["fp8", "mxfp8", "nvfp4"])
@pytest.mark.parametrize("compiled", [False, True])
def test_the_weight_of_an_embedding_stays_in_bf16_as_the_head(name: str, compiled: bool) -> None:
    model, tokens = Shared(), torch.arange(64)
    called = torch.compile(model, backend="aot_eager") if compiled else model
    with mezzo.autocast(name, "cpu"):
        x, logits = called(tokens)
    with mezzo.autocast("bf16", "cpu"):
        assert torch.equal(F.linear(x, model.embed.weight), logits)
    if not compiled:
        text = mezzo.explain(model, tokens, precision=name).as_text(300)
        listed = next(line for line in text.splitlines() if f"Not in {name}" in line)
        assert "embed (bf16" in listed
        assert "last (bf16" in listed


def test_a_policy_used_before_does_not_decide_how_a_tied_head_is_multiplied() -> None:
    texts, tokens = ("fp8", "bf16,module.head=fp8"), torch.arange(48).reshape(3, 16)

    def losses(model: nn.Module, text: str) -> list[float | None]:
        torch.manual_seed(0)
        for module in (model.embed, model.up, model.down, model.last):
            module.reset_parameters()
        mp = mezzo.MixedPrecision(model, torch.optim.SGD(model.parameters(), lr=0.1), text)
        found = [
            stepped(mp, lambda: F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())).loss
            for _ in range(2)
        ]
        mp.close()
        return found

    alone = {text: losses(Tied(), text) for text in texts}
    assert alone[texts[0]] != alone[texts[1]]
    again = Tied()
    for text in (*texts, *texts):
        assert losses(again, text) == alone[text]


@pytest.mark.parametrize("named", ["embed=bf16", "embed=bf16,module.up=mxfp8", "embed=fp32,module.up=fp8"])
@pytest.mark.parametrize("compiled", [False, True])
def test_a_table_whose_module_has_a_format_stays_in_bf16_in_linear_products(
    named: str, compiled: bool
) -> None:
    model = Shared()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    mp = mezzo.MixedPrecision(model, optimizer, f"mxfp8,module.{named}")
    called = torch.compile(model, backend="aot_eager") if compiled else model
    with mp.autocast():
        x, logits = called(torch.arange(64))
    with mezzo.autocast("bf16", "cpu"):
        assert torch.equal(F.linear(x, model.embed.weight), logits)


def test_explain_says_which_layers_and_why() -> None:
    model = nn.Sequential(nn.Linear(32, 64), nn.Linear(64, 60), nn.Linear(60, 32), nn.Linear(32, 16))
    text = mezzo.explain(model, values(4, 32), precision="fp8").as_text(200)
    assert "fp8 in 1 linear layer: 0." in text
    assert "1 (bf16: 60 outputs are not a multiple of 16" in text
    assert "3 (bf16 by default: the head)" in text
    assert "fp8 in no layer of this model. Linear layers of fitting sizes multiply in fp8, " in mezzo.explain(
        nn.Conv2d(1, 1, 1), values(1, 1, 2, 2), precision="fp8"
    ).as_text(200)


def switching(steps: int, text: str) -> tuple[list[Tensor], mezzo.MixedPrecision]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))
    mp = mezzo.MixedPrecision(model, torch.optim.SGD(model.parameters(), lr=0.1), text)
    weights = []
    for _ in range(steps):
        with mp.autocast():
            loss = model(torch.randn(32, 64)).square().mean()
        mp.step(loss)
        weights.append(model[0].weight.detach().clone())
    return weights, mp


@pytest.mark.parametrize(
    "text", ["mxfp8", "bf16,module.2=mxfp8", "nvfp4,recipe=nvfp4-plain", "fp8,scaling=rowwise"]
)
def test_linear_layers_multiply_in_bf16_from_an_update_on(text: str) -> None:
    whole, plain = switching(4, text)
    changed, mp = switching(4, f"{text},bf16_from=2")
    assert torch.equal(whole[1], changed[1])
    assert not torch.equal(whole[2], changed[2])
    assert mp.policy.computed == {"bf16"}
    # A checkpoint goes on where it was: before the switch, or after it.
    mp.load_state_dict(plain.state_dict() | {"updates": 1})
    assert mp.policy == plain.policy
    mp.load_state_dict(plain.state_dict())
    assert mp.policy.computed == {"bf16"}


def test_a_run_switches_to_bf16_too(launch: Callable[..., Ran]) -> None:
    script = """
        import torch
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64), torch.nn.Linear(64, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(4):
            optimizer.zero_grad()
            model(torch.randn(32, 64)).square().mean().backward()
            optimizer.step()
            print(model[1].weight.sum().item())
    """
    for text in ("mxfp8", "bf16,module.1=mxfp8"):
        whole, changed = (launch(script, policy=f"{text}{end}") for end in ("", ",bf16_from=2"))
        assert whole.lines[:2] == changed.lines[:2]
        assert whole.lines[2] != changed.lines[2]
        assert "bf16 from update 2 on" in changed.err
        assert "bf16_from" not in whole.err
        late = launch(script, policy=f"{text},bf16_from=9")
        assert late.lines == whole.lines
        assert "bf16_from=9 was not reached: 4 updates" in late.err


@pytest.mark.parametrize(
    ("text", "part"),
    [("bf16,bf16_from=9", "nvfp4"), ("nvfp4,bf16_from=10%", "bf16_from=900"), ("nvfp4,bf16_from=0", "'0'")],
)
def test_a_switch_that_cannot_be(text: str, part: str) -> None:
    with pytest.raises(UsageError, match=part):
        mezzo.policy(text)
    with pytest.raises(UsageError, match="MixedPrecision or mezzo run"):
        mezzo.autocast("nvfp4,bf16_from=9", "cpu")
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 1))
    explained = str(mezzo.explain(model, torch.ones(2, 64), precision="mxfp8,bf16_from=9"))
    assert "mxfp8 in 1 linear layer" in explained

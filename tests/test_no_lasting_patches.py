"""Nothing of PyTorch stays replaced: modules, classes and settings are the same before and after each feature.

And graphs that are alive keep what they saved.
"""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import mezzo
from bad_steps import INF
from mezzo.pytorch.monitor.replay import nothing_left
from mezzo.pytorch.snapshot import Snapshot

SETUP = """
    import json, sys, types
    import torch, torch._dynamo, torch.utils.checkpoint
    import torch._functorch.config, torch._inductor.config, torch.compiler.config
    from torch import nn
    from torch.autograd import graph, grad_mode
    from torch.nn import functional as F
    from torch.nn.modules import module as nn_module
    from torch.optim import optimizer as optim_module
    from torch.utils.checkpoint import checkpoint

    MODULES = [
        torch, torch.amp, torch.amp.autocast_mode, torch.amp.grad_scaler, torch.autograd, torch.compiler, torch.optim,
        torch.utils.checkpoint, torch.backends.mha, torch._C, torch._C._autograd, F, graph, grad_mode, nn_module,
        optim_module,
    ]
    CLASSES = [
        torch.Tensor, torch._C.TensorBase, nn.Parameter, nn.Module, nn.Linear, nn.BatchNorm1d, torch.amp.autocast,
        torch.amp.GradScaler, torch.autograd.Function, torch.optim.Optimizer, torch.optim.SGD, torch.optim.AdamW,
        torch.no_grad, torch.enable_grad, torch.inference_mode, torch.set_grad_enabled, graph.saved_tensors_hooks,
        torch.utils.checkpoint.CheckpointFunction, torch.utils.checkpoint._CheckpointFrame,
    ]
    CONFIGS = [torch.compiler.config, torch._functorch.config, torch._inductor.config, torch._dynamo.config]
    CODE = (type, property, types.FunctionType, types.BuiltinFunctionType, staticmethod, classmethod)

    def contents():
        '''What there is now, by name. Values are kept, so that no address is used twice.'''
        found = {}
        for owner in MODULES:  # modules hold counters and caches, which may move
            found |= {f"{owner.__name__}.{name}": v for name, v in vars(owner).items() if isinstance(v, CODE)}
        for owner in CLASSES:
            found |= {f"{owner.__module__}.{owner.__qualname__}.{name}": v for name, v in vars(owner).items()}
        for name in vars(nn_module):
            if name.startswith("_global_") and isinstance(getattr(nn_module, name), dict):
                found[name] = list(getattr(nn_module, name))
        for name in ("_global_optimizer_pre_hooks", "_global_optimizer_post_hooks"):
            found[name] = list(getattr(optim_module, name))
        for owner in CONFIGS:
            found |= {f"{owner.__name__}.{name}": repr(v) for name, v in owner.get_config_copy().items()}
        for device in torch._C._autocast_supported_devices():
            found[f"autocast {device}"] = [torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)]
        found["autocast cache"] = [torch.is_autocast_cache_enabled()]
        found["matmul precision"] = [torch.get_float32_matmul_precision()]
        found["saved-tensor hooks"] = [torch._C._autograd._top_saved_tensors_default_hooks(False)]
        return found

    def network():
        return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2), nn.Softmax(-1))

    def trained(net, optimizer, x):
        optimizer.zero_grad()
        net(x).log().mean().backward()
        optimizer.step()

    x = torch.randn(3, 4)
    for kind in (torch.optim.SGD, torch.optim.AdamW):  # PyTorch wraps `step` at a class's first instance
        net = network()
        trained(net, kind(net.parameters(), lr=0.1), x)
    trained(network(), torch.optim.SGD(net.parameters(), lr=0.1), x)
    checkpoint(net, x, use_reentrant=False).sum().backward()

    def differing(before, after):
        def same(one, other):
            return one == other if isinstance(one, (list, str)) else one is other
        return sorted(
            name for name in {**before, **after}
            if name not in before or name not in after or not same(before[name], after[name])
        )

    # Dynamo has patches of its own, from its first compilation on.
    torch.compile(lambda x: trained(net, torch.optim.SGD(net.parameters(), lr=0.1), x), backend="eager")(x)
    torch.compile(lambda x: F.softmax(net[0](x), -1), backend="aot_eager")(x).sum().backward()

    import mezzo
    before = contents()
"""

USES = {
    "autocast": """
        with mezzo.autocast("bf16", "cpu"):
            during = differing(before, contents())
            net(x).sum().backward()
            with torch.no_grad():
                net[0].weight.mul_(2)
            net[0].weight.data.clamp_(-1, 1)
            net[0].weight.detach()
        assert any("set_grad_enabled" in name for name in during), during
    """,
    "autocast with an op in FP32, recomputation, all formats, and one that raises": """
        for policy in ("fp32", mezzo.policy("bf16,op.softmax=fp32"), "fp16", "bf16,recompute=gelu", "fp8", "tf32"):
            with mezzo.autocast(policy, "cpu"), mezzo.autocast("bf16", "cpu"):
                net(x).sum().backward()
        mezzo.autocast("bf16", "cpu")(net)(x)
        try:
            with mezzo.autocast("fp16", "cpu"):
                raise KeyError
        except KeyError:
            pass
    """,
    "checkpointing": """
        for use_reentrant in (False, True):
            with mezzo.autocast("bf16", "cpu"):
                out = checkpoint(net, x.clone().requires_grad_(), use_reentrant=use_reentrant)
            out.sum().backward()
    """,
    "torch.compile": """
        def f(x):
            with mezzo.autocast("bf16", "cpu"):
                return F.softmax(net[0](x), -1)
        torch.compile(f, backend="aot_eager")(x).sum().backward()
        with mezzo.autocast("fp16", "cpu"):
            out = torch.compile(lambda x: net[0](x), backend="aot_eager")(x)
        out.sum().backward()
    """,
    "MixedPrecision": """
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for precision in ("bf16", "fp16"):
            mp = mezzo.MixedPrecision(net, optimizer, precision)
            for scale in (1.0, float("inf")):
                with mp.autocast():
                    loss = net(x).log().mean() * scale
                mp.step(loss)
            mp.close()
        mezzo.explain(net, x, precision="bf16")
    """,
    "contexts that begin and end within a replay": """
        from mezzo.pytorch.monitor.replay import nothing_left
        with nothing_left(net), mezzo.autocast("bf16", "cpu"):
            pass
        context = mezzo.autocast("bf16", "cpu")
        with nothing_left(net):
            context.__enter__()
        with nothing_left(net):
            context.__exit__(None, None, None)
    """,
    "GradScaler": """
        optimizer, scaler = torch.optim.SGD(net.parameters(), lr=0.1), mezzo.GradScaler("cpu")
        with mezzo.autocast("fp16", "cpu"):
            loss = net(x).log().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    """,
    "optimizers and weights": """
        lowered, net = network(), network()
        mezzo.lower_weights(lowered, "bf16")
        with mezzo.autocast("bf16", "cpu"):
            trained(lowered, mezzo.optim.AdamW(lowered.parameters(), lr=0.1), x)
        trained(net, mezzo.optim.with_masters(torch.optim.SGD(net.parameters(), lr=0.1)), x)
    """,
}


@pytest.mark.usefixtures("forked")
def test_nothing_of_torch_stays_replaced() -> None:
    script = textwrap.dedent(SETUP) + "found = {}\n"
    for use, source in USES.items():
        script += textwrap.dedent(source) + f"found[{use!r}] = differing(before, contents())\n"
    ran = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script + "print(json.dumps(found))\n"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    assert json.loads(ran.stdout.splitlines()[-1]) == {use: [] for use in USES}


# Values that Mezzo restores (statistics, weights) leave graphs that still run backward intact.


def explained(model: nn.Module, x: Tensor) -> None:
    mezzo.explain(model, x, precision="bf16")


def run_again(model: nn.Module, x: Tensor) -> None:
    with nothing_left(model):
        model(x)


def searched_for_a_batch_size(model: nn.Module, x: Tensor) -> None:
    snapshot = Snapshot([model])
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)
    snapshot.restore()


def abandoned_closure(model: nn.Module, x: Tensor) -> None:
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=2)
    scaler = mezzo.GradScaler(init_scale=2.0)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = next(model.parameters()).sum() * INF
        scaler.scale(loss).backward()
        return loss

    scaler.step(optimizer, closure)
    assert scaler.was_skipped(optimizer)


@pytest.mark.parametrize("write", [explained, run_again, searched_for_a_batch_size, abandoned_closure])
def test_a_living_graph_runs_backward(write: Callable[[nn.Module, Tensor], None]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    x = torch.randn(8, 4, requires_grad=True)
    (expected,) = torch.autograd.grad(model(x).square().sum(), x)
    model.load_state_dict(before)
    out = model(x).square().sum()
    write(model, x.detach())
    (found,) = torch.autograd.grad(out, x)
    assert torch.equal(found, expected)

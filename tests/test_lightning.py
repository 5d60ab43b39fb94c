"""`mezzo.lightning` under the Trainers of `lightning` and `pytorch_lightning`, and their own mixed precision."""

from __future__ import annotations

import contextlib
import copy
import csv
import importlib
import logging
import pickle
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, TensorDataset

import mezzo
from mezzo.core.errors import LossScaleCollapseError, UnknownArgumentError, UnknownNameError, UsageError
from mezzo.pytorch.monitor.operations import users_line
from trainers import OVERFLOW, network, same

LIBRARIES = ("lightning", "pytorch_lightning")
L = pytest.importorskip("lightning")
PL = pytest.importorskip("pytorch_lightning")
for each in ("lightning.fabric", "lightning_fabric", "lightning.pytorch", "pytorch_lightning"):
    logging.getLogger(each).setLevel(logging.ERROR)

pytestmark = [
    pytest.mark.usefixtures("forked"),
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:.*overflow in optimizer step"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning"),  # Lightning 2.6.6 with torch 2.13
    pytest.mark.filterwarnings("ignore:.*returned `None`"),
    pytest.mark.filterwarnings("ignore:.*not supported by the model summary"),
]


def net(
    library: str = "lightning", make: Any = torch.optim.AdamW, *, manual: bool = False, **settings: Any
) -> Any:
    base = importlib.import_module(library).LightningModule

    class Net(base):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            layers = network(1)
            self.body, self.head = layers[:3], layers[3]
            self.losses: list[float] = []
            self.automatic_optimization = not manual

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.head(self.body(x))
            return out

        def training_step(self, batch: Any, index: int) -> Tensor:
            x, y = batch
            loss = nn.functional.mse_loss(self(x).float(), y)
            self.losses.append(loss.item())
            return loss

        def configure_optimizers(self) -> Any:
            optimizer = make(self.parameters(), **{"lr": 1e-2, **settings})
            scheduler = StepLR(optimizer, 1, gamma=0.9)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    return Net()


def loader(plant: int | None = None, left_out: tuple[int, ...] = (), batches: int = 6) -> Any:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(8 * batches, 8, generator=generator)
    y = x.sum(1, keepdim=True)
    if plant is not None:
        x[8 * plant : 8 * plant + 8] = OVERFLOW
    keep = [row for row in range(8 * batches) if row // 8 not in left_out]
    return DataLoader(TensorDataset(x[keep], y[keep]), batch_size=8)


def fit(model: Any, data: Any, plugin: Any = None, library: str = "lightning", **settings: Any) -> Any:
    given = {name: settings.pop(name, None) for name in ("ckpt_path", "val_dataloaders")}
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "max_epochs": 1}
    settings = {**quiet, "enable_model_summary": False, "accelerator": "cpu", **settings}
    if plugin is not None:
        settings["plugins"] = [plugin]
    trainer = importlib.import_module(library).Trainer(**settings)
    trainer.fit(model, data, **given)
    return trainer


def state(model: Any, trainer: Any) -> Any:
    scheduler = trainer.lr_scheduler_configs[0].scheduler.state_dict()
    held = {name: scheduler[name] for name in ("last_epoch", "_last_lr")}
    return {**model.state_dict(), "optimizer": trainer.optimizers[0].state_dict()["state"], "scheduler": held}


@pytest.mark.parametrize("library", LIBRARIES)
def test_as_good_as_its_own_bf16(library: str) -> None:
    losses = {}
    for name, how in {"fp32": {}, "own": {"precision": "bf16-mixed"}, "mezzo": {}}.items():
        model = net(library)
        plugin = mezzo.lightning.precision("bf16") if name == "mezzo" else None
        trainer = fit(model, loader(), plugin, library, **how)
        losses[name] = torch.tensor(model.losses)
    own, ours = ((losses[name] - losses["fp32"]).abs().max() for name in ("own", "mezzo"))
    assert 0 < ours <= own + 1e-6
    assert trainer.precision == "bf16-mixed"
    assert trainer.scaler is None


CLIPPED = {"gradient_clip_val": 0.1}
ROWS: dict[str, Any] = {
    "fused, clipped by norm": ({"fused": True}, {}, CLIPPED),
    "fused, clipped by value": ({"fused": True}, {}, {**CLIPPED, "gradient_clip_algorithm": "value"}),
    "momentum": ({"make": torch.optim.SGD, "momentum": 0.9}, {}, {}),
    "accumulation": ({}, {}, {**CLIPPED, "accumulate_grad_batches": 2}),
    "fp16 weights": ({}, {"params": "fp16", "masters": "fp32"}, CLIPPED),
    "masters under any optimizer": ({"make": torch.optim.NAdam}, {"params": "fp16", "masters": "fp32"}, {}),
}


@pytest.mark.parametrize(
    ("row", "library"),
    [*((row, "lightning") for row in ROWS), ("fused, clipped by norm", "pytorch_lightning")],
)
def test_a_skipped_step_is_a_batch_left_out(row: str, library: str) -> None:
    optimizer, masters, settings = ROWS[row]
    left_out = (2, 3) if "accumulate_grad_batches" in settings else (3,)
    states = []
    for data in (loader(plant=3), loader(left_out=left_out)):
        model = net(library, **optimizer)
        plugin = mezzo.lightning.precision("fp16", loss_scale=256, **masters)
        trainer = fit(model, data, plugin, library, **settings)
        states.append(state(model, trainer))
        assert trainer.scaler is plugin.scaler
        assert trainer.precision == "16-mixed"
        assert plugin.skipped_steps == len(states) % 2 == trainer.callback_metrics["skipped_steps"]
        assert trainer.callback_metrics["loss_scale"] == 256
        if len(states) == 1:
            assert plugin.findings[0].module == "body.0"
            assert plugin.findings[0].op == "linear"
            code = any("=fp32', loss_scale=256)" in remedy for remedy in plugin.findings[0].remedies)
            assert code or masters
            assert not plugin.was_skipped(trainer.optimizers[0])
    same(*states)
    assert states[0]["body.1.num_batches_tracked"] == 6 - len(left_out)


def test_a_dynamic_scale_goes_down_and_is_logged_by_step(tmp_path: Path) -> None:
    logger = importlib.import_module("lightning.pytorch.loggers").CSVLogger(tmp_path)
    scale = mezzo.DynamicLossScale(init=2.0**10, growth_interval=2)
    plugin = mezzo.lightning.precision("fp16", loss_scale=scale)
    fit(net(), loader(plant=3), plugin, logger=logger, log_every_n_steps=1)
    rows = csv.DictReader((Path(logger.log_dir) / "metrics.csv").read_text().splitlines())
    seen = [(float(row["loss_scale"]), float(row["skipped_steps"])) for row in rows]
    assert seen == [(1024, 0), (2048, 0), (2048, 0), (1024, 1), (1024, 1), (2048, 1)]


def test_a_collapse_names_the_cause() -> None:
    scale = mezzo.DynamicLossScale(init=1.0, floor=1.0, patience=1)
    with pytest.raises(LossScaleCollapseError, match=r"body\.0"):
        fit(net(), loader(plant=1), mezzo.lightning.precision("fp16", loss_scale=scale))


def test_the_first_overflow_is_a_warning() -> None:
    plugin = mezzo.lightning.precision("fp16", loss_scale=256)
    with pytest.warns(UserWarning, match=r"optimizer step 3: forward of linear in body\.0") as told:
        fit(net(), loader(plant=3), plugin, max_epochs=3)
    (text,) = (str(one.message) for one in told if "overflow in" in str(one.message))
    assert "Later ones are only in plugin.findings" in text
    assert len(plugin.findings) == 3


@pytest.mark.parametrize("accumulate", [1, 2])
def test_an_overflow_in_training_step_itself_is_traced_when_it_comes_again(accumulate: int) -> None:
    """Lightning divides the loss after `training_step`, which is what the tracer watches."""
    model = net()

    def training_step(batch: Any, batch_idx: int) -> Tensor:
        out = model(batch[0])
        if batch_idx in (1, 5):
            out = out * 1e6
        return nn.functional.mse_loss(out, batch[1])

    model.training_step = training_step
    plugin = mezzo.lightning.precision("fp16", loss_scale=64)
    fit(model, loader(), plugin, accumulate_grad_batches=accumulate)
    first, second = plugin.findings
    assert (first.cause, first.op) == ("loss", "")
    assert (second.cause, second.op, second.line.partition(": ")[2]) == ("overflow", "mul", "out = out * 1e6")


@pytest.mark.parametrize(("policy", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_a_model_without_parameters_computes_in_the_format(policy: str, dtype: torch.dtype) -> None:
    class Products(L.LightningModule):  # type: ignore[misc, name-defined]
        def forward(self, x: Tensor) -> Tensor:
            return x @ x.T

        def test_step(self, batch: Any, index: int) -> None:
            self.kind = self(batch[0]).dtype

    model = Products()
    settings: Any = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False}
    plugin = mezzo.lightning.precision(policy)
    L.Trainer(plugins=[plugin], accelerator="cpu", **settings).test(model, loader(), verbose=False)
    assert model.kind is dtype
    fabric = L.Fabric(plugins=[mezzo.lightning.precision(policy)], accelerator="cpu")
    assert fabric.setup(nn.Identity())(torch.ones(2, 3)).dtype is torch.float32


@pytest.mark.parametrize(
    ("policy", "settings"),
    [
        ("fp16", {"loss_scale": "dynamic(init=256)"}),
        ("bf16", {"masters": "split"}),
        ("bf16", {"params": "bf16"}),
    ],
)
def test_resumes_to_the_bit(policy: str, settings: Any, tmp_path: Path) -> None:
    states = []
    for parts in ((2,), (1, 2)):
        ckpt = None
        for epochs in parts:
            model = net()
            plugin = mezzo.lightning.precision(policy, **settings)
            trainer = fit(model, loader(plant=2), plugin, ckpt_path=ckpt, max_epochs=epochs)
            ckpt = tmp_path / f"{len(parts)}-{epochs}.ckpt"
            trainer.save_checkpoint(ckpt)
        states.append((state(model, trainer), plugin.state_dict()))
    same(*states)


def test_an_epoch_without_backward_takes_no_step() -> None:
    average = importlib.import_module("lightning.pytorch.callbacks").StochasticWeightAveraging(1e-2)
    plugin = mezzo.lightning.precision("fp16", loss_scale=64)
    model = net()
    model.configure_optimizers = lambda: torch.optim.AdamW(model.parameters())
    trainer = fit(model, loader(), plugin, max_epochs=2, callbacks=[average])
    assert trainer.optimizers[0].state_dict()["state"][0]["step"] == 12


def test_checkpoints_go_both_ways_between_the_plugins(tmp_path: Path) -> None:
    theirs = importlib.import_module("lightning.pytorch.plugins.precision").MixedPrecision
    scaler = torch.amp.GradScaler("cpu", init_scale=128.0)
    fit(net(), loader(), theirs("16-mixed", "cpu", scaler)).save_checkpoint(tmp_path / "theirs.ckpt")
    old = torch.load(tmp_path / "theirs.ckpt")
    old["native_amp_scaling_state"] = old.pop("MixedPrecision")
    torch.save(old, tmp_path / "old.ckpt")
    for name in ("theirs", "old"):
        plugin = mezzo.lightning.precision("fp16")
        trainer = fit(net(), loader(), plugin, ckpt_path=tmp_path / f"{name}.ckpt", max_epochs=2)
        assert plugin.scaler.get_scale() == 128
        assert plugin.scaler.state_dict()["_growth_tracker"] == 12
    trainer.save_checkpoint(tmp_path / "ours.ckpt")
    scaler = torch.amp.GradScaler("cpu")
    fit(net(), loader(), theirs("16-mixed", "cpu", scaler), ckpt_path=tmp_path / "ours.ckpt", max_epochs=3)
    assert scaler.get_scale() == 128


def test_split_masters_lower_the_weights_in_place_and_keep_the_updates() -> None:
    losses = {}
    for name, plugin in {"fp32": None, "split": mezzo.lightning.precision("bf16", masters="split")}.items():
        model = net(lr=1e-5)
        weight = model.head.weight
        before = weight.detach().clone()
        trainer = fit(model, loader(), plugin)
        assert model.head.weight is weight
        masters = mezzo.master_state_dict(model, trainer.optimizers)
        losses[name] = masters["head.weight"] - before
    assert weight.dtype is torch.bfloat16
    assert model.body[1].weight.dtype is torch.float32
    torch.testing.assert_close(losses["split"], losses["fp32"], rtol=0.05, atol=1e-6)


def test_validation_runs_in_the_format_and_overrides_end_with_the_fit() -> None:
    model = net()
    seen: list[torch.dtype] = []
    model.validation_step = lambda batch, batch_idx: seen.append(model.body(batch[0]).dtype)
    model.head.register_forward_hook(lambda module, args, out: seen.append(out.dtype))
    plugin = mezzo.lightning.precision("bf16,module.head=fp32")
    fit(model, loader(batches=1), plugin, val_dataloaders=loader(batches=1), max_steps=1)
    # BatchNorm's result of a bf16 input is bf16; the head's is bf16 outside, computed in FP32.
    assert set(seen) == {torch.bfloat16, torch.float32}
    assert "forward" not in vars(model.head)
    assert not torch.is_autocast_enabled("cpu")


def test_a_plugin_serves_one_trainer_and_pickles() -> None:
    plugin = mezzo.lightning.precision("fp16", loss_scale=64)
    assert repr(pickle.loads(pickle.dumps(plugin))) == repr(copy.deepcopy(plugin)) == repr(plugin)
    assert repr(plugin) == "mezzo.lightning.precision('fp16', loss_scale=64)"
    fit(net(), loader(), plugin)
    with pytest.raises(UsageError, match=r"plugins=\[mezzo.lightning.precision\('fp16', loss_scale=64\)\]"):
        fit(net(), loader(), plugin)


def test_what_it_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    plugin = mezzo.lightning.precision("bf16")
    for make in (L.Trainer, PL.Trainer, L.Fabric):
        with pytest.raises(ValueError, match=r"precision=16-mixed.*mezzo\.lightning\.precision\('bf16'\)"):
            make(accelerator="cpu", precision="16-mixed", plugins=[plugin])
    strategies = importlib.import_module("lightning.pytorch.strategies")
    with pytest.raises(TypeError, match=r"FSDPPrecision.*precision\('bf16'\).*strategy='ddp'"):
        strategies.FSDPStrategy(precision_plugin=plugin)
    with pytest.raises(UnknownNameError, match=r"'hed'.*Did you mean 'head'"):
        fit(net(), loader(), mezzo.lightning.precision("bf16,module.hed=fp32"))
    with pytest.raises(UnknownArgumentError, match="Did you mean 'loss_scale'"):
        mezzo.lightning.precision("fp16", los_scale=1)
    with pytest.raises(UsageError, match=r"mezzo\.lightning\.precision.*'never'"):
        mezzo.lightning.precision("fp16", loss_scale="never")
    for version in ("2.6.3", "2.5.0.post0", "1.9"):
        monkeypatch.setattr(PL, "__version__", version)
        with pytest.raises(UsageError, match=rf"{version}.*pip install -U 'pytorch-lightning>=2.6.4'"):
            mezzo.lightning.precision("bf16")


# Manual optimization, closures, Fabric.


def gan(library: str = "lightning", *, steps: int = 1, clip: float = 0.0, plant: Any = None) -> Any:
    base = importlib.import_module(library).LightningModule

    class Gan(base):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False
            self.gen = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
            self.dis = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
            self.norms: list[float] = []

        def training_step(self, batch: Any, index: int) -> None:
            real, _ = batch
            gen, dis = self.optimizers()
            for turn in range(steps):
                loss = self.dis(real).pow(2).mean() + (self.dis(self.gen(real).detach()) - 1).pow(2).mean()
                self.step(dis, loss * (OVERFLOW if self.plant == (index, turn) else 1))
            loss = self.dis(self.gen(real)).pow(2).mean()
            self.step(gen, loss * (OVERFLOW if self.plant == (index, steps) else 1))

        def step(self, optimizer: Any, loss: Tensor) -> None:
            optimizer.zero_grad()
            self.manual_backward(loss)
            if clip:
                self.clip_gradients(optimizer, gradient_clip_val=clip, gradient_clip_algorithm="norm")
                grads = [p.grad for p in optimizer.param_groups[0]["params"] if p.grad is not None]
                self.norms.append(torch.nn.utils.get_total_norm(grads).item())
            optimizer.step()

        def configure_optimizers(self) -> Any:
            return [torch.optim.Adam(part.parameters(), lr=1e-2) for part in (self.gen, self.dis)]

    torch.manual_seed(0)
    made = Gan()
    made.plant = plant
    return made


def leaves_a_batch_out() -> Any:
    model = net()
    whole = model.training_step
    model.training_step = lambda batch, batch_idx: None if batch_idx == 3 else whole(batch, batch_idx)
    return model


def runs_the_closure_itself() -> Any:
    def optimizer_step(epoch: int, batch_idx: int, optimizer: Any, closure: Any) -> None:
        closure()
        optimizer.step()

    model = net()
    model.optimizer_step = optimizer_step
    return model


def adds_gradients_after_clipping() -> Any:
    def training_step(batch: Any, batch_idx: int) -> None:
        optimizer = model.optimizers()
        model.manual_backward(nn.functional.mse_loss(model(batch[0]), batch[1]))
        model.clip_gradients(optimizer, gradient_clip_val=0.1, gradient_clip_algorithm="norm")
        if batch_idx % 2:
            optimizer.step()
            optimizer.zero_grad()

    model = net(manual=True)
    model.training_step = training_step
    return model


@pytest.mark.parametrize(("policy", "plant"), [("bf16,op.linear=fp32", None), ("fp16", 3)])
def test_manual_optimization_computes_and_explains_as_the_automatic_one(
    policy: str, plant: int | None
) -> None:
    def steps_itself(batch: Any, batch_idx: int) -> None:
        manual.optimizers().zero_grad()
        manual.manual_backward(type(manual).training_step(manual, batch, batch_idx))
        manual.optimizers().step()
        manual.lr_schedulers().step()

    model, manual = net(), net(manual=True)
    manual.training_step = steps_itself
    plugins = [mezzo.lightning.precision(policy) for _ in range(2)]
    trainers = [fit(one, loader(plant), plugin) for one, plugin in zip((model, manual), plugins)]
    same(state(model, trainers[0]), state(manual, trainers[1]))
    remedies, same_remedies = ([one.remedies for one in plugin.findings] for plugin in plugins)
    assert remedies == same_remedies
    assert [len(one) > 2 for one in remedies[2:]] == [True] * (plant is not None)


LBFGS = {"make": torch.optim.LBFGS, "lr": 0.1, "max_iter": 2}
UNCHANGED: dict[str, tuple[Any, dict[str, Any]]] = {
    "AdamW": (net, CLIPPED),
    "fused": (partial(net, fused=True), CLIPPED),
    "SGD": (partial(net, make=torch.optim.SGD), CLIPPED),
    "LBFGS": (partial(net, **LBFGS), CLIPPED),
    "LBFGS, what its step returns": (lambda: with_closure(**LBFGS), {}),
    "a batch without a loss": (leaves_a_batch_out, CLIPPED),
    "an optimizer step of the user's": (runs_the_closure_itself, CLIPPED),
    "two networks": (partial(gan, steps=2), {}),
    "two networks, clipped": (partial(gan, steps=2, clip=0.1), {}),
    "a backward pass after clipping": (adds_gradients_after_clipping, {}),
}


@pytest.mark.parametrize("name", UNCHANGED)
def test_a_loss_scale_changes_no_bit_of_a_training_in_fp32(name: str) -> None:
    """Clipping among others is of unscaled gradients."""
    make, settings = UNCHANGED[name]
    results = []
    for plugin in (None, mezzo.lightning.precision("fp32,loss_scale=1024")):
        model = make()
        fit(model, loader(), plugin, **settings)
        results.append([model.state_dict(), getattr(model, "norms", []), getattr(model, "returned", [])])
    same(*results)


@pytest.mark.parametrize(
    ("library", "steps", "turn", "skipped"),
    [
        *((library, steps, None, (0, 0)) for library in LIBRARIES for steps in (1, 2)),
        ("lightning", 2, 2, (1, 0)),  # in the generator's step
        ("lightning", 2, 0, (0, 1)),  # in the first of the discriminator's two
    ],
)
def test_an_overflow_of_one_network_skips_its_step_alone(
    library: str, steps: int, turn: int | None, skipped: tuple[int, int]
) -> None:
    """And the scale is updated once per batch."""
    plugin = mezzo.lightning.precision("fp16", loss_scale="dynamic(init=256)")
    model = gan(library, steps=steps, plant=(3, turn))
    trainer = fit(model, loader(), plugin, library)
    gen, dis = (optimizer.state_dict()["state"][0]["step"].item() for optimizer in trainer.optimizers)
    assert (gen, dis) == (6 - skipped[0], 6 * steps - skipped[1])
    overflows = sum(skipped)
    assert (plugin.skipped_steps, plugin.scaler.get_scale()) == (overflows, 128 if overflows else 256)
    assert plugin.scaler.state_dict()["_growth_tracker"] == (2 if overflows else 6)
    assert model.gen[1].num_batches_tracked == 6 * steps + gen  # its calls for the other's steps stay


def test_an_overflow_of_the_second_optimizer_of_a_backward_is_explained() -> None:
    class Halves(importlib.import_module("lightning").LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False
            self.body, self.head = nn.Linear(8, 8), nn.Linear(8, 1)
            nn.init.constant_(self.head.weight, 1e-3)  # the body's gradient is small, the head's is not

        def training_step(self, batch: Any, index: int) -> None:
            first, second = self.optimizers()
            first.zero_grad(), second.zero_grad()
            self.manual_backward((self.head(self.body(batch[0]) + 8.0) + 4.0).pow(2).mean())
            first.step(), second.step()

        def configure_optimizers(self) -> Any:
            return [torch.optim.SGD(part.parameters(), lr=1e-5) for part in (self.body, self.head)]

    plugin = mezzo.lightning.precision("fp16", loss_scale="dynamic(init=32768)")
    fit(Halves(), loader(batches=1), plugin)
    assert plugin.skipped_steps == 1
    (report,) = plugin.findings
    assert (report.cause, report.module, report.op) == ("loss scale", "head", "linear")


@pytest.mark.parametrize("plant", [None, 3])
def test_lbfgs(plant: int | None) -> None:
    def close(model: Any) -> float:
        x, y = loader().dataset.tensors
        return nn.functional.mse_loss(model.eval()(x), y).item()

    plain, model = (net(make=torch.optim.LBFGS, lr=0.1, max_iter=4) for _ in range(2))
    fit(plain, loader(left_out=() if plant is None else (plant,)))
    plugin = mezzo.lightning.precision("fp16", loss_scale=mezzo.DynamicLossScale(init=2.0**16))
    trainer = fit(model, loader(plant), plugin)
    assert close(model) == pytest.approx(close(plain), rel=0.1)
    reruns = sum(finding.cause == "loss scale" for finding in plugin.findings)
    assert reruns > 0
    assert len(model.losses) == len(plain.losses) + reruns + (plant is not None)
    assert model.body[1].num_batches_tracked == plain.body[1].num_batches_tracked
    assert plugin.skipped_steps == (plant is not None)
    assert trainer.lr_scheduler_configs[0].scheduler.last_epoch == 6 - (plant is not None)
    if plant is not None:
        assert [one.module for one in plugin.findings if one.cause == "overflow"] == ["body.0"]


def with_closure(**settings: Any) -> Any:
    """A model of manual optimization that keeps what its optimizer's step returns."""
    model = net(**settings, manual=True)
    model.returned = []

    def training_step(batch: Any, batch_idx: int) -> None:
        def closure() -> Tensor:
            model.optimizers().zero_grad()
            loss = nn.functional.mse_loss(model(batch[0]).float(), batch[1])
            model.manual_backward(loss)
            model.losses.append(loss.item())
            return loss

        model.returned.append(model.optimizers().step(closure))

    model.training_step = training_step
    return model


@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.LBFGS])
def test_a_skipped_closure_step_returns_the_loss(make: Any) -> None:
    model = with_closure(make=make, lr=1e-3)
    fit(model, loader(plant=1, batches=2), mezzo.lightning.precision("fp16", loss_scale=64))
    assert [bool(loss.isfinite()) for loss in model.returned] == [True, False]


def test_an_evaluation_that_runs_again_leaves_the_statistics() -> None:
    """In manual optimization; `test_lbfgs` has the automatic one."""
    model = with_closure(**LBFGS)
    plugin = mezzo.lightning.precision("fp16", loss_scale="dynamic(init=1048576)")
    fit(model, loader(batches=2), plugin)
    assert len(plugin.findings) > 0
    assert model.body[1].num_batches_tracked == len(model.losses) - len(plugin.findings)


def fabric_run(
    plugin: Any, plant: int | None = None, masters: bool = False, library: str = "lightning", **clip: Any
) -> Any:
    how = {"plugins": [plugin]} if plugin is not None else {}
    fabric = importlib.import_module(library).Fabric(accelerator="cpu", **how)
    seen: list[Any] = []
    model = nn.Sequential(net().body, net().head)
    model.register_forward_pre_hook(lambda module, args: seen.append(args[0].dtype))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    model, optimizer = fabric.setup(model, optimizer)
    losses = []
    for x, y in loader(plant):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x).float(), y)
        fabric.backward(loss)
        if clip:
            fabric.clip_gradients(model, optimizer, **clip)
        optimizer.step()
        losses.append(loss.item())
    return fabric, model, optimizer, losses, set(seen)


@pytest.mark.parametrize("settings", [{}, {"masters": "split"}])
def test_fabric_casts_neither_inputs_nor_outputs(settings: Any) -> None:
    losses = fabric_run(None)[3]
    _, model, optimizer, ours, seen = fabric_run(mezzo.lightning.precision("bf16", **settings))
    assert ours == pytest.approx(losses, rel=5e-3)
    assert ours != losses
    assert seen == {torch.float32}
    assert model(torch.ones(2, 8)).dtype is torch.bfloat16
    assert model.module[1].weight.dtype is (torch.bfloat16 if settings else torch.float32)
    assert isinstance(optimizer.optimizer, mezzo.optim.AdamW) == bool(settings)


@pytest.mark.parametrize("clip", [{}, {"max_norm": 0.1}, {"clip_val": 0.1}])
def test_fabric_skips_an_overflow(clip: Any, tmp_path: Path) -> None:
    plugin = mezzo.lightning.precision("fp16", loss_scale="dynamic(init=256)")
    fabric, model, optimizer, _, _ = fabric_run(plugin, plant=5, **clip)
    assert plugin.skipped_steps == 1
    assert plugin.was_skipped(optimizer)
    assert model.module[0][1].num_batches_tracked == 5
    assert plugin.findings[0].module == "0.0"
    assert plugin.findings[0].line.startswith(Path(__file__).name)  # not in Fabric's wrapper of the model
    reference = mezzo.lightning.precision("fp32,loss_scale=256")
    assert fabric_run(None, **clip)[3] == fabric_run(reference, **clip)[3]
    fabric.save(tmp_path / "state.ckpt", {"precision": plugin})
    fresh = mezzo.lightning.precision("fp16")
    fabric.load(tmp_path / "state.ckpt", {"precision": fresh})
    assert (fresh.scaler.get_scale(), fresh.skipped_steps) == (128, 1)


@pytest.mark.parametrize("name", ["fabric/wrappers.py", "lightning/fabric/wrappers.py", "contextlib.py"])
def test_a_users_file_may_be_called_as_one_of_a_library(name: str, tmp_path: Path) -> None:
    file = str(tmp_path / name)
    names: dict[str, Any] = {"users_line": users_line}
    exec(compile("line = users_line()", file, "exec"), names)
    assert names["line"] == (file, 1)


ALONE = """
import logging, torch, pytorch_lightning as pl, mezzo
from torch.utils.data import DataLoader, TensorDataset

class Net(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.body = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8))
    def training_step(self, batch, batch_idx):
        return self.body(batch[0]).float().square().mean()
    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), fused=True)
    def on_train_end(self):
        plugin, rank = self.trainer.precision_plugin, self.global_rank
        found = [(one.module, one.note) for one in plugin.findings]
        weights = self.body[0].weight.double().sum().item()
        torch.save([plugin.skipped_steps, found, weights, self.body[1].num_batches_tracked.item()], f"rank{rank}.pt")

torch.manual_seed(0)
x = torch.randn(32, 8)
x[13] = 1e30  # of the second rank, in its second batch of four
quiet = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
plugins = [mezzo.lightning.precision("fp16", loss_scale=64)]
trainer = pl.Trainer(accelerator="cpu", devices=2, strategy="ddp_fork", max_epochs=1, plugins=plugins, **quiet)
trainer.fit(Net(), DataLoader(TensorDataset(x), batch_size=4, shuffle=False))
"""


@pytest.mark.heavy
def test_ddp_with_one_package_imported(tmp_path: Path) -> None:
    child = [sys.executable, "-W", "ignore", "-c", ALONE]
    done = subprocess.run(child, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    first, second = (torch.load(tmp_path / f"rank{rank}.pt") for rank in (0, 1))
    assert first[:2] == [1, [("body.0", "found by rank 1")]]
    assert second[:2] == [1, [("body.0", "")]]
    assert first[2:] == second[2:]
    assert first[3] == 3


def test_mezzo_run_leaves_a_script_with_the_plugin_alone(launch: Any) -> None:
    ran = launch("import mezzo\nmezzo.lightning.precision('bf16')", policy="fp16")
    assert "mezzo.lightning.precision" in ran.notes


UNDER_RUN = """
import lightning, torch
from torch.utils.data import DataLoader, TensorDataset

class Net(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.body = torch.nn.Linear(8, 1)
        self.automatic_optimization = {automatic}
        self.seen = []
    def training_step(self, batch, index):
        self.seen.append(index)
        loss = self.body(batch[0]).square().mean() * (1e12 if index in (2, 5) else 1.0)
        if not self.automatic_optimization:
            self.optimizers().zero_grad(); self.manual_backward(loss); self.optimizers().step()
        return loss
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e-2)

torch.manual_seed(0)
quiet = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
trainer = lightning.Trainer(accelerator="cpu", max_epochs=1, **quiet)
model = Net()
trainer.fit(model, DataLoader(TensorDataset(torch.randn(32, 8)), batch_size=4))
print(model.seen, trainer.global_step, [p.tolist() for p in model.parameters()])
"""


def test_a_skipped_step_under_mezzo_run_does_not_repeat_training_step(launch: Any) -> None:
    """The gradients of two batches overflow at every scale; Lightning hands each optimizer a closure."""
    policy = "fp16,loss_scale=dynamic(init=64)"
    closure, manual = (launch(UNDER_RUN.format(automatic=how), policy=policy) for how in (True, False))
    assert closure.status == manual.status == 0, closure.err
    assert closure.lines == manual.lines
    assert closure.lines[-1].startswith(f"{[*range(8)]} 8 ")
    for ran in (closure, manual):
        updates = [(one.skipped, one.loss_scale) for one in ran.of("update")]
        assert updates == [(index in (2, 5), 2.0 ** (6 - (index > 2) - (index > 5))) for index in range(8)]
        assert [record.update for record in ran.of("overflow")] == [2, 5]


@pytest.mark.filterwarnings("ignore:The .grad attribute")
def test_an_overflow_in_a_compiled_module_is_traced_at_the_next_one() -> None:
    """The first report says why it has no place."""
    torch._dynamo.reset()
    plugin = mezzo.lightning.precision("fp16", loss_scale=64)
    data = loader(plant=1)
    data.dataset.tensors[0][-8:] = OVERFLOW
    fit(torch.compile(net(), backend="aot_eager"), data, plugin)
    first, second = plugin.findings
    assert (first.cause, "Error" in first.note) == ("loss", False)
    assert "compiled function" in first.note
    assert "next steps are traced" in first.note
    assert (second.cause, second.module, second.op) == ("overflow", "body.0", "linear")


@pytest.mark.parametrize("inside", [True, False])
def test_an_overflow_outside_of_fabrics_model_is_traced_inside_autocast(inside: bool) -> None:
    plugin = mezzo.lightning.precision("fp16", loss_scale=64)
    fabric = L.Fabric(accelerator="cpu", plugins=[plugin])
    model = network()
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=1e-2))
    for index, (x, _) in enumerate(loader()):
        with fabric.autocast() if inside else contextlib.nullcontext():
            out = model(x).float()
            loss = torch.log(out.sum() * 0) if index in (1, 3) else out.square().mean()
        optimizer.zero_grad()
        fabric.backward(loss)
        optimizer.step()
    first, second = plugin.findings
    assert (first.cause, "`with fabric.autocast():`" in first.note) == ("loss", True)
    assert (second.cause, second.op) == (("invalid", "log") if inside else ("loss", ""))

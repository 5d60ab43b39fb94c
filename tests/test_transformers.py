"""Transformers' Trainer under `mezzo.transformers.use`, compared with its own bf16 and with FP32."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

import mezzo
from mezzo.core.errors import CallOrderError, UsageError

Use = dict[str, Any]


class Sequences(Dataset[Any]):
    """Arithmetic sequences of tokens; a token 63 marks the batch that overflows."""

    def __init__(self, planted: int | None = None) -> None:
        drawn = torch.Generator().manual_seed(0)
        start, stride = (torch.randint(1, 8, (64, 1), generator=drawn) for _ in range(2))
        self.tokens = (start + stride * torch.arange(12)) % 60
        if planted is not None:
            self.tokens[planted, 0] = 63

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.tokens[index], "labels": self.tokens[index]}


def tiny(dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2
    )
    return LlamaForCausalLM(config).to(torch.bfloat16).to(dtype)


class Overflows(nn.Module):
    """A model whose hidden state is 1e30 times larger where the batch has token 63."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = tiny()
        self.inner.model.embed_tokens.register_forward_hook(
            lambda module, args, out: out * torch.where((args[0] == 63).any(), 1e30, 1.0)
        )
        self.inner.model.layers[0].input_layernorm = nn.Identity()

    def forward(self, input_ids: Tensor, labels: Tensor) -> Any:
        return self.inner(input_ids=input_ids, labels=labels)


def trainer(
    model: Any, out: Path, *, planted: int | None = None, callbacks: Any = None, **settings: Any
) -> Any:
    usual = {"max_steps": 8, "per_device_train_batch_size": 8, "learning_rate": 2e-4, "logging_steps": 2}
    usual |= {"lr_scheduler_type": "linear", "save_strategy": "no", "report_to": [], "disable_tqdm": True}
    cls, init = settings.pop("optimizer", None), settings.pop("model_init", None)
    arguments = TrainingArguments(output_dir=str(out), use_cpu=True, **(usual | settings))
    return Trainer(
        model,
        arguments,
        train_dataset=Sequences(planted),
        callbacks=callbacks,
        model_init=init,
        optimizer_cls_and_kwargs=cls,
    )


def trained(
    out: Path,
    policy: str | None = None,
    use: Use | None = None,
    model: Any = None,
    resume: Any = None,
    **settings: Any,
) -> Any:
    made = trainer(tiny() if model is None else model, out, **settings)
    if policy is not None:
        assert mezzo.transformers.use(made, policy, **(use or {})) is made
    made.train(resume_from_checkpoint=resume)
    return made


def losses(made: Any) -> list[float]:
    return [row["loss"] for row in made.state.log_history if "loss" in row]


def masters(made: Any) -> list[Tensor]:
    state = mezzo.master_state_dict(made.model, made.optimizer.optimizer)
    return [state[name].float() for name, _ in made.model.named_parameters()]


def apart(one: Any, other: Any) -> float:
    return sum(float((a - b).pow(2).sum()) for a, b in zip(masters(one), masters(other))) ** 0.5


def test_bf16_is_the_trainers_to_the_printed_digits(tmp_path: Path) -> None:
    full, own, ours = trained(tmp_path), trained(tmp_path, bf16=True), trained(tmp_path, "bf16")
    assert [f"{loss:.4f}" for loss in losses(ours)] == [f"{loss:.4f}" for loss in losses(own)]
    assert losses(ours) != losses(full)
    assert apart(ours, full) <= 1.5 * apart(own, full)


def test_fp16_trains_on_a_cpu(tmp_path: Path) -> None:
    full, ours = trained(tmp_path), trained(tmp_path, "fp16")
    assert losses(ours) != losses(full)
    assert math.dist(losses(ours), losses(full)) < 2e-3
    assert [row["loss_scale"] for row in ours.state.log_history if "loss" in row] == [2.0**16] * 4
    assert all(row["skipped_steps"] == 0 for row in ours.state.log_history if "loss" in row)


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("split", {}),
        ("fp32", {}),
        ("split", {"optimizer": (mezzo.optim.AdamW, {"lr": 2e-4, "masters": "split"})}),
    ],
)
def test_masters_under_bf16_weights_follow_fp32(kind: str, settings: Use, tmp_path: Path) -> None:
    plan = {"max_steps": 24, "lr_scheduler_type": "constant"}
    full = trained(tmp_path, **plan)
    own = trained(tmp_path, bf16=True, model=tiny(torch.bfloat16), **plan)
    ours = trained(tmp_path, "bf16", {"masters": kind}, tiny(torch.bfloat16), **plan, **settings)
    assert {param.dtype for param in ours.model.parameters()} == {torch.bfloat16}
    assert apart(ours, full) < apart(own, full) / 5


class Snapshots(TrainerCallback):
    """The trainer's masters and learning rate after each step."""

    def __init__(self) -> None:
        self.seen: list[tuple[float, list[Tensor]]] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        weights = [param.detach().clone() for param in kwargs["model"].parameters()]
        self.seen.append((kwargs["lr_scheduler"].get_last_lr()[0], weights))


def test_an_overflow_skips_the_step_and_is_in_the_log_and_in_tensorboard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "events"))
    seen = Snapshots()
    made = trained(
        tmp_path,
        "fp16",
        model=Overflows(),
        planted=20,  # the third batch
        callbacks=[seen],
        train_sampling_strategy="sequential",
        logging_steps=1,
        report_to=["tensorboard"],
        max_steps=4,
    )
    rows = [row for row in made.state.log_history if "loss" in row]
    assert [row["skipped_steps"] for row in rows] == [0, 0, 1, 0]
    assert [row["loss_scale"] for row in rows] == [2.0**16, 2.0**16, 2.0**15, 2.0**15]
    assert [row.get("nonfinite_losses") for row in rows] == [None, None, 1, None]
    assert [index for index, row in enumerate(rows) if "overflow" in row] == [2]
    assert "inner.model.layers.0" in rows[2]["overflow"]
    (second, before), (third, after) = seen.seen[1:3]
    assert second == third != seen.seen[3][0]
    assert all(map(torch.equal, before, after))
    events = EventAccumulator(str(tmp_path / "events")).Reload()
    assert [event.value for event in events.Scalars("train/skipped_steps")] == [0, 0, 1, 0]
    assert [event.step for event in events.Tensors("train/overflow/text_summary")] == [3]


@pytest.mark.parametrize(
    ("policy", "use"),
    [
        ("fp16", {"loss_scale": "dynamic(init=16777216,growth_interval=3)"}),
        ("bf16", {"masters": "split"}),
    ],
)
def test_resumed_training_equals_uninterrupted_training(policy: str, use: Use, tmp_path: Path) -> None:
    whole = trained(tmp_path, policy, use, save_strategy="steps", save_steps=4)
    half = tmp_path / "checkpoint-4"
    resumed = trained(tmp_path / "again", policy, use, resume=str(half), save_strategy="steps", save_steps=4)
    assert all(map(torch.equal, masters(whole), masters(resumed)))
    assert losses(whole) == losses(resumed)
    assert whole.accelerator.mezzo.loss_scale == resumed.accelerator.mezzo.loss_scale
    loaded = AutoModelForCausalLM.from_pretrained(half.with_name("checkpoint-8"), dtype=torch.float32)
    stored = [param.float() for param in whole.model.parameters()]
    assert all(map(torch.equal, loaded.parameters(), stored))


def test_checkpointed_activations_and_accumulation_change_nothing(tmp_path: Path) -> None:
    whole = trained(tmp_path, "fp16")
    assert losses(trained(tmp_path, "fp16", activation_checkpointing=True)) == losses(whole)
    parts = {"gradient_accumulation_steps": 4, "per_device_train_batch_size": 2}
    assert math.dist(losses(trained(tmp_path, "fp16", **parts)), losses(whole)) < 1e-3


def test_evaluation_and_several_trainings(tmp_path: Path) -> None:
    made = mezzo.transformers.use(trainer(tiny(), tmp_path), "bf16", masters="split")
    first = made.evaluate(Sequences())["eval_loss"]
    made.train()
    made.train()
    assert made.evaluate(Sequences())["eval_loss"] < first
    assert made.model.lm_head.weight.dtype is torch.bfloat16


def test_each_trial_of_a_search_is_attached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.trainer_utils import HPSearchBackend

    monkeypatch.setattr("transformers.integrations.integration_utils.is_wandb_available", lambda: True)
    made = trainer(None, tmp_path, model_init=lambda trial: tiny())
    mezzo.transformers.use(made, "fp16")
    made.hp_search_backend = HPSearchBackend.WANDB  # whose trial is a dictionary
    monkeypatch.setattr(made, "_get_output_dir", lambda trial: str(tmp_path))
    for rate in (1e-3, 2e-4):
        accelerator = made.accelerator
        made.train(trial={"learning_rate": rate})
        assert made.accelerator is not accelerator
        assert str(made.accelerator.mezzo.policy) == "fp16"
        assert made.state.log_history[0]["loss_scale"] == 2.0**16


def test_losses_that_are_not_finite_are_logged_under_bf16_too(tmp_path: Path) -> None:
    settings = {"planted": 1, "train_sampling_strategy": "sequential", "max_steps": 2}
    made = trained(tmp_path, "bf16", model=Overflows(), **settings)
    assert "skipped_steps" not in made.state.log_history[0]
    # bf16 holds 1e30, FP32's squares in the norm do not.
    assert made.state.log_history[0].get("nonfinite_losses", 0) in (0, 1, 2)


def again(made: Any) -> Any:
    mezzo.transformers.use(made, "bf16")
    return mezzo.transformers.use(made, "fp16")


def late(made: Any) -> Any:
    made.train()
    return mezzo.transformers.use(made, "fp16")


@pytest.mark.parametrize(
    ("made", "use", "error", "parts"),
    [
        ({"bf16": True}, "fp16", UsageError, ["bf16=True", "Set bf16=False"]),
        ({"bf16_full_eval": True}, "fp16", UsageError, ["bf16_full_eval=False"]),
        ({}, again, UsageError, ["bf16", "once"]),
        ({}, late, CallOrderError, ["before trainer.train()"]),
        ({"model": tiny(torch.float16)}, "fp16", UsageError, ["fp16", "clips", "dtype=torch.float32"]),
        ({}, "fp16,params=fp16", UsageError, ["params=fp16", "clips", "masters='split'"]),
        ({"model": tiny(torch.bfloat16)}, "bf16", UsageError, ["bf16", "'split'"]),
        ({}, "bf61", UsageError, ["bf61", "'bf16'"]),
        (None, "bf16", UsageError, ["Linear", "transformers.Trainer"]),
    ],
)
def test_bad_input(
    made: Use | None,
    use: str | Callable[[Any], Any],
    error: type[Exception],
    parts: list[str],
    tmp_path: Path,
) -> None:
    given = (
        nn.Linear(1, 1)
        if made is None
        else trainer(**({"model": tiny(), "out": tmp_path, "max_steps": 1} | made))
    )
    with pytest.raises(error) as raised:
        use(given) if callable(use) else mezzo.transformers.use(given, use).train()
    assert [part for part in parts if part not in str(raised.value)] == []

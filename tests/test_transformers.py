"""Transformers' Trainer and TRL's under `mezzo.transformers.use`, compared with their own bf16 and with FP32."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from safetensors.torch import load_file
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Trainer, TrainingArguments
from trl import SFTConfig, SFTTrainer

import mezzo
from faults.models import Net
from mezzo.core.errors import CallOrderError, UsageError
from trainers import OVERFLOW, USUAL, llama, logged, refused

# TRL's and PEFT's own use of former names.
pytestmark = pytest.mark.filterwarnings("ignore:.*gradient_checkpointing. is deprecated:FutureWarning")

attach = mezzo.transformers.use

SAVES = {"save_strategy": "steps", "save_steps": 2}
BF16 = torch.bfloat16
MARK = 63  # a token that overflows in `planted`
DRAWN = torch.Generator().manual_seed(0)
START, STRIDE = torch.randint(1, 8, (2, 64, 1), generator=DRAWN)
TOKENS = (START + STRIDE * torch.arange(12)) % 60


def planted() -> Any:
    model = llama()
    model.model.layers[0].input_layernorm = nn.Identity()
    model.model.embed_tokens.register_forward_hook(
        lambda module, args, out: out * torch.where((args[0] == MARK).any(), OVERFLOW, 1.0)
    )
    return model


def made(out: Path, model: Any = None, marked: int | None = None, **options: Any) -> Any:
    """A Trainer; `options` are TrainingArguments', or the Trainer's own."""
    own = {name: options.pop(name) for name in ("model_init", "optimizer_cls_and_kwargs") if name in options}
    tokens = TOKENS.clone()
    if marked is not None:
        tokens[marked, 0] = MARK
    data = [{"input_ids": row, "labels": row} for row in tokens]
    arguments = TrainingArguments(output_dir=str(out), **(USUAL | {"learning_rate": 2e-4} | options))
    model = None if "model_init" in own else llama() if model is None else model
    return Trainer(model, arguments, train_dataset=data, **own)


def trained(out: Path, policy: str = "", use: Any = {}, resume: Any = None, **options: Any) -> Any:  # noqa: B006
    trainer = made(out, **options)
    if policy:
        assert attach(trainer, policy, **use) is trainer
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def masters(trainer: Any) -> Tensor:
    state = mezzo.master_state_dict(trainer.model, trainer.optimizer.optimizer)
    return torch.cat([state[name].flatten().float() for name, _ in trainer.model.named_parameters()])


def apart(one: Any, other: Any) -> float:
    return float((masters(one) - masters(other)).norm())


def test_bf16_is_the_trainers_to_the_printed_digits_and_fp16_trains_on_a_cpu(tmp_path: Path) -> None:
    full, own = trained(tmp_path), trained(tmp_path, bf16=True)
    bf16, fp16 = trained(tmp_path, "bf16"), trained(tmp_path, "fp16")
    assert [f"{loss:.4f}" for loss in logged(bf16)] == [f"{loss:.4f}" for loss in logged(own)]
    assert 0 < apart(bf16, full) <= 1.5 * apart(own, full)
    assert 0 < math.dist(logged(fp16), logged(full)) < 2e-3
    assert (logged(fp16, "loss_scale"), logged(fp16, "skipped_steps")) == ([2.0**16] * 3, [0] * 3)


@pytest.mark.heavy
def test_masters_under_bf16_weights_follow_fp32(tmp_path: Path) -> None:
    plan = {"max_steps": 24, "lr_scheduler_type": "constant"}
    full, own = trained(tmp_path, **plan), trained(tmp_path, bf16=True, model=llama(dtype=BF16), **plan)
    chosen = (mezzo.optim.AdamW, {"lr": 2e-4, "masters": "split"})
    for kind, options in (("split", {}), ("fp32", {}), ("split", {"optimizer_cls_and_kwargs": chosen})):
        ours = trained(tmp_path, "bf16", {"masters": kind}, model=llama(dtype=BF16), **plan, **options)
        assert {param.dtype for param in ours.model.parameters()} == {BF16}
        assert apart(ours, full) < apart(own, full) / 5


@pytest.mark.heavy
def test_an_overflow_is_skipped_and_is_in_the_log_and_in_tensorboard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # TensorBoard does not import TensorFlow, which would stay in this process, if this module exists.
    monkeypatch.setitem(sys.modules, "tensorboard.compat.notf", ModuleType("notf"))
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "events"))
    often = {"logging_steps": 1, "save_strategy": "steps", "save_steps": 1, "max_steps": 4}
    often |= {"train_sampling_strategy": "sequential", "report_to": ["tensorboard"]}
    trainer = trained(tmp_path, "fp16", model=planted(), marked=20, **often)  # in the third batch
    assert logged(trainer, "skipped_steps") == [0, 0, 1, 0]
    assert logged(trainer, "loss_scale") == [2.0**16, 2.0**16, 2.0**15, 2.0**15]
    assert logged(trainer, "nonfinite_losses") == [None, None, 1, None]
    assert [report is None for report in logged(trainer, "overflow")] == [True, True, False, True]
    assert "model.layers.0" in logged(trainer, "overflow")[2]
    rates = logged(trainer, "learning_rate")  # before each step
    assert rates[1] > rates[2] == rates[3]
    before, after = (load_file(tmp_path / f"checkpoint-{n}" / "model.safetensors") for n in (2, 3))
    assert all(torch.equal(before[name], after[name]) for name in before)
    events = EventAccumulator(str(tmp_path / "events")).Reload()
    assert [event.value for event in events.Scalars("train/skipped_steps")] == [0, 0, 1, 0]
    assert [event.step for event in events.Tensors("train/overflow/text_summary")] == [3]


def test_an_overflow_in_compute_loss_is_traced_when_it_comes_again(tmp_path: Path) -> None:
    class Own(Trainer):
        losses = 0

        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            loss = super().compute_loss(*args, **kwargs)
            self.losses += 1
            return torch.log(loss * 0) if self.losses in (2, 4) else loss

    trainer = made(tmp_path)
    trainer.__class__ = Own
    attach(trainer, "fp16").train()
    first, second = trainer.accelerator.mezzo.findings
    assert (first.cause, "the next steps are traced to" in first.note) == ("loss", True)
    assert (second.cause, second.op) == ("invalid", "log")


@pytest.mark.parametrize(
    ("policy", "use"),
    [("fp16", {}), ("fp16,module.lm_head=fp32", {"loss_scale": mezzo.DynamicLossScale(init=1024.0)})],
)
def test_the_printed_fix_can_be_pasted(policy: str, use: Any, tmp_path: Path) -> None:
    def large() -> Any:
        model = llama()
        # SiLU with a factor of one in two parts, the first of which overflows in fp16.
        model.model.layers[0].mlp.act_fn = Net(lambda self, x: nn.functional.silu(x * 1e9 / 1e9))
        return model

    before = trained(tmp_path, policy, use, model=large(), max_steps=2).accelerator.mezzo
    assert before.skipped_steps == 2
    fix = re.search(r"`(mezzo\.[^`]*)`", before.findings[-1].advice)
    assert fix is not None
    trainer = made(tmp_path, model=large(), max_steps=2)
    exec(fix[1], {"mezzo": mezzo, "trainer": trainer})
    trainer.train()
    after = trainer.accelerator.mezzo
    assert (after.skipped_steps, after.loss_scale) == (0, use["loss_scale"].init if use else 2.0**16)


@pytest.mark.parametrize(
    ("policy", "use"),
    [("fp16", {"loss_scale": "dynamic(init=16777216,growth_interval=3)"}), ("bf16", {"masters": "split"})],
)
def test_resumed_training_equals_uninterrupted_training(policy: str, use: Any, tmp_path: Path) -> None:
    whole = trained(tmp_path, policy, use, **SAVES)
    resumed = trained(tmp_path / "again", policy, use, resume=str(tmp_path / "checkpoint-4"), **SAVES)
    assert torch.equal(masters(whole), masters(resumed))
    assert logged(whole) == logged(resumed)
    assert whole.accelerator.mezzo.loss_scale == resumed.accelerator.mezzo.loss_scale
    bf16 = trained(tmp_path / "bf16", "bf16", resume=str(tmp_path / "checkpoint-4"))  # without a loss scale
    assert math.dist(logged(bf16), logged(whole)) < 0.01
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint-6", dtype=torch.float32)
    stored = [param.float() for param in whole.model.parameters()]
    assert all(map(torch.equal, loaded.parameters(), stored))


@pytest.mark.heavy
def test_checkpointed_activations_and_accumulation_change_nothing(tmp_path: Path) -> None:
    whole = logged(trained(tmp_path, "fp16"))
    assert logged(trained(tmp_path, "fp16", activation_checkpointing=True)) == whole
    parts = trained(tmp_path, "fp16", gradient_accumulation_steps=4, per_device_train_batch_size=2)
    assert math.dist(logged(parts), whole) < 1e-3


@pytest.mark.heavy
def test_a_compiled_model_trains_as_one_that_is_not(tmp_path: Path) -> None:
    compiled = {"torch_compile": True, "torch_compile_backend": "aot_eager"}
    whole, ours = trained(tmp_path, "bf16"), trained(tmp_path, "bf16", **compiled)
    assert logged(ours) == logged(whole)


def test_evaluation_and_several_trainings(tmp_path: Path) -> None:
    trainer = attach(made(tmp_path, learning_rate=1e-2), "bf16", masters="split")
    first = trainer.evaluate(trainer.train_dataset)["eval_loss"]
    trainer.train()
    trainer.train()
    assert trainer.evaluate(trainer.train_dataset)["eval_loss"] < first - 0.1
    assert trainer.model.lm_head.weight.dtype is BF16


def test_each_trial_of_a_search_is_attached(tmp_path: Path) -> None:
    pytest.importorskip("optuna")
    trainer = attach(made(tmp_path, model_init=lambda trial: llama()), "fp16")
    trainer.eval_dataset = trainer.train_dataset
    trials: list[Any] = []

    def objective(metrics: dict[str, float]) -> float:
        trials.append((trainer.accelerator, logged(trainer, "loss_scale")))
        return metrics["eval_loss"]

    rate = "learning_rate"
    best = trainer.hyperparameter_search(
        lambda trial: {rate: trial.suggest_float(rate, 1e-4, 1e-3)}, objective, n_trials=2, backend="optuna"
    )
    (first, scales), (second, again) = trials
    assert first is not second
    assert scales == again == [2.0**16] * 3
    assert set(best.hyperparameters) == {"learning_rate"}
    assert math.isfinite(best.objective)


@pytest.mark.parametrize(
    ("options", "use", "error", "parts"),
    [
        ({"bf16": True}, "fp16", UsageError, ["bf16=True", "Set bf16=False"]),
        ({"bf16_full_eval": True}, "fp16", UsageError, ["bf16_full_eval=False"]),
        ({}, lambda trainer: attach(attach(trainer, "bf16"), "fp16"), UsageError, ["bf16", "once"]),
        ({}, lambda trainer: (trainer.train(), attach(trainer, "fp16")), CallOrderError, ["before trainer.train()"]),
        ({"model": llama(dtype=torch.float16)}, "fp16", UsageError, ["fp16", "clips", "dtype=torch.float32"]),
        ({}, "fp16,params=fp16", UsageError, ["fp16,masters=fp32", "clips", "masters='split'"]),
        ({"model": llama(dtype=BF16)}, "bf16", UsageError, ["bf16", "'split'"]),
        # Here, and not within `train`.
        ({"model": llama(dtype=BF16)}, lambda trainer: attach(trainer, "fp16"), UsageError,
         ["fp16", "'bf16,masters=split'", "model.float()"]),
        ({"optim": "adafactor"}, "bf16,masters=split", UsageError, ["Adafactor", "masters=fp32"]),
        ({}, "bf61", UsageError, ["bf61", "'bf16'"]),
        ({}, lambda _: attach(llama(), "bf16"), UsageError, ["Llama", "transformers.Trainer"]),
    ],
)  # fmt: skip
def test_bad_input(
    options: Any, use: str | Callable[[Any], Any], error: type[Exception], parts: list[str], tmp_path: Path
) -> None:
    trainer = made(tmp_path, **({"max_steps": 1} | options))
    with refused(error, *parts):
        use(trainer) if callable(use) else attach(trainer, use).train()


# TRL's SFTTrainer and PEFT's LoRA, compared with TRL's own bf16.

WORDS = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]


def sft(out: Path, *, lora: bool = False, **settings: Any) -> Any:
    vocabulary = {word: index for index, word in enumerate(["<pad>", "<eos>", *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    usual = USUAL | {"learning_rate": 1e-2, "per_device_train_batch_size": 4, "max_length": 16}
    special = {"pad_token": "<pad>", "eos_token": "<eos>"}
    return SFTTrainer(
        llama(16),
        SFTConfig(output_dir=str(out), **(usual | settings)),
        train_dataset=Dataset.from_dict({"text": [" ".join(WORDS[i:] + WORDS[:i]) for i in [*range(5)] * 6]}),
        processing_class=PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special),
        peft_config=LoraConfig(r=4, target_modules=["q_proj", "v_proj"]) if lora else None,
    )


@pytest.mark.parametrize("lora", [False, True])
def test_bf16_is_trls_to_the_printed_digits(lora: bool, tmp_path: Path) -> None:
    own, ours = sft(tmp_path, lora=lora, bf16=True), sft(tmp_path, lora=lora, bf16=False)
    own.train()
    attach(ours, "bf16").train()
    assert [f"{loss:.3f}" for loss in logged(ours)] == [f"{loss:.3f}" for loss in logged(own)]
    assert any(not param.requires_grad for param in ours.model.parameters()) is lora


@pytest.mark.parametrize("use", [{"policy": "fp16"}, {"policy": "bf16", "masters": "split"}])
def test_an_adapter_trains(use: dict[str, str], tmp_path: Path) -> None:
    low = sft(tmp_path, lora=True, bf16=False)
    attach(low, **use).train()
    assert logged(low, "skipped_steps") == [0 if use["policy"] == "fp16" else None] * 3
    assert logged(low)[-1] < logged(low)[0]


def test_the_default_of_trl_is_a_second_setting(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"bf16=True.*bf16=False.*default of SFTConfig"):
        attach(sft(tmp_path), "fp16")

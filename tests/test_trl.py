"""TRL's SFTTrainer and PEFT's LoRA under `mezzo.transformers.use`, compared with TRL's own bf16."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

import mezzo
from mezzo.core.errors import UsageError
from trainers import USUAL, llama, logged

# TRL's and PEFT's own use of former names.
pytestmark = pytest.mark.filterwarnings("ignore:.*gradient_checkpointing. is deprecated:FutureWarning")

WORDS = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]


def sft(out: Path, *, lora: bool = False, **settings: Any) -> Any:
    vocabulary = {word: index for index, word in enumerate(["<pad>", "<eos>", *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    usual = USUAL | {"learning_rate": 1e-2, "per_device_train_batch_size": 4, "max_length": 16}
    return SFTTrainer(
        llama(16),
        SFTConfig(output_dir=str(out), **(usual | settings)),
        train_dataset=Dataset.from_dict(
            {"text": [" ".join(WORDS[i % 5 :] + WORDS[: i % 5]) for i in range(32)]}
        ),
        processing_class=PreTrainedTokenizerFast(
            tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>"
        ),
        peft_config=LoraConfig(r=4, target_modules=["q_proj", "v_proj"]) if lora else None,
    )


@pytest.mark.parametrize("lora", [False, True])
def test_bf16_is_trls_to_the_printed_digits(lora: bool, tmp_path: Path) -> None:
    own, ours = sft(tmp_path, lora=lora, bf16=True), sft(tmp_path, lora=lora, bf16=False)
    own.train()
    mezzo.transformers.use(ours, "bf16").train()
    assert [f"{loss:.3f}" for loss in logged(ours)] == [f"{loss:.3f}" for loss in logged(own)]
    assert any(not param.requires_grad for param in ours.model.parameters()) is lora


@pytest.mark.parametrize("use", [{"policy": "fp16"}, {"policy": "bf16", "masters": "split"}])
def test_an_adapter_trains(use: dict[str, str], tmp_path: Path) -> None:
    low = sft(tmp_path, lora=True, bf16=False)
    mezzo.transformers.use(low, **use).train()
    assert logged(low, "skipped_steps") == [0 if use["policy"] == "fp16" else None] * 3
    assert logged(low)[-1] < logged(low)[0]


def test_the_default_of_trl_is_a_second_setting(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"bf16=True.*bf16=False.*default of SFTConfig"):
        mezzo.transformers.use(sft(tmp_path), "fp16")

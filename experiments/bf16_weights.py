"""A small Llama whose weights are bf16, as Transformers loads most models, under AdamW without masters.

    mezzo compare experiments/bf16_weights.py --precision own --json > benchmarks/results/bf16_weights.json

The FP32 runs are the same script with FP32 weights, `own` is the script as it is, and `own,masters=split` is the script
under `mezzo run --masters split`. The text is drawn from a random Markov chain of order 2.
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

WORDS, BATCH, LENGTH, STEPS, RATE = 64, 16, 32, 600, 1e-4


def text(next_word: Tensor) -> Tensor:
    """Sentences [BATCH, LENGTH] in which `next_word`, [WORDS, WORDS, WORDS], has each word's probability after two."""
    words = torch.randint(0, WORDS, (BATCH, LENGTH))
    for i in range(2, LENGTH):
        words[:, i] = torch.multinomial(next_word[words[:, i - 2], words[:, i - 1]], 1).squeeze(1)
    return words


def main() -> None:
    torch.manual_seed(0)
    next_word = torch.softmax(4 * torch.randn(WORDS, WORDS), -1).expand(WORDS, -1, -1)
    next_word = torch.softmax(next_word.log() + torch.randn(WORDS, 1, WORDS), -1)
    config = LlamaConfig(
        vocab_size=WORDS,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        use_cache=False,
    )
    model = LlamaForCausalLM(config).bfloat16().train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.05, STEPS)
    for step in range(STEPS):
        words = text(next_word)
        loss = model(input_ids=words, labels=words).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        if step % 100 == 99:
            print(f"step {step + 1}: loss {loss.item():.4f}")


if __name__ == "__main__":
    main()

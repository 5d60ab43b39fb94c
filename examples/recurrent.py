"""A recurrent network on packed sequences of different lengths, with FP32 states.

python examples/recurrent.py --precision fp16,hidden=fp32
"""

import argparse

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_sequence, pad_packed_sequence

import mezzo


class Counter(nn.Module):
    """Counts the ones in a sequence of zeros and ones: the state must hold the sum."""

    def __init__(self, hidden: int = 64) -> None:
        super().__init__()
        self.lstm = nn.LSTM(1, hidden, num_layers=2, batch_first=True, dropout=0.1)
        self.head = nn.Linear(hidden, 1)

    def forward(self, sequences: list[Tensor]) -> tuple[Tensor, Tensor]:
        outputs, _ = self.lstm(pack_sequence(sequences, enforce_sorted=False))
        padded, lengths = pad_packed_sequence(outputs, batch_first=True)
        return self.head(padded).squeeze(-1), lengths


parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--precision", default="bf16,hidden=fp32", help="any policy (default %(default)s)")
parser.add_argument("--steps", type=int, default=150, help="default %(default)s")
arguments = parser.parse_args()

torch.manual_seed(0)
model = Counter()
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3, fused=True)
# Recurrent gradients can grow with the length of a sequence. step() clips them after unscaling.
mp = mezzo.MixedPrecision(model, optimizer, arguments.precision, clip_norm=1.0)
for step in range(arguments.steps):
    lengths = torch.randint(20, 60, (32,)).tolist()
    bits = [torch.randint(0, 2, (length, 1)).float() for length in lengths]
    counts = nn.utils.rnn.pad_sequence([x.squeeze(-1).cumsum(0) for x in bits], batch_first=True)
    with mp.autocast():
        guessed, lengths_seen = model(bits)
        inside = torch.arange(guessed.shape[1]) < lengths_seen[:, None]
        loss = F.mse_loss(guessed[inside], counts[inside] / 10)
    result = mp.step(loss)
    if (step + 1) % 50 == 0:
        print(f"step {step + 1}: loss {loss.item():.4f}, skipped: {result.skipped}")

with torch.no_grad(), mp.autocast():
    outputs, (hidden, cell) = model.lstm(torch.ones(1, 40, 1))
print(
    f"{mp.policy}: outputs {outputs.dtype}, states {hidden.dtype} and {cell.dtype}, last loss {loss.item():.4f}"
)

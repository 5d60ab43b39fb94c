"""A convolutional network with batch normalization, in bf16 or fp16, with a scheduler, an average and a checkpoint.

python examples/cnn.py --precision fp16
"""

import argparse

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn

import mezzo


def stage(inputs: int, outputs: int) -> nn.Sequential:
    """Convolution, normalization, ReLU, pooling."""
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, padding=1, bias=False),
        nn.BatchNorm2d(outputs),
        nn.ReLU(),
        nn.MaxPool2d(2),
    )


parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--precision", default="auto", help="any policy (default %(default)s)")
parser.add_argument("--steps", type=int, default=200, help="default %(default)s")
arguments = parser.parse_args()

torch.manual_seed(0)
digits = load_digits()
images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
labels = torch.tensor(digits.target)

# Convolutions are fastest in the layout channels_last, in 16 bits and in FP32.
model = nn.Sequential(stage(1, 32), stage(32, 64), nn.Flatten(), nn.Linear(256, 10))
model = model.to(memory_format=torch.channels_last)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True, fused=True)
scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.2, total_steps=arguments.steps)
average = torch.optim.swa_utils.AveragedModel(
    model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.95)
)

# Passed to MixedPrecision, the scheduler and the average skip the steps that the optimizer skips.
mp = mezzo.MixedPrecision(model, optimizer, arguments.precision, scheduler=scheduler, ema=average)
for step in range(arguments.steps):
    chosen = torch.randint(0, 1500, (64,))
    with mp.autocast():
        loss = F.cross_entropy(model(images[chosen]), labels[chosen])
    result = mp.step(loss)
    if (step + 1) % 50 == 0:
        print(f"step {step + 1}: loss {loss.item():.4f}, loss scale {mp.loss_scale:g}")

# A run resumes exactly from these states and those of the scheduler and the average.
checkpoint = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "mezzo": mp.state_dict()}
mp.load_state_dict(checkpoint["mezzo"])

# Evaluation: the same context, with the running statistics of batch normalization, which are FP32.
average.module.load_state_dict({**average.module.state_dict(), **dict(model.named_buffers())})
average.eval()
with torch.no_grad(), mp.autocast():
    right = average(images[1500:]).argmax(1) == labels[1500:]
print(f"{mp.policy}: {right.float().mean():.1%} of unseen digits right")

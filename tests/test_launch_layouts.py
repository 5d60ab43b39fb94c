"""`mezzo run` of scripts that call what PyTorch has no 16-bit kernel for.

They run as under Python, and the summary says which calls ran in FP32.

Each row is the body of a model's `forward`, in which `h` is a layer's output and has 16 bits. torch.autocast raises in
most of them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from launching import launcher

SCRIPT = """
import warnings
warnings.simplefilter("ignore")  # sparse and nested tensors say that they are prototypes
import torch
from torch import nn
torch.manual_seed(0)
RING = torch.roll(torch.eye(6), 1, 0)
PLACES = torch.tensor([0, 1, 2, 0, 1, 2])

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.adaptive = nn.AdaptiveLogSoftmaxWithLoss(4, 10, [3, 6])

    def forward(self, x):
        h = self.inner(x)
        {body}

model = Model()
out = model(torch.randn(6, 4))
out.float().pow(2).mean().backward()
print(*out.float().flatten().tolist(), *model.inner.weight.grad.flatten().tolist())
"""

# Body -> ops of which the summary says that they ran in FP32, in bf16 and in fp16 (no CPU computes fp16 itself).
BODIES: dict[str, tuple[str, str]] = {
    "return RING.to_sparse() @ h": ("", "matmul"),
    "return RING.to_sparse_csr() @ h": ("mm", "matmul"),
    "return h.T @ RING.to_sparse_csc()": ("mm", "matmul"),
    "return torch.mm(RING.to_sparse_bsr((2, 2)), h.detach()) + h": ("mm", "mm"),
    "return torch.sparse.mm(RING.to_sparse(), h)": ("", ""),
    "return torch.sparse.mm(RING.to_sparse_csr(), h)": ("", ""),
    "return torch.sparse.addmm(h, RING.to_sparse(), h)": ("", ""),
    "return torch.addmm(h, RING.to_sparse_csr(), h)": ("addmm", "addmm"),
    "return torch.mv(RING.to_sparse_csr(), h[:, 0])": ("mv", "mv"),
    "return torch.mv(RING.to_sparse(), h[:, 0])": ("mv", "mv"),
    "return torch.bmm(RING.to_sparse()[None].coalesce(), h[None])": ("bmm", "bmm"),
    "return nn.functional.linear(h.T, RING.to_sparse_csr())": ("mm", "linear"),
    "return torch.zeros(3, 4).index_add(0, PLACES, h)": ("", ""),
    "return torch.zeros(3, 4).index_add_(0, PLACES, h)": ("", ""),
    "return torch.zeros(6, 4).index_copy_(0, PLACES[:3], h[:3])": ("", ""),
    "return torch.ones(3, 4).index_reduce(0, PLACES, h, 'amax')": ("", ""),
    "return torch.zeros(3, 4).scatter_reduce(0, PLACES[:, None].expand(6, 4), h, 'sum')": ("", ""),
    "return torch.zeros(3, 4).scatter_add_(0, PLACES[:, None].expand(6, 4), h)": ("", ""),
    "return torch.zeros(6, 4).scatter(0, PLACES[:3, None].expand(3, 4), h[:3])": ("", ""),
    "return torch.zeros(6, 4).masked_scatter(torch.ones(6, 4) > 0, h)": ("", ""),
    "out = torch.zeros(6, 4); out[PLACES[:3]] = h[:3]; return out": ("", ""),
    "out = torch.zeros(6, 4); out[RING[:, :4] > 0] = h.flatten()[:4]; return out": ("", ""),
    "return torch.zeros(4, 4).addmm_(h.T, h)": ("", ""),
    "return h.masked_fill(RING[:, :4] > 0, -1e9).softmax(-1)": ("", "masked_fill"),
    "return h.masked_fill_(RING[:, :4] > 0, -1e9).softmax(-1)": ("", ""),
    "return h.masked_fill(RING[:, :4] > 0, torch.finfo(torch.float32).min).softmax(-1)": ("masked_fill",) * 2,
    "return torch.special.log_ndtr(h)": ("", ""),
    "return torch.special.i1e(h)": ("", ""),
    "return torch.special.bessel_j0(h.detach()) + h": ("", ""),
    "return torch.linalg.vander(h)": ("", ""),
    "return torch.complex(h, h).abs()": ("", ""),
    "return self.adaptive(h, torch.arange(6) + 3).output": ("", ""),
    "return self.inner(torch.nested.as_nested_tensor([h[:2], h[2:]])).to_padded_tensor(0.0)": ("", "linear"),
    "return self.inner(torch.nested.nested_tensor_from_jagged(h, torch.tensor([0, 2, 6]))).values()": (
        "",
        "linear",
    ),
}


@pytest.fixture
def run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Any:
    return launcher(tmp_path, capsys)


@pytest.mark.heavy
@pytest.mark.parametrize("body", BODIES)
def test_it_runs_as_in_fp32_and_the_summary_says_what_fell_back(body: str, run: Any) -> None:
    source = SCRIPT.format(body=body)
    fp32 = run(source, policy="fp32")
    expected = [float(word) for word in fp32.out.split()]
    assert len(expected) > 16
    for policy, op in zip(("bf16", "fp16"), BODIES[body]):
        ran = run(source, policy=policy)
        assert ran.status == 0, ran.err
        values = [float(word) for word in ran.out.split()]
        assert values == pytest.approx(expected, rel=0.05, abs=0.05)
        assert values != expected
        told = [line for line in ran.err.splitlines() if "in FP32, because" in line]
        assert len(told) == bool(op)
        if op:
            assert f"{op} (" in told[0]


ENCODER = """
import warnings
warnings.simplefilter("ignore")
import torch
from torch import nn
torch.manual_seed(0)

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 8)
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True), 2)

    def forward(self, x, padding):
        return self.encoder(self.inner(x), src_key_padding_mask=padding)

model = Model()
x, padding = torch.randn(2, 5, 4), torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
for epoch in range(2):
    model.train()
    model(x, padding)[~padding].pow(2).mean().backward()
    model.eval()
    with torch.no_grad():
        print(*model(x, padding).flatten().tolist())
"""


@pytest.mark.heavy
@pytest.mark.parametrize("policy", ["bf16", "fp16"])
def test_a_padded_encoder_validates(policy: str, run: Any) -> None:
    expected = [float(word) for word in run(ENCODER, policy="fp32").out.split()]
    ran = run(ENCODER, policy=policy)
    assert ran.status == 0, ran.err
    assert len(expected) == 160
    assert [float(word) for word in ran.out.split()] == pytest.approx(expected, rel=0.05, abs=0.05)


@pytest.mark.heavy
def test_the_kernels_of_a_run_are_gone_after_it(run: Any) -> None:
    import torch

    body = "return RING.to_sparse_csr() @ h"
    assert run(SCRIPT.format(body=body), policy="bf16").status == 0
    ring = torch.eye(4, dtype=torch.bfloat16).to_sparse_csr()
    with pytest.raises(NotImplementedError):
        ring @ torch.ones(4, 4, dtype=torch.bfloat16)

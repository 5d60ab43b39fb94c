"""Small trainings, each of a kind that zero-code precision could get wrong. Plain PyTorch, unless told so.

    python trainings.py --only clipping                 plain
    mezzo run --precision fp16 trainings.py ...          under test
    python trainings.py --by-hand fp16 ...               the same with Mezzo's calls written into it

Prints, for each training, its losses and a digest of its weights, every bit of them.
"""

import argparse
import contextlib
import hashlib
import json

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint


class Plain:
    """What a script without mixed precision does."""

    def call(self, model, *args):
        return model(*args)

    def region(self):
        return contextlib.nullcontext()

    def backward(self, loss, **kwargs):
        loss.backward(**kwargs)

    def grad(self, loss, inputs, **kwargs):
        return torch.autograd.grad(loss, inputs, **kwargs)

    def unscale(self, optimizer):
        pass

    def step(self, optimizer, *closure, is_last=True):
        return optimizer.step(*closure)

    def train_on(self, loss, optimizer, is_last=True):
        optimizer.zero_grad()
        self.backward(loss)
        self.step(optimizer, is_last=is_last)


class ByHand(Plain):
    """What the documentation of mixed precision tells people to write."""

    def __init__(self, policy):
        import mezzo

        self.mezzo = mezzo
        self.policy = mezzo.policy(policy)
        machine = self.policy.make_loss_scale()
        self.scaler = mezzo.GradScaler("cpu", init_scale=machine.scale, enabled=machine.scale != 1.0)

    def call(self, model, *args):
        self.store(model)
        with self.region():
            out = model(*args)
        return out.float()

    def store(self, model):
        if self.policy.params != "fp32" and any(p.dtype is torch.float32 for p in model.parameters()):
            from mezzo.pytorch.weights.stored_parameters import lower_weights

            lower_weights(model, self.policy)

    def region(self):
        return self.mezzo.autocast(self.policy, "cpu")

    def backward(self, loss, **kwargs):
        self.scaler.scale(loss).backward(**kwargs)

    def grad(self, loss, inputs, **kwargs):
        inverse = 1.0 / self.scaler.get_scale()
        return tuple(g * inverse for g in torch.autograd.grad(self.scaler.scale(loss), inputs, **kwargs))

    def unscale(self, optimizer):
        self.scaler.unscale_(optimizer)

    def step(self, optimizer, *closure, is_last=True):
        if self.policy.params != "fp32":
            from mezzo.pytorch.optim.adopt import adopt

            optimizer = adopt(optimizer, masters=self.policy.masters, state=self.policy.state)
        loss = self.scaler.step(optimizer, *closure)
        if is_last:
            self.scaler.update()
        return loss


def data(n=24, width=12, classes=4, seed=1):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, width, generator=generator)
    return x, torch.randint(0, classes, (n,), generator=generator)


def network(width=12, classes=4):
    middle = (nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 32), nn.ReLU())
    return nn.Sequential(nn.Linear(width, 32), *middle, nn.Linear(32, classes))


def clipping(by, report):
    """The loss is so large that fp16 skips the first steps; the value clip would hide the infinities."""
    model, (x, y) = network(), data()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    for _ in range(8):
        loss = 64 * F.cross_entropy(by.call(model, x), y)
        optimizer.zero_grad()
        by.backward(loss)
        by.unscale(optimizer)
        nn.utils.clip_grad_value_(model.parameters(), 1.0)
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        by.step(optimizer)
        scheduler.step()
        report(loss, norm)
    return model


def accumulation(by, report):
    model, (x, y) = network(), data()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(4):
        for part in range(3):
            window = slice(8 * part, 8 * part + 8)
            # One micro-step in three overflows, until the scale has come down.
            factor = 1024.0 if part == 1 else 1.0
            loss = factor * F.cross_entropy(by.call(model, x[window]), y[window]) / 3
            by.backward(loss)
            report(loss)
        by.step(optimizer)
        optimizer.zero_grad(set_to_none=False)
    return model


def gradient_penalty(by, report):
    model, (x, _) = network(classes=1), data()
    optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-3)
    for _ in range(5):
        x.requires_grad_(True)
        score = by.call(model, x)
        (slope,) = by.grad(score.mean(), [x], create_graph=True)
        with by.region():
            penalty = (slope.flatten(1).norm(dim=1) - 1).square().mean()
        loss = score.square().mean() + 10 * penalty.float()
        by.train_on(loss, optimizer)
        report(loss, slope.sum())
    return model


def two_optimizers(by, report):
    torch.manual_seed(5)
    generator, critic = nn.Sequential(nn.Linear(6, 24), nn.ReLU(), nn.Linear(24, 12)), network(classes=1)
    g_opt = torch.optim.Adam(generator.parameters(), lr=1e-3)
    d_opt = torch.optim.Adam(critic.parameters(), lr=1e-3)
    real, _ = data()
    for _ in range(5):
        fake = by.call(generator, torch.randn(24, 6))
        d_loss = F.softplus(-by.call(critic, real)).mean() + F.softplus(by.call(critic, fake.detach())).mean()
        by.train_on(d_loss, d_opt, is_last=False)
        g_loss = F.softplus(-by.call(critic, fake)).mean()
        by.train_on(g_loss, g_opt)
        report(d_loss, g_loss)
    return nn.ModuleList([generator, critic])


class Tied(nn.Module):
    """Shared parameters, and checkpoints."""

    def __init__(self, use_reentrant):
        super().__init__()
        self.use_reentrant = use_reentrant
        self.embedding = nn.Embedding(20, 16)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 16), nn.GELU(), nn.Dropout(0.1)) for _ in range(3)
        )
        self.head = nn.Linear(16, 20, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = x + checkpoint(block, x, use_reentrant=self.use_reentrant)
        return self.head(x)


def tied(by, report, use_reentrant):
    model = Tied(use_reentrant)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    tokens = torch.randint(0, 20, (4, 9))
    inputs, target = tokens[:, :-1], tokens[:, 1:].flatten()
    for _ in range(5):
        loss = F.cross_entropy(by.call(model, inputs).flatten(0, 1), target)
        by.train_on(loss, optimizer)
        report(loss)
    return model


def shared_and_checkpointed(by, report):
    return nn.ModuleList([tied(by, report, reentrant) for reentrant in (False, True)])


def lbfgs(by, report):
    model, (x, y) = network(), data()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=4, line_search_fn="strong_wolfe")
    for _ in range(3):

        def closure():
            optimizer.zero_grad()
            loss = 2.0**14 * F.cross_entropy(by.call(model, x), y)
            by.backward(loss)
            return loss

        loss = by.step(optimizer, closure)
        report(loss)
    return model


def several_losses(by, report):
    """retain_graph, backward on part of the leaves, a loss that is no scalar, BatchNorm and then evaluation."""
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 4)
    )
    (_, y), x = data(), torch.randn(24, 1, 8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(4):
        out = by.call(model, x)
        optimizer.zero_grad()
        by.backward(F.cross_entropy(out, y), retain_graph=True)
        by.backward(out.square().mean(), retain_graph=True, inputs=[*model[4].parameters()])
        by.backward(out, gradient=torch.full_like(out, 1e-3))
        by.step(optimizer)
        report(out.sum())
    model.eval()
    with torch.no_grad():
        report(by.call(model, x).sum())
    return model


def hexed(tensor):
    return float(tensor.detach()).hex()


def digest(model):
    tensors = [*model.parameters(), *model.buffers()]
    return hashlib.sha256(b"".join(t.detach().double().numpy().tobytes() for t in tensors)).hexdigest()[:16]


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--by-hand", default="")
    parser.add_argument("--only", required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    by = ByHand(options.by_hand) if options.by_hand else Plain()
    for name in options.only.split(","):
        torch.manual_seed(0)
        values = []
        model = globals()[name](by, lambda *tensors, values=values: values.extend(map(hexed, tensors)))
        print(json.dumps({"training": name, "values": values, "weights": digest(model)}), flush=True)

"""Paired runs: run k adds k to the seeds that the script gives, seeds what it doesn't, and a twin moves by one ulp."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mezzo.pytorch.run.weights import nudge
from mezzo.runner.seeds import BASE


@pytest.fixture(autouse=True)
def _streams() -> Iterator[None]:
    """The process's own random streams are put back afterwards."""
    kept = random.getstate(), np.random.get_state(), torch.get_rng_state()
    yield
    random.setstate(kept[0])
    np.random.set_state(kept[1])
    torch.set_rng_state(kept[2])


# What a script writes with seed s; with offset k it must give what s + k gives without one.
SEEDED = {
    "random.seed": "random.seed({s}); print(random.random())",
    "np.random.seed": "np.random.seed({s}); print(np.random.rand())",
    "default_rng": "print(np.random.default_rng({s}).random())",
    "RandomState": "print(np.random.RandomState({s}).rand())",
    "PCG64": "print(np.random.Generator(np.random.PCG64({s})).random())",
    "torch.manual_seed": "torch.manual_seed({s}); print(torch.rand(1).item())",
    "Generator": "g = torch.Generator().manual_seed({s}); print(torch.rand(1, generator=g).item())",
    "generator to library": "g = torch.Generator().manual_seed({s})\n"
    "print(list(torch.utils.data.random_split(range(9), [5, 4], generator=g)[0]))",
}
UNSEEDED = {
    "random": "print(random.random())",
    "numpy": "print(np.random.rand())",
    "np.random.seed()": "np.random.seed(); print(np.random.rand())",
    "default_rng": "print(np.random.default_rng().random(), np.random.default_rng().random())",
    "torch": "print(torch.rand(1).item())",
}
IMPORTS = "import random\nimport numpy as np\nimport torch\n"


@pytest.mark.parametrize("row", SEEDED)
def test_k_is_added_to_each_seed_that_the_script_gives(launch: Any, row: str) -> None:
    def printed(seed: int, offset: int | None) -> list[str]:
        ran = launch(IMPORTS + SEEDED[row].format(s=seed), policy="fp32", seed_offset=offset).ok
        assert ran.records[0].seed_offset == (offset or 0)
        return ran.lines

    assert printed(7, None) == printed(7, 0)
    assert printed(7, 3) == printed(10, 0) != printed(7, 0)


@pytest.mark.parametrize("row", UNSEEDED)
def test_what_the_script_does_not_seed_is_seeded(launch: Any, row: str) -> None:
    printed = [launch(IMPORTS + UNSEEDED[row], policy="fp32", seed_offset=k).lines for k in (0, 0, 1, 1)]
    assert printed[0] == printed[1] != printed[2] == printed[3]
    first, _, last = printed[0][0].partition(" ")
    assert first != last  # default_rng() twice is two streams


def test_a_number_that_a_library_makes_a_generator_of_is_left_alone(launch: Any, tmp_path: Path) -> None:
    """As scikit-learn's `random_state=0` does."""
    for folder, moves in (("site-packages", False), ("here", True)):
        file = tmp_path / folder / f"draws_{moves}.py"
        file.parent.mkdir()
        file.write_text("import numpy as np\ndef draw(seed): return np.random.RandomState(seed).rand()\n")
        source = (
            f"import sys\nsys.path.append({str(file.parent)!r})\nfrom {file.stem} import draw\nprint(draw(0))"
        )
        first, second = (launch(source, policy="fp32", seed_offset=k).lines for k in (0, 5))
        assert (first != second) == moves


def test_classes_stay_classes_and_other_seeds_keep_their_kind(launch: Any) -> None:
    ran = launch(
        IMPORTS
        + """
import pickle
made = np.random.RandomState(3)
assert isinstance(made, np.random.RandomState) and isinstance(np.random.mtrand._rand, np.random.RandomState)
assert issubclass(type(made), np.random.RandomState) and not isinstance(3, np.random.RandomState)
assert pickle.loads(pickle.dumps(made)).rand() == made.rand()
assert isinstance(torch.default_generator, torch.Generator) and isinstance(torch.Generator(), torch.Generator)
torch.rand(2, generator=torch.Generator())
np.random.seed(2**32 - 1); np.random.RandomState(2**32 - 1); torch.manual_seed(2**64 - 1); torch.manual_seed(-5)
np.random.seed([1, 2]); random.seed("text"); random.seed(b"bytes"); random.seed(1.5); random.seed(None)
np.random.default_rng(np.random.SeedSequence(4)); np.random.Generator(np.random.PCG64(np.random.SeedSequence(4)))
random.Random("x"), random.SystemRandom(3), np.random.RandomState(np.random.MT19937(3)), random.Random()
""",
        policy="fp32",
        seed_offset=9,
    )
    assert ran.status == 0, ran.err


def test_no_seed_is_shifted_twice(launch: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.manual_seed hands its number on to the GPU's streams by functions that a script may call as well."""
    given: list[int] = []
    monkeypatch.setattr(torch.cuda, "manual_seed_all", given.append)
    source = "import torch\ntorch.manual_seed(10)\ntorch.cuda.manual_seed_all(20)\n"
    assert launch(source, policy="fp32", seed_offset=3).status == 0
    assert given == [BASE + 3, 13, 23]


def test_nudge_moves_each_element_by_one_ulp_and_no_random_stream() -> None:
    values = torch.tensor([1.0, -1.0, 0.0, 3.4028234663852886e38, math.nan, 1e-45, *([0.5] * 1000)])
    weight = torch.nn.Parameter(values.clone())
    formats = torch.float64, torch.bfloat16, torch.float16
    others = [torch.nn.Parameter(torch.ones(3, dtype=dtype)) for dtype in formats]
    before = torch.get_rng_state()
    assert nudge([weight, weight, *others]) == 1
    assert torch.equal(before, torch.get_rng_state())
    up, down = (torch.nextafter(values, torch.tensor(v)) for v in (math.inf, -math.inf))
    moved_up, moved_down = weight.detach() == up, weight.detach() == down
    nan = values.isnan()
    assert torch.equal(weight.detach().isnan(), nan)
    assert bool((moved_up | moved_down | nan).all())
    assert 400 < int(moved_up[6:].sum()) < 600
    assert all(torch.equal(p, torch.ones_like(p)) for p in others)
    again = torch.nn.Parameter(values.clone())
    nudge([again])
    assert torch.equal(again[~nan], weight[~nan])


NUDGED = """
import torch
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
start = [p.detach().clone() for p in model.parameters()]
{wrap}
optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
for step in range(2):
    call(torch.ones(2, 4)).sum().backward()
    print([int((p.view(torch.int32) - s.view(torch.int32)).abs().max()) for p, s in zip(model.parameters(), start)])
    optimizer.step()
late = torch.nn.Linear(2, 2)
kept = late.weight.detach().clone()
late(torch.ones(1, 2))
print(torch.equal(kept, late.weight), torch.rand(1).item())
"""
COMPILED = "call = torch.compile(lambda x: model(x), backend='eager', fullgraph=True)"


@pytest.mark.parametrize(("wrap", "policy"), [("call = model", "bf16"), (COMPILED, "fp32")])
def test_a_nudged_run_moves_the_initial_weights_once(launch: Any, wrap: str, policy: str) -> None:
    torch._dynamo.reset()
    ran, plain = (launch(NUDGED.format(wrap=wrap), policy=policy, nudge=flag) for flag in (True, False))
    assert ran.status == 0, ran.err
    assert ran.records[0].nudged
    assert ran.lines[:2] == ["[1, 1, 1, 1]"] * 2
    assert plain.lines[:2] == ["[0, 0, 0, 0]"] * 2
    assert ran.lines[2] == plain.lines[2]
    assert ran.lines[2].startswith("True")

"""`mezzo run` on two ranks of data parallelism: one overflows, and both skip, look into it and stay equal."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from mezzo.core.errors import UsageError
from mezzo.core.records import UpdateRecord, read
from ranks import processes
from releases import before_torch
from run_scripts import Ran

pytestmark = pytest.mark.usefixtures("forked")

EVERYWHERE = {  # optimizers that both ranks have, in the order of their first steps -> the step that they skip
    "hand_cleaned": 2,  # before the first sharded model, from which on no step is traced
    "hand_hooked": 2,
    "hand_twice": 2,
    "hand_twice, the second one": 2,
    "hand_flat": 2,
    "hand_flat_closure": 2,
    "shared": None,
    "shared, the second one": 2,
    "fsdp": 2,
    "fsdp_input": 2,
    "fsdp_penalty": None,
    "fsdp_accumulated": 1,
    "fsdp_and_plain": 2,
    "ddp_unused": 1,
    "ddp_closure": 2,
    "ddp_sharpness": 1,
    "ddp_compressed": 2,
    "zero": 2,
    "slow": 2,
    "only_here": None,
}
CASES = [*(case for case in EVERYWHERE if "," not in case), "ddp_joined", "ddp_joined_closure", "hand_local"]


def ran(folder: Path, cases: list[str], count: int) -> list[tuple[dict[str, list[str]], str]]:
    """The results and messages of cases of ``scripts/several_ranks.py`` on each rank."""
    script = str(Path(__file__).parent / "scripts" / "several_ranks.py")
    words = ["-m", "mezzo", "run", "--precision", "fp16", "--records=run{rank}.jsonl", script]
    words += [str(folder / "meeting"), str(count), *cases]
    return [(json.loads(out), err) for out, err in processes(words, folder, seconds=200, count=count)]


@pytest.fixture(scope="module")
def several(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[tuple[dict[str, list[str]], str]]]:
    """The folder of a run of all cases on two ranks, and what they gave."""
    folder = tmp_path_factory.mktemp("several")
    return folder, ran(folder, CASES, 2)


@pytest.mark.nightly
def test_three_ranks_agree_and_name_the_one_that_overflowed(tmp_path: Path) -> None:
    """One of them owns no parameter that is trained, under `ZeroRedundancyOptimizer`."""
    cases = ["hand_cleaned", "hand_hooked", "zero"]
    first, *others = (results for results, _ in ran(tmp_path, cases, 3))
    assert others == [first, first]
    for rank in range(3):
        updates = [r for r in read(tmp_path / f"run{rank}.jsonl") if isinstance(r, UpdateRecord)]
        skipped = [(r.optimizer, r.skipped, "rank 1" in r.reason) for r in updates if r.skipped]
        assert skipped == [(number, True, True) for number in range(len(cases))]


@pytest.mark.heavy
@pytest.mark.parametrize("case", CASES)
def test_no_overflow_of_one_rank_parts_the_ranks(
    case: str, several: tuple[Path, list[tuple[dict[str, list[str]], str]]]
) -> None:
    (first, _), (second, _) = several[1]
    assert first[case] == second[case]
    assert all(math.isfinite(float.fromhex(x)) for x in first[case])


@pytest.mark.heavy
def test_scales_and_skips_are_the_same_on_all_ranks(several: Any) -> None:
    folder, _ = several
    of_ranks = []
    for rank in range(2):
        updates = [r for r in read(folder / f"run{rank}.jsonl") if isinstance(r, UpdateRecord)]
        of_ranks.append([[r for r in updates if r.optimizer == n] for n in range(len(EVERYWHERE))])
    for (case, skipped), first, second in zip(EVERYWHERE.items(), *of_ranks):
        assert [r.skipped for r in first] == [r.skipped for r in second], case
        assert [i for i, r in enumerate(first) if r.skipped] == ([] if skipped is None else [skipped]), case
        # A copy of the gradients is not recognized: infinity reaches each rank, which skips by itself. A step that
        # begins with infinity, after the reduction, makes the weights of each rank NaN.
        if case not in ("hand_flat", "ddp_sharpness"):
            assert all("rank 1" in r.reason for r in (*first, *second) if r.skipped), case
        if case.startswith("shared"):  # one overflow, though the first optimizer's gradients were finite
            assert first[3].loss_scale == first[0].loss_scale / 2
        # The other optimizer of "only_here" lowers the scale of one rank, until the next common step.
        since = -1 if case == "only_here" else 0
        assert [r.loss_scale for r in first[since:]] == [r.loss_scale for r in second[since:]], case


@pytest.mark.heavy
def test_rank_0_alone_prints_what_is_not_done_with_several_ranks_and_what_rank_1_could_explain(
    several: Any,
) -> None:
    folder, ((_, first), (_, quiet)) = several
    assert not quiet
    for rank in range(2):
        said = "\n".join(list(read(folder / f"run{rank}.jsonl"))[-1].notes)
        assert "no optimizer owns" in said
        assert "not traced" in said
    assert first.count("no optimizer owns") == 1  # what both ranks noted
    (line,) = [line for line in first.splitlines() if "because of rank 1" in line]
    assert "several_ranks.py" in line


ONE = """
import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
net = torch.nn.Linear(4, 2)
{}
net(torch.randn(3, 4)).float().sum().backward()
optimizer.step()
print("went on")
dist.destroy_process_group()
"""
SGD = "optimizer = torch.optim.SGD(net.parameters(), lr=0.1)"


def test_parameters_that_are_gathered_in_16_bits_are_the_scripts_own_precision(
    launch: Callable[..., Ran],
) -> None:
    """Else Mezzo would unscale fp16 gradients in fp16."""
    low = "MixedPrecisionPolicy(torch.float16, torch.float32)"
    ran = launch(ONE.format(f"fully_shard(net, mp_policy={low}); {SGD}"), policy="fp16").ok
    assert "left alone: Linear has fully_shard(mp_policy=" in ran.notes.replace("FSDPLinear", "Linear")
    for words in ("float16", "(script.py line 8)", "leave out mp_policy="):
        assert words in ran.notes
    assert "enabled=" not in ran.notes


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_an_optimizer_made_before_fully_shard_ends_the_run(
    precision: str, launch: Callable[..., Ran], capsys: pytest.CaptureFixture[str]
) -> None:
    """It would train nothing."""
    before_torch(2, 12, "fully_shard leaves no mark on the parameters that it replaces")
    try:
        with pytest.raises(
            UsageError, match=r"created before fully_shard.*optimizer = SGD\(model.parameters\(\), "
        ):
            launch(ONE.format(f"{SGD}; fully_shard(net)"), policy=precision)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    assert capsys.readouterr().out == ""

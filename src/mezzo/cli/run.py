"""Run a training script in mixed precision, without a change to it.

  mezzo run train.py --epochs 3                     the precision that this machine is good at
  mezzo run --precision fp16 train.py --epochs 3    fp16, with loss scaling
  mezzo run --precision bf16,masters=split train.py bf16 weights with exact masters: 14 bytes a parameter
  mezzo run -m package.train --epochs 3             as after python -m

What follows the script's name belongs to the script. It runs as it does under python: the same arguments,
the same output, the same exit status; a few lines on stderr at the end say what ran in which precision.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from mezzo.core.errors import UsageError
from mezzo.pytorch.launch.request import RunRequest
from mezzo.pytorch.launch.runner import run as run_request


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the options. All that follows the script is its own."""
    parser.usage = "mezzo run [--precision P | --policy FILE] [--records FILE] (SCRIPT | -m MODULE) [ARGS...]"
    which = parser.add_mutually_exclusive_group()
    which.add_argument(
        "--precision",
        metavar="P",
        help="auto (default), bf16, fp16, fp8, tf32, fp32, or a policy: bf16,op.softmax=lower or bf16,masters=split",
    )
    which.add_argument("--policy", metavar="FILE", help="a policy in a TOML file")
    parser.add_argument(
        "--records", metavar="FILE", type=Path, help="write the run's records here, as JSON lines"
    )
    parser.add_argument("--observe", action="store_true", help="watch one early step: memory, formats of ops")
    parser.add_argument("--quiet", action="store_true", help="no summary at the end")
    parser.add_argument("-m", dest="module", action="store_true", help="run a module, as python -m does")
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="SCRIPT [ARGS...]")


def run(arguments: argparse.Namespace) -> int:
    """Run the script; its exit status is ours."""
    if not arguments.command:
        raise UsageError(
            "no script was given. Write: mezzo run SCRIPT [ARGS...], or mezzo run -m MODULE [ARGS...]"
        )
    policy = arguments.precision or "auto"
    if arguments.policy is not None:
        policy = arguments.policy
        if not policy.endswith(".toml"):
            raise UsageError(
                f"--policy {policy!r}: give a TOML file (its name ends in .toml), or use --precision"
            )
    target, *argv = arguments.command
    return run_request(
        RunRequest(
            target=target,
            argv=tuple(argv),
            is_module=arguments.module,
            policy=policy,
            records=arguments.records,
            observe=arguments.observe,
            summary=not arguments.quiet,
        )
    )

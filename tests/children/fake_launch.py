"""Stands in for `python -m mezzo.pytorch.run`: writes the records that its script, a JSON file, asks for.

The script is a JSON object: run name (`bf16-1`), `own` (`off`), precision (`bf16`) or `*` -> behaviour, all optional::

    shift 0.1     add to every loss              metric 98.5   print "accuracy: 98.5 %"
    spread 0.1    add a random number to all losses, so large
    seconds 0.01  a step's duration              memory 1000   the peak
    losses 40     how many                       nan 7         the loss that is NaN
    status 1      the exit status                crash "text"  print a traceback that ends so, exit 1
    notes []      of the run's end
    say "text"    print it                       signal 9      kill oneself after the losses
    hang true     sleep for a minute instead
    machine {}    what to say of the machine
    refuse "why"  end as the real one does for a request that can't be run
    pace 0.01     sleep so long before each loss, and for half a minute where the parent is gone
    child true    start a process that sleeps for a minute
    seedless true the result of seed 0 under each seed
    early 0.4     a second optimizer takes over in the middle; add to the losses before
    first 5.0     the first loss
    turns true    two optimizers step in turns
    mistake "why" end as it does for a policy that only the script's model shows to be wrong
"""

from __future__ import annotations

import json
import math
import os
import random
import subprocess
import sys
import time
from pathlib import Path

from mezzo.core import records


def main() -> int:
    request = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    script = Path(request["target"])
    path = Path(request["records"])
    asked = json.loads(script.read_text(encoding="utf-8"))
    names = ("*", request["policy"], request["own"], path.stem)
    does = {key: value for name in names for key, value in asked.get(name, {}).items()}
    with script.with_suffix(".calls").open("a") as calls:
        print(path.stem, os.getpid(), file=calls)
    if "refuse" in does:
        print(f"mezzo: {does['refuse']}")
        return 2
    k = 0 if does.get("seedless") else request["seed_offset"] or 0
    writer = records.RecordWriter(path)
    machine = {"cpu": "a fake one", "torch": "0", **does.get("machine", {})}
    writer.write(
        records.RunStarted(
            request["target"], request["argv"], request["policy"], k, request["nudge"], machine, "now"
        )
    )
    noise = random.Random(f"{k} {request['nudge']} {request['policy']}")
    level = 0.03 * random.Random(k).gauss(0, 1) + does.get("spread", 0.0) * noise.gauss(0, 1)
    at = 0.0
    parent = os.getppid()
    if does.get("child"):
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    for i in range(does.get("losses", 40)):
        time.sleep(does.get("pace", 0.0) if os.getppid() == parent else 30)
        loss = 1 + 1.5 * math.exp(-i / 4) + level + 1e-4 * noise.gauss(0, 1) + does.get("shift", 0.0)
        at += does.get("seconds", 0.01) * (1 + 0.02 * noise.gauss(0, 1))
        taken_over = "early" in does and i >= 20
        loss += 0.0 if taken_over else does.get("early", 0.0)
        loss = does.get("first", loss) if i == 0 else loss
        writer.write(records.LossRecord(i, float("nan") if i == does.get("nan") else float(loss), at))
        turn = i % 2 if does.get("turns") else int(taken_over)
        writer.write(records.UpdateRecord(i, turn, True, False, 1.0, at))
    if request["observe"]:
        writer.write(records.MemoryRecord(does.get("memory", 1000), "tensor bytes"))
    print(does.get("say", ""), flush=True)
    if "metric" in does:
        print(f"accuracy: {does['metric'] + 0.01 * k} %", flush=True)
    if does.get("hang"):
        time.sleep(60)
    if "signal" in does:
        os.kill(os.getpid(), does["signal"])
    if "crash" in does:
        print(f'Traceback (most recent call last):\n  File "train.py", line 3, in <module>\n{does["crash"]}')
    status = does.get("status", 1 if "crash" in does else 0)
    writer.write(records.RunEnded(status, at, does.get("notes", [])))
    if "mistake" in does:
        print(f"mezzo: {does['mistake']}")
        return 2
    return status


if __name__ == "__main__":
    sys.exit(main())

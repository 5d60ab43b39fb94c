"""Stands in for `python -m mezzo.pytorch.run` in a calibration: writes what its script, a JSON object, asks for.

All optional: ``largest`` 0.25 the largest gradient of the watched run; ``activation`` 1.0 what module "b" returns;
``native`` ["bf16"]; ``skips`` 0 how many steps of the run under the recommendation are skipped; ``fits`` 32768: it
skips its steps while its scale is larger; ``overflows`` []: modules that overflow in it, one after the other, unless
its policy keeps them in FP32; ``cause`` "overflow": why; ``nan`` true: its losses are NaN; ``updates`` true: whether
any is made; ``crash`` "fp32" or "recommended": that run fails; ``ranges`` false: none are seen; ``say`` a note;
``changes`` {}: module -> format -> what each change of the loss is measured to be, null for an overflow in "mul".
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

from mezzo.core import records
from mezzo.core.overflow import OverflowReport
from mezzo.core.policy import policy
from mezzo.core.ranges import Histogram, RangeRow


def histogram(value: float) -> Histogram:
    return Histogram(-2, [3, 1], largest=value)


def main() -> int:
    request = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    asked = json.loads(Path(request["target"]).read_text(encoding="utf-8"))
    path = Path(request["records"])
    watched = path.stem == "fp32-0"
    with Path(request["target"]).with_suffix(".asked").open("a", encoding="utf-8") as file:
        file.write(json.dumps(request) + "\n")
    writer = records.RecordWriter(path)
    machine = {"native_formats": asked.get("native", ["bf16"])}
    writer.write(records.RunStarted(request["target"], [], request["policy"], 0, False, machine, "now"))
    used = policy(request["policy"])
    scale = 1.0 if watched else used.make_loss_scale().scale
    over = (
        []
        if watched
        else [name for name in asked.get("overflows", []) if used.format_for_module(name) != "fp32"]
    )
    for i in range(request["stop_after"] if asked.get("updates", True) else 0):
        loss = float("nan") if asked.get("nan") and not watched else 1.0
        large = not watched and scale > asked.get("fits", scale)
        skipped = not watched and (large or bool(over) or i < asked.get("skips", 0))
        writer.write(records.LossRecord(i, loss, float(i)))
        writer.write(records.UpdateRecord(i, 0, not skipped, skipped, scale, float(i)))
        if skipped:
            where = over[0] if over else "b"
            remedies = (
                []
                if large
                else ["mul in FP32: `fp16,op.mul=fp32`", f"this module in FP32: `fp16,module.{where}=fp32`"]
            )
            finding = OverflowReport(
                "loss scale" if large else asked.get("cause", "overflow"), where, "mul", remedies=remedies
            )
            writer.write(records.OverflowRecord(i, 0, float(i), scale, finding))
            scale /= 2
        if request["watch"] and asked.get("ranges", True):
            rows = [
                RangeRow("a", "activation", "fp32", histogram(1.0)),
                RangeRow("b", "activation", "fp32", histogram(asked.get("activation", 1.0))),
                RangeRow("a", "weight gradient", "fp32", histogram(asked.get("largest", 0.25)), "weight"),
            ]
            writer.write(records.RangesRecord(i, 0, float(i), 1.0, rows))
        if request["sensitivity"] and "changes" in asked:
            measured = [
                records.ModuleRounding(
                    module, "Linear", name, 0.0, (change or math.inf) ** 2, "" if change else "mul"
                )
                for module, changes in asked["changes"].items()
                for name, change in changes.items()
            ]
            writer.write(records.SensitivityRecord(i, 2.0, measured))
    status = int(asked.get("crash") == path.stem.removesuffix("-0"))
    if status:
        print('Traceback (most recent call last):\n  File "train.py", line 3\nValueError: planted')
    writer.write(records.RunEnded(status, 1.0, [asked["say"]] if "say" in asked else []))
    return status


if __name__ == "__main__":
    sys.exit(main())

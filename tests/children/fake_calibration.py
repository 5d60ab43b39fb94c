"""Stands in for `python -m mezzo.pytorch.run` in a calibration: writes what its script, a JSON object, asks for.

All optional: ``largest`` 0.25 the largest gradient; ``activation`` 1.0 what module "b" returns; ``native`` ["bf16"];
``crash`` true: the run fails; ``ranges`` false: none are seen; ``say`` a note; ``loss`` 1.0;
``changes`` {}: module -> format -> what each change of the loss is measured to be, null for an overflow in "mul".
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

from mezzo.core import records
from mezzo.core.ranges import Histogram, RangeRow


def histogram(value: float) -> Histogram:
    return Histogram(-2, [3, 1], largest=value)


def main() -> int:
    request = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    asked = json.loads(Path(request["target"]).read_text(encoding="utf-8"))
    Path(request["target"]).with_suffix(".asked").write_text(json.dumps(request), encoding="utf-8")
    writer = records.RecordWriter(Path(request["records"]))
    machine = {"native_formats": asked.get("native", ["bf16"])}
    writer.write(records.RunStarted(request["target"], [], request["policy"], 0, False, machine, "now"))
    for i in range(request["stop_after"]):
        writer.write(records.LossRecord(i, float(asked.get("loss", 1.0)), float(i)))
        writer.write(records.UpdateRecord(i, 0, True, False, 1.0, float(i)))
        if asked.get("ranges", True):
            rows = [
                RangeRow("a", "activation", "fp32", histogram(1.0)),
                RangeRow("b", "activation", "fp32", histogram(asked.get("activation", 1.0))),
                RangeRow("a", "weight gradient", "fp32", histogram(asked.get("largest", 0.25)), "weight"),
            ]
            writer.write(records.RangesRecord(i, 0, float(i), 1.0, rows))
        if "changes" in asked:
            measured = [
                records.ModuleRounding(
                    module, "Linear", name, 0.0, (change or math.inf) ** 2, "" if change else "mul"
                )
                for module, changes in asked["changes"].items()
                for name, change in changes.items()
            ]
            writer.write(records.SensitivityRecord(i, 2.0, measured))
    status = int(asked.get("crash", False))
    if status:
        print('Traceback (most recent call last):\n  File "train.py", line 3\nValueError: planted')
    writer.write(records.RunEnded(status, 1.0, [asked["say"]] if "say" in asked else []))
    return status


if __name__ == "__main__":
    sys.exit(main())

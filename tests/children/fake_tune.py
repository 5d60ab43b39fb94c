"""`fake_launch`, which also pretends to have measured: the script's ``sensitivity`` is what a probe would write."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from fake_launch import main


def measure() -> None:
    """Write what the script asks for, once it is seen that the request is a calibration's."""
    request = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    if request["sensitivity"] is None:
        return
    assert request["policy"] == "fp32"
    assert os.environ["TORCHDYNAMO_DISABLE"] == "1"
    asked = json.loads(Path(request["target"]).read_text(encoding="utf-8"))
    settings = json.loads(
        Path(request["sensitivity"]).with_suffix(".request.json").read_text(encoding="utf-8")
    )
    assert request["stop_after"] == settings["first"] + settings["steps"]
    if "sensitivity" in asked:
        measured = {"format": settings["format"], "units": [], "edges": [], **asked["sensitivity"]}
        Path(request["sensitivity"]).write_text(json.dumps(measured), encoding="utf-8")


if __name__ == "__main__":
    measure()
    sys.exit(main())

"""RunRequest: everything that decides how one script is run, as a frozen value that travels between
processes.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from mezzo.core.errors import UsageError, unknown_name

_PATHS = ("records", "tensorboard", "report")


@dataclass(frozen=True)
class RunRequest:
    """One run of one unmodified script.

    Args:
        target: path of the script (or of a directory that holds a `__main__.py`), or a module's dotted name.
        argv: what the script finds in `sys.argv[1:]`.
        is_module: whether `target` is a module's name, as after `python -m`.
        policy: a preset, a short string, or the path of a `.toml` file.
        records: file for the run's records (JSON lines); None writes none.
        seed_offset: None leaves every seed alone. k >= 0 adds k to every seed that the script gives, and
            seeds what it does not seed; see `mezzo.scripts.seeds`.
        nudge: move the FP32 weights by one unit in the last place before the first step.
        observe: watch one early step for its peak memory and the formats of its ops.
        summary: print a short account to stderr at the end.
        watch: look at the exponents of weights, activations, gradients and updates at every so many updates of each
            optimizer; 0 never, -1 at the default interval (`mezzo.pytorch.monitor.ranges`).
        trace: where the policy has a loss scale, look into each skipped step for where its NaN or infinity came from.
        stop_after: end the script after so many updates of its first optimizer, as by `SystemExit(0)` from within its
            step; None lets it end by itself.
        tensorboard: folder for the records as TensorBoard events, beside those of `records`; None writes none.
        sensitivity: measure the sensitivity of each module in a few steps (`mezzo.pytorch.sensitivity`).
        watch_all: look at what every module returns, those too that have children and no parameters of their own.
        report: page that the caller makes of the records afterwards; where the script fails, its path is
            printed before the traceback.

    Raises:
        UsageError: a number out of range.
    """

    target: str
    argv: tuple[str, ...] = ()
    is_module: bool = False
    policy: str = "auto"
    records: Path | None = None
    seed_offset: int | None = None
    nudge: bool = False
    observe: bool = False
    summary: bool = True
    watch: int = 0
    trace: bool = True
    stop_after: int | None = None
    tensorboard: Path | None = None
    sensitivity: bool = False
    watch_all: bool = False
    report: Path | None = None

    def __post_init__(self) -> None:
        if self.seed_offset is not None and self.seed_offset < 0:
            raise UsageError(f"seed_offset is {self.seed_offset}: give None, or a number of 0 or more")
        if self.watch < -1:
            raise UsageError(f"watch is {self.watch}: give 0 (never), a number of updates, or -1 (default)")
        if self.stop_after is not None and self.stop_after < 1:
            raise UsageError(f"stop_after is {self.stop_after}: give None, or a number of 1 or more")

    def to_json(self) -> str:
        """The request as one line of JSON."""
        paths = {name: getattr(self, name) for name in _PATHS}
        return json.dumps({**asdict(self), **{n: None if p is None else str(p) for n, p in paths.items()}})

    @classmethod
    def from_json(cls, text: str) -> RunRequest:
        """The request that `to_json` wrote.

        Raises:
            UsageError: the text is no request, or holds a key that no request has.
        """
        try:
            data = json.loads(text)
            names = {f.name for f in fields(cls)}
            for key in data:
                if key not in names:
                    raise unknown_name("key", key, names, where="run request: ")
            data["argv"] = tuple(data.get("argv", ()))
            data.update({name: Path(data[name]) if data.get(name) else None for name in _PATHS})
            return cls(**data)
        except (json.JSONDecodeError, TypeError, AttributeError) as error:
            raise UsageError(f"not a run request: {text[:80]!r} ({error})") from error

"""The lines that end a run: what ran in which precision, what was skipped, what was left alone.

Each rank leaves its lines in the store of the process group, which may be destroyed by then, and rank 0 prints them
with the ranks' numbers. No collective is started, and rank 0 waits `PATIENCE` seconds at most, because another rank may
have been killed or may go on for long.
"""

from __future__ import annotations

import json
import re
import socket
import sys
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from mezzo.core.calibration import conclusions
from mezzo.core.commands import compare_command
from mezzo.core.loss_scale import NoLossScale, StaticLossScale, power_text
from mezzo.core.overflow import ALARMS, REPEATS
from mezzo.core.records import IN_NO_LAYER, LEFT_ALONE, NOTHING_RAN
from mezzo.runner.lifecycle import of_torchrun

if TYPE_CHECKING:
    from mezzo.core.records import OverflowRecord
    from mezzo.pytorch.run.session import Session

_PLACES = 5  # origins of values that are not finite, listed one by one
_REMEDIES = 3
_NAMED = 3  # modules in a format of their own
_BY_RANK = re.compile(r"(?:; )?found by rank (\d+)$")  # in a note of mezzo.pytorch.monitor.overflow_tracer
PATIENCE = 5.0
_KEY = "mezzo/said/{}"


def summary(session: Session, failed: bool) -> str:
    """The summary of a run, ready to print; empty where the script failed before it did anything."""
    journal, policy, scale = session.journal, session.policy, session.scale
    if session.only_launched:
        return ""  # rank 0 tells
    if session.rank:
        _leave(session)
        return ""
    if failed and not (session.device_type or journal.losses or session.left_alone):
        return ""  # the script's own error says it all
    trains = journal.updates or session.left_alone or (session.device_type and not session.calls_keras)
    if "keras" in sys.modules and not trains:
        return "\n".join(f"mezzo: {line}" for line in for_keras(session))
    if session.left_alone is not None:
        lines = [f"{LEFT_ALONE}{session.left_alone}", _left_alone(session)]
    elif session.records_own:
        lines = ["the script ran in its own precision"]
    elif not session.dtypes:
        lines = [nothing_ran(session) or f"no model was called{NOTHING_RAN}another precision"]
    else:
        why = f"; {session.precision_reason}" if session.precision_reason else ""
        lines = [f"policy {policy}{why}", *[_calls(session)] * bool(session.device_type), *_fallbacks()]
    if 1 < session.world_size < sys.maxsize:
        lines.append(f"{session.world_size} ranks ran; the numbers here are those of rank 0")
    if session.left_alone is None:
        if journal.updates or journal.losses:
            due, passes = _count(journal.updates, "update"), _count(journal.losses, "backward pass", "es")
            lines.append(f"{due}{' due' * (journal.skipped > 0)}, {journal.skipped} skipped; {passes}")
            if journal.updates and journal.skipped == journal.updates:
                lines.insert(0, f"NOTHING WAS TRAINED, because every update was skipped ({due})")
        if not isinstance(scale, NoLossScale):
            passes = _count(session.reruns, "backward pass", "es")
            again = f"; {passes} run again at a smaller scale" if session.reruns else ""
            lines.append(f"loss scale {power_text(scale.scale)} at the end{again}")
        lines += findings(
            journal.findings,
            skipped=journal.skipped if session.request.trace and session.scaling else 0,
            constant=scale.scale if isinstance(scale, StaticLossScale) else None,
            ranks=session.world_size,
            told=not journal.tells,
        )
        if not any(record.finding.alarms for record in journal.findings):
            seen = conclusions([*journal.ranges.values()], None if scale.scale == 1.0 else scale.scale)
            lines += seen or _unseen(session)
        if journal.ops:
            counts = Counter(op.observed.split(" -> ")[0] or "no floats" for op in journal.ops)
            formats = "; ".join(f"{name}: {ops} ops" for name, ops in sorted(counts.items()))
            lines.append(f"formats seen in one step: {formats}")
        lines += policy.notes
        if journal.updates and session.applied is not policy.at(sys.maxsize):
            updates = _count(journal.first_updates, "update")
            lines.append(f"bf16_from={policy.bf16_from} was not reached: {updates}")
    lines += [note for note in journal.notes if note not in lines]
    if session.store is not None and session.world_size > 1:
        wait = 0.0 if failed else PATIENCE
        lines += _collected(session.store, session.world_size, "\n".join(lines), wait)
        session.store = None
    return "\n".join(f"mezzo: {line}" for text in lines for line in text.splitlines())


def _leave(session: Session) -> None:
    """Leave for rank 0 what this rank has found and noted, if the store is still there."""
    rank, alarms = session.rank or 0, [one for one in session.journal.findings if one.finding.alarms]
    places = _by_place(one for one in alarms if one.finding.cause != "unknown")[:_PLACES]
    entries = ["\n".join(findings(some, ranks=session.world_size, rank=rank)) for some in places]
    store, session.store = session.store, None
    with suppress(RuntimeError):
        if _answers(store):
            store.set(_KEY.format(rank), json.dumps([*entries, *session.journal.notes]))


def is_told(session: Session, error: Exception) -> bool:
    """Whether another rank has ended by the same mistake of the user's, and tells of it."""
    with suppress(RuntimeError):
        return _answers(session.store) and session.store.add(_KEY.format(error), 1) > 1
    return False


def _collected(store: Any, ranks: int, own: str, patience: float) -> list[str]:
    """The entries that the other ranks have left and that `own`, the text of rank 0, lacks; each once."""
    keys, end = [_KEY.format(rank) for rank in range(1, ranks)], time.monotonic() + patience
    by: dict[str, list[int]] = {}
    with suppress(RuntimeError):
        if not _answers(store):
            return []
        while not store.check(keys) and time.monotonic() < end:
            time.sleep(0.05)
        for rank, key in enumerate(keys, start=1):
            for entry in json.loads(store.get(key)) if store.check([key]) else ():
                by.setdefault(entry, []).append(rank)
    # By its first line: rank 0 may have printed the remedies of the same finding before.
    return [_numbered(entry, some) for entry, some in by.items() if entry.partition("\n")[0] not in own]


def _numbered(entry: str, ranks: list[int]) -> str:
    """The entry with its ranks' numbers at the end of the first line, unless it has the rank's number itself."""
    if len(ranks) == 1 and f"rank {ranks[0]}" in entry:
        return entry
    first, *rest = entry.splitlines()
    which = ", ".join(map(str, ranks[:8])) + ", ..." * (len(ranks) > 8)
    return "\n".join([f"{first} (rank{'s' * (len(ranks) > 1)} {which})", *rest])


def _answers(store: Any) -> bool:
    """Whether the store is there: a call to one that has ended would print warnings of its own."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    if hasattr(store, "port"):
        with suppress(OSError):
            socket.create_connection((store.host, store.port), PATIENCE).close()
            return True
        return False
    return store is not None


def for_keras(session: Session) -> list[str]:
    """What to do with a script that trains with Keras."""
    precision = "bf16" if session.request.policy == "auto" else session.request.policy
    return [
        "this script uses Keras, and `mezzo run` is for PyTorch models. Add these before the model is "
        f"built: import mezzo.keras; mezzo.keras.set_policy({precision!r})",
        f"To check that first: mezzo compare --framework keras --precision {precision} {session.request.target}",
    ]


def _left_alone(session: Session) -> str:
    asked = session.request.policy
    ignored = "" if asked == "auto" else f": {asked} was not applied"
    if before := session.lowered_calls:
        calls = f"Before, {_count(before, 'call')} began in {session.policy.compute}"
        return f"from then on the script ran unchanged{ignored}. {calls}"
    if session.request.apex:
        return "the script's own amp.initialize set the precision; Mezzo provided apex"
    return f"the script ran unchanged; Mezzo changed nothing{ignored}"


def nothing_ran(session: Session) -> str:
    """Why no operation ran in a format of the policy, for all that is known; empty if some did."""
    formats, ops = session.policy.computed - {"fp32"}, session.journal.ops
    seen = [op.observed for op in ops if op.rule == "lower"]
    quiet = session.left_alone is not None or session.records_own or session.compiled
    if quiet or not formats or any("16" in op.observed or op.reason.startswith("compiled") for op in ops):
        return ""
    if not session.dtypes:
        why = "no model was called"
    elif not any(dtype.is_floating_point and dtype.itemsize <= 4 for dtype in session.dtypes):
        names = sorted(str(dtype).removeprefix("torch.") for dtype in session.dtypes)
        why = f"the parameters of the called modules are {' and '.join(names)}"
    elif seen and "tf32" not in formats:
        why = f"products ran in {' and '.join(sorted({one.partition(' -> ')[0] for one in seen}))}"
    else:
        return ""
    return f"{why}{NOTHING_RAN}{' or '.join(sorted(formats - {'auto'})) or 'another precision'}"


def _calls(session: Session) -> str:
    of = f"of {', '.join(session.modules)}"
    calls = _count(session.model_calls, "call")
    if session.compiled:
        calls = "compiled calls" if not session.model_calls else f"{calls}, and compiled ones,"
    if 0 < session.lowered_calls < session.model_calls:
        return f"{calls} {of}, {session.lowered_calls} of them in 16 bits (the first steps are timed in both)"
    if session.policy.is_fp32:
        return f"{calls} {of}, all in FP32"
    if nothing_ran(session):
        return f"{calls} {of} on {session.device_type}"
    stored = "; weights stay FP32" if session.policy.params == "fp32" else ""  # else a note says how
    apart = [f", {path} in {fmt}" for path, fmt in session.formats.items()]
    more = f" and {len(apart) - _NAMED} more" * (len(apart) > _NAMED)
    compute = session.policy.compute
    if any(note.startswith(f"{compute}{IN_NO_LAYER}") for note in session.journal.notes):
        compute = "bf16"
    formats = f"{compute} on {session.device_type}{''.join(apart[:_NAMED])}{more}"
    return f"{calls} {of} in {formats}{stored}"


def _unseen(session: Session) -> list[str]:
    """The harm of fp16 that no skipped step shows, and the command that does; empty if it can't run this script."""
    request, policy = session.request, session.policy
    moved = session.journal.updates > session.journal.skipped
    if policy.compute != "fp16" or not moved or request.source is not None or request.apex:
        return []
    nproc = request.nproc if request.nproc > 1 else None
    asked = {**vars(request), "precisions": [str(policy)], "nproc": nproc}
    if (ranks := of_torchrun()) > 1 and request.is_module and sys.argv[0] in request.argv:  # of torchrun
        asked |= {"target": sys.argv[0], "argv": sys.argv[1:], "is_module": False, "nproc": ranks}
    return [f"skipped steps do not show all harm of fp16. To test against FP32: {compare_command(asked)}"]


def _fallbacks() -> list[str]:
    from mezzo.pytorch.autocast.fallback import CALLS

    ops = ", ".join(f"{op} ({_count(calls, 'call')})" for op, calls in CALLS.most_common())
    why = "PyTorch has no 16-bit kernel for these inputs"
    if "masked_fill" in ops:
        why += " or, in masked_fill, the format lacks the number (-1e9 in fp16; use torch.finfo(x.dtype).min)"
    return [f"ran in FP32, because {why}: {ops}"] if ops else []


def findings(
    records: Sequence[OverflowRecord],
    *,
    skipped: int = 0,
    constant: float | None = None,
    ranks: int = 1,
    rank: int = 0,
    told: bool = False,
) -> list[str]:
    """What to fix, of `skipped` steps those that were traced, each place once; `constant`: a static loss scale.

    `rank` of `ranks` made these records; `told`: the first alarm was printed before, with its remedies.
    """
    lines: list[str] = []
    alarms = [record for record in records if record.finding.alarms]
    if steps := len(records) - len(alarms):
        were = f"{_count(steps, 'step')} {'was' if steps == 1 else 'were'} skipped"
        if constant is None:
            lines = [f"{were} while the loss scale adjusted (normal)"]
        else:
            scale = f"the constant loss scale {power_text(constant)}"
            lines = [f"{were} because {scale} is too large for the gradients"]
            lines += _tries(next(record.finding.remedies for record in records if not record.finding.alarms))
    places = _by_place(alarms)
    for first, *later in places[:_PLACES]:
        times = f", and {_count(len(later), 'later one')}" if later else ""
        finding = first.finding
        if ranks > 1 and finding.cause != "unknown":  # this rank's own, or one with a note
            by = _BY_RANK.search(finding.note)
            finding = replace(finding, note=_BY_RANK.sub("", finding.note))
            times += f", because of rank {by[1] if by else rank}"
        lines.append(f"update {first.update} skipped{times}: {finding.sentence}")
        above = f"  What to try is in the message above, of update {first.update}"
        lines += [above] if told and first is alarms[0] and finding.remedies else _tries(finding.remedies)
    if len(places) > _PLACES:
        lines.append(f"{_count(len(places) - _PLACES, 'more place')} in the records (--out DIR)")
    if (left := skipped - len(records)) > 0:
        step = _count(left, "more skipped step" if records else "skipped step")
        spent = len(places) * (REPEATS - 1) + len(alarms) >= ALARMS * REPEATS
        limit = f": Mezzo stops after {ALARMS} places, or {(ALARMS - 1) * REPEATS} repeats" if spent else ""
        lines.append(f"{step} {'was' if left == 1 else 'were'} not traced{limit}")
    return lines


def _by_place(records: Iterable[OverflowRecord]) -> list[list[OverflowRecord]]:
    """The records of each place, in the order in which the places were first found."""
    places: dict[tuple[str, ...], list[OverflowRecord]] = {}
    for record in records:
        places.setdefault(record.finding.place, []).append(record)
    return list(places.values())


def _tries(remedies: Sequence[str]) -> list[str]:
    """Commands without their quotes, so that they can be pasted."""
    shown = [text.replace("`", "") if text.startswith("`") else text for text in remedies[:_REMEDIES]]
    lines = [f"  {'Or:' if n else 'Try:'} {text}" for n, text in enumerate(shown)]
    if (left := len(remedies) - _REMEDIES) > 0:
        lines.append(f"  and {left} more in the records and the report (--out DIR)")
    return lines


def _count(number: int, noun: str, plural: str = "s") -> str:
    return f"{number} {noun}{'' if number == 1 else plural}"

"""StepWatch: observe one early step of a run for its peak memory and for the formats in which its ops ran."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mezzo.pytorch.launch.session import Session

# The first steps allocate the optimizer's state and compile; the step after them is like all later ones.
_FIRST = 2


class StepWatch:
    """Watches from the end of the second update that moved to the end of the next one of the same optimizer.

    The updates in between are marked as observed: watching costs time, and no timing may use them.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._wanted = session.request.observe
        self._moved: dict[int, int] = {}
        self._optimizer = 0
        self._memory: Any = None
        self._ops: Any = None

    @property
    def running(self) -> bool:
        """Whether a step is being watched now."""
        return self._memory is not None

    def after_update(self, optimizer: int, *, moved: bool) -> None:
        """An update of the optimizer with this number is over."""
        if not self._wanted:
            return
        if self.running:
            if optimizer == self._optimizer:
                self._stop(keep=moved)
                self._wanted = not moved
                if (
                    not moved
                ):  # the next is told to those who look into skipped steps, and the one after it is observed
                    self._moved[optimizer] = _FIRST - 1
            return
        if moved:
            self._moved[optimizer] = self._moved.get(optimizer, 0) + 1
            if self._moved[optimizer] == _FIRST:
                self._start(optimizer)

    def finish(self) -> None:
        """The script is over."""
        if self.running:
            self._stop(keep=False)
        if self._wanted and self._session.left_alone is None:
            self._session.journal.note(
                "no step was observed (memory, formats): the script ended before its third update"
            )

    def _start(self, optimizer: int) -> None:
        from mezzo.pytorch.memory import PeakTensorBytes
        from mezzo.pytorch.observe.formats import OpObserver

        self._optimizer = optimizer
        session = self._session
        session.companions.pause()  # what they compute is none of the step's
        self._ops = OpObserver(session.policy, session.device_type or "cpu")
        self._ops.enter()
        self._memory = PeakTensorBytes(session.device_type or "cpu")
        self._memory.start()

    def _stop(self, *, keep: bool) -> None:
        memory, self._memory = self._memory.stop(), None
        ops, self._ops = self._ops, None
        ops.exit()
        self._session.companions.resume()
        if keep:
            if ops.note:
                self._session.journal.note(ops.note)
            self._session.journal.observed(memory, ops.table())

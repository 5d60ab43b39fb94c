"""What happens once for each module that is called outermost, before its first forward pass."""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Iterator, Mapping, MutableMapping
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.utils.weak import WeakIdKeyDictionary

from mezzo.core.patterns import matches
from mezzo.pytorch.launch.nudge import nudge
from mezzo.pytorch.launch.quiet import quiet
from mezzo.pytorch.region import dispatch
from mezzo.pytorch.region.fp8_layers import described, with_heads
from mezzo.pytorch.region.modules import apply_module_overrides, fitting, no_such_module
from mezzo.pytorch.tf32 import leaves_autocast_off, switch_off_tf32
from mezzo.pytorch.wrappers import unwrapped

if TYPE_CHECKING:
    from mezzo.core.policy import Policy
    from mezzo.pytorch.launch.optimizers import Steps
    from mezzo.pytorch.launch.session import Session
    from mezzo.pytorch.launch.storage import Storage

_LOWERED = (torch.bfloat16, torch.float16)
_AUTOCAST_OFF = ("fp32", "tf32")

FOLLOWS = "_mezzo_follows"
"""Mark in a module's `__dict__`: the policy has it, or a module around it, in FP32, and no call of it is outermost."""


class Preparation:
    """Finds the device, resolves `auto`, applies the policy's overrides, nudges: each once a module."""

    def __init__(self, session: Session, steps: Steps, storage: Storage) -> None:
        self._session = session
        self._steps = steps
        self._storage = storage
        # What is moved already: a compiled step in FP32 shows us inner modules, too.
        self._nudged: MutableMapping[torch.Tensor, None] = WeakIdKeyDictionary()
        # By id, for it is asked at each call and a WeakKeyDictionary is slow.
        self._known: dict[int, tuple[weakref.ref[nn.Module], bool]] = {}
        self._paths: dict[str, None] = {}  # of the modules of all models that were called
        self._waiting: list[str] = []  # patterns that none of them has matched

    def prepare(self, module: nn.Module, *, traced: bool = False) -> bool:
        """Whether this module's call is a region: it has floating parameters, all of FP32 or wider but for
        those that we lowered.

        Args:
            module: the module that is called outermost.
            traced: whether a compiler traces the call: its weights must stay what they are.
        """
        known = self.knows(module)
        if known is None:
            known = self._first_call(module)
            key = id(module)
            self._known[key] = weakref.ref(module, lambda _: self._known.pop(key, None)), known
        if known and self._storage.wanted:
            self._settle(module, traced)
        if known and traced and self._session.scaling:
            self._steps.traced.add(module)
            self.remember_statistics(module)
        return known

    def knows(self, module: nn.Module) -> bool | None:
        """Whether a call of this module was a region before; None if it was never called."""
        found = self._known.get(id(module))
        return found[1] if found is not None and found[0]() is module else None

    @quiet
    def remember_statistics(self, module: nn.Module) -> None:
        """Keep the running statistics as they are before the step, for the case that it is vetoed."""
        self._session.networks.call(module)

    @quiet
    def _first_call(self, module: nn.Module) -> bool:
        session = self._session
        own = [p for p in module.parameters() if p.is_floating_point()]
        if not own:
            return False
        name = type(unwrapped(module)).__name__
        lowered = next((p.dtype for p in own if p.dtype in _LOWERED), None)
        if (
            lowered is not None and not session.lowered_weights
        ):  # else it may be by us, or a copy of such a one
            session.stand_back(
                f"{name} holds {str(lowered).removeprefix('torch.')} parameters: "
                "the script chooses its formats itself",
                "to have Mezzo do it, keep the model in FP32: take out the line that makes it 16 bits",
            )
            return False
        first = not session.device_type
        session.resolve(next(iter(own)).device.type)
        for part in module.modules():
            if isinstance(part, nn.parallel.DistributedDataParallel):
                session.wrappers.update(dict.fromkeys(map(id, part.parameters()), weakref.ref(part)))
        emulated = not leaves_autocast_off(session.policy, session.device_type)
        exact = session.policy.compute == "fp32" or (session.policy.compute == "tf32" and emulated)
        if first and exact and switch_off_tf32():
            session.journal.note(
                f"the script had switched TF32 on; under the policy {session.policy.compute} products are FP32's"
            )
        if session.lowers or not session.compiled:  # a compiled step in FP32 shows inner modules, too
            session.modules.setdefault(name)
        policy = with_heads(session.policy, unwrapped(module))
        for note in described(policy, unwrapped(module))[:1]:
            session.journal.note(note)
        if policy.modules and not policy.is_fp32:
            self._override(module, policy, first)
        if first and session.lowers:
            # After the overrides, which may bring another policy: then nothing rules alone.
            dispatch.rule_alone(session.policy, session.device_type)
        if session.request.nudge and not session.journal.updates:
            fresh = [p for p in own if not is_lazy(p) and p not in self._nudged]
            self._nudged.update(dict.fromkeys(fresh))
            nudge(fresh)
        return True

    @quiet
    def _settle(self, module: nn.Module, traced: bool) -> None:
        if not traced:
            self._storage.settle(module)
        elif not self._storage.knows(module):
            name = type(unwrapped(module)).__name__
            self._storage.left_out(f"the weights of {name} stay FP32: a compiled function calls it")

    def finish(self) -> None:
        """The script has ended by itself: a pattern that still waits for its model is a mistake."""
        if self._waiting:
            models = ", ".join(self._session.modules)
            self._session.fatal = no_such_module(self._waiting[0], self._paths, f"what was called ({models})")

    def _override(self, module: nn.Module, policy: Policy, first: bool) -> None:
        model = unwrapped(module)
        self._paths.update(dict.fromkeys(path for path, _ in model.named_modules()))
        patterns = [pattern for pattern, _ in policy.modules] if first else self._waiting
        self._waiting = [p for p in patterns if not any(matches(p, path) for path in self._paths)]
        if first:
            for pattern in self._waiting:
                self._wait_for(pattern, model)
        fits = fitting(policy, model)
        if fits.modules:
            overrides = apply_module_overrides(model, fits, self._session.device_type)
            _mark_followers(model, overrides.formats)

    def _wait_for(self, pattern: str, model: nn.Module) -> None:
        """Patterns may be written for another model than the first that is called, if the script has made it by then.

        Raises:
            UnknownNameError: there is none that the pattern matches.
        """
        name = type(model).__name__
        other = next(
            (m for m in _others(model) if any(matches(pattern, p) for p, _ in m.named_modules())), None
        )
        if other is None:
            self._session.fatal = error = no_such_module(pattern, self._paths)
            raise error
        print(
            f"mezzo: module pattern {pattern!r} matches nothing in {name}, the first model that is called; it waits "
            "for another one",
            file=sys.stderr,
        )


def _others(model: nn.Module) -> Iterator[nn.Module]:
    """All modules alive that are no part of this one."""
    inside = {id(part) for part in model.modules()}
    for thing in gc.get_objects():
        if issubclass(type(thing), nn.Module) and id(thing) not in inside and "_modules" in thing.__dict__:
            yield thing


def _mark_followers(model: nn.Module, formats: Mapping[str, str]) -> None:
    """Let what runs inside a module in FP32 follow it: autocast is off there, and a call would pass for outermost."""
    for path, fmt in formats.items():
        if fmt in _AUTOCAST_OFF:
            for name, module in model.get_submodule(path).named_modules(prefix=path):
                if name and formats.get(name, fmt) in _AUTOCAST_OFF:
                    module.__dict__[FOLLOWS] = True

"""The region of a run: each outermost call of a module with parameters.

A module is called outermost if autocast is off around it. In a backward pass that is a checkpoint's recomputation: the
same region again, and no call of its own. A criterion, a
metric or an activation has no parameters: it is the script's own arithmetic on FP32 values, and stays in
FP32. Calls inside the region meet one question, whether any autocast is on, and go their way.

Inside `torch.compile` the patched `__call__` is traced like any other function (a compiled step), so this
file holds what Dynamo may see and nothing else. What must happen once a module (`Regions.prepare`) happens
while Dynamo traces, not in the graph: a graph break there would cut a step in two for good.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from mezzo.pytorch.launch.outputs import to_fp32
from mezzo.pytorch.launch.prepare import FOLLOWS
from mezzo.pytorch.launch.quiet import pass_over, quiet
from mezzo.pytorch.region import identity
from mezzo.pytorch.region.autocast import Region, autocast

if TYPE_CHECKING:
    from mezzo.core.policy import Policy
    from mezzo.pytorch.launch.prepare import Preparation
    from mezzo.pytorch.launch.session import Session

_any_autocast = torch._C._is_any_autocast_enabled
_label_on = torch.is_autocast_enabled
_LABEL = identity.LABEL_DEVICE
_graph_task = torch._C._current_graph_task_id  # -1 outside a backward pass
_tracing_state = torch._C._get_tracing_state


class _Thread(threading.local):
    """Whether this thread is inside an outermost call in FP32, where autocast's state can't tell."""

    in_fp32 = False


def make_call(session: Session, preparation: Preparation, original: Callable[..., Any]) -> Callable[..., Any]:
    """The `nn.Module.__call__` of a run."""
    thread = _Thread()
    companions = session.companions

    def prepare_at_trace_time(context: Any) -> None:
        variable = context.get_local("self")._i_will_not_complain_if_bc_breaks_VariableTracker()
        module = getattr(variable, "value", None)
        if isinstance(module, nn.Module) and preparation.prepare(module, traced=True):
            session.compiled = True

    def traced(self: nn.Module, args: Any, kwargs: Any) -> Any:
        # Dynamo may trace this twice and must take the same way both times: nothing that `prepare` changes
        # is read before it.
        from torch._dynamo.comptime import comptime

        comptime(prepare_at_trace_time)
        if session.left_alone is not None or not session.lowers:
            return original(self, *args, **kwargs)
        with autocast(session.policy, session.device_type):
            out = original(self, *args, **kwargs)
        return to_fp32(out)

    @quiet
    def begin(module: nn.Module) -> Policy | None:
        """The policy for an outermost call of this module; None if the call is none of ours."""
        if session.left_alone is not None or _tracing_state() is not None:
            return None
        if thread.in_fp32 or companions.busy:  # busy: one who looks at a step calls the model
            return None
        if _graph_task() != -1:  # `checkpoint(model, x)` of the script's calls it again
            return session.policy_now if session.lowers and preparation.knows(module) else None
        if not preparation.prepare(module):
            return None
        policy = session.enter()
        if module.training and session.scaling:
            preparation.remember_statistics(module)
        return policy

    @quiet
    def open_region(policy: Policy) -> Region:
        return autocast(policy, session.device_type).__enter__()

    @quiet
    def close_region(region: Region) -> None:
        region.__exit__(None, None, None)

    def original_told(self: nn.Module, args: Any, kwargs: Any) -> Any:
        told = companions.call_begins(self, args, kwargs)
        if not told:
            return original(self, *args, **kwargs)
        try:
            out = original(self, *args, **kwargs)
        except BaseException:
            companions.step_dropped()
            raise
        companions.call_ended(self, out)
        return out

    fp32_outside = quiet(to_fp32)

    def outermost(self: nn.Module, args: Any, kwargs: Any) -> Any:
        policy = begin(self)
        if policy is None:
            return original(self, *args, **kwargs)
        companions.watch_begins(self)
        if policy.is_fp32:
            thread.in_fp32 = True
            try:
                return original_told(self, args, kwargs)
            finally:
                thread.in_fp32 = False
        region = open_region(policy)
        try:
            out = original_told(self, args, kwargs)
        finally:
            close_region(region)
        return fp32_outside(out)

    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if _any_autocast() or _label_on(_LABEL) or FOLLOWS in self.__dict__:
            return original(self, *args, **kwargs)
        if torch.compiler.is_compiling():
            return traced(self, args, kwargs)
        return outermost(self, args, kwargs)

    # Met as a frame of its own (the module inside a compiled model), this is passed over, as PyTorch's own
    # `__call__` is: what is compiled then is the module's `forward`. It is still traced inside a compiled step.
    pass_over(call)
    pass_over(outermost)
    pass_over(original_told)
    return call

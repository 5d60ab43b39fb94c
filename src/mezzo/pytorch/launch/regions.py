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
from torch import Tensor, nn
from torch._C._dynamo import eval_frame

from mezzo.pytorch.launch.outputs import to_fp32
from mezzo.pytorch.launch.prepare import FOLLOWS
from mezzo.pytorch.launch.quiet import pass_over, quiet
from mezzo.pytorch.region import identity
from mezzo.pytorch.region.autocast import autocast

if TYPE_CHECKING:
    from mezzo.core.policy import Policy
    from mezzo.pytorch.launch.prepare import Preparation
    from mezzo.pytorch.launch.session import Session
    from mezzo.pytorch.region.autocast import Region

_any_autocast = torch._C._is_any_autocast_enabled
_label_on = torch.is_autocast_enabled
_LABEL = identity.LABEL_DEVICE
_graph_task = torch._C._current_graph_task_id  # -1 outside a backward pass
_tracing_state = torch._C._get_tracing_state
_is_compiling, _dynamo_compiling = torch.compiler.is_compiling, torch.compiler.is_dynamo_compiling
_float32 = torch.float32
_set_eval_frame = eval_frame.set_eval_frame


class _Thread(threading.local):
    """Whether this thread is inside an outermost call in FP32, where autocast's state can't tell."""

    in_fp32 = False
    policy: Policy | None = None  # of the last call, whose region is `region`
    region: Region | None = None


_Entered = tuple[
    "Region | None", bool
]  # of a call that runs: its region, whether the companions are notified


def make_call(session: Session, preparation: Preparation, original: Callable[..., Any]) -> Callable[..., Any]:
    """The `nn.Module.__call__` of a run."""
    thread = _Thread()
    companions = session.companions
    is_wrapped_call = original is vars(nn.Module)["_wrapped_call_impl"]

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

    def enter(module: nn.Module, args: Any, kwargs: Any) -> _Entered | None:
        """Begin an outermost call of this module; None if the call is none of ours."""
        if session.left_alone is not None or _tracing_state() is not None:
            return None
        if companions.busy:  # one who looks at a step calls the model
            return None
        if _graph_task() != -1:  # `checkpoint(model, x)` of the script's calls it again
            if not (session.lowers and preparation.knows(module)):
                return None
            policy = session.policy_now
        elif preparation.prepare(module):
            policy = session.enter()
            if module.training and session.scaling:
                preparation.remember_statistics(module)
        else:
            return None
        companions.watch_begins(module)
        if thread.policy is not policy:
            thread.policy = policy
            thread.region = None if policy.is_fp32 else autocast(policy, session.device_type)
        region = thread.region
        if region is None:
            thread.in_fp32 = True
        else:
            region.__enter__()
        try:
            return region, companions.listening and companions.call_begins(module, args, kwargs)
        except BaseException:
            end(region)
            raise

    def leave(module: nn.Module, entered: _Entered, out: Any) -> Any:
        region, told = entered
        try:
            if told:
                companions.call_ended(module, out)
        finally:
            end(region)
        if region is None or (type(out) is Tensor and out.dtype is _float32):
            return out
        return to_fp32(out)

    @quiet
    def fail(entered: _Entered) -> None:
        region, told = entered
        try:
            if told:
                companions.step_dropped()
        finally:
            end(region)

    def end(region: Region | None) -> None:
        if region is None:
            thread.in_fp32 = False
        else:
            region.__exit__(None, None, None)

    def outermost(self: nn.Module, args: Any, kwargs: Any) -> Any:
        before = _set_eval_frame(None)  # as `quiet` does, which a small model would notice
        try:
            entered = enter(self, args, kwargs)
        finally:
            _set_eval_frame(before)
        if entered is None:
            return original(self, *args, **kwargs)
        try:
            out = original(self, *args, **kwargs)
        except BaseException:
            fail(entered)
            raise
        before = _set_eval_frame(None)
        try:
            return leave(self, entered, out)
        finally:
            _set_eval_frame(before)

    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if _any_autocast() or _label_on(_LABEL) or FOLLOWS in self.__dict__:
            if is_wrapped_call and self._compiled_call_impl is None:
                return self._call_impl(*args, **kwargs)  # what `original` does, without a frame of its own
            return original(self, *args, **kwargs)
        if not _dynamo_compiling() and thread.in_fp32:
            return original(self, *args, **kwargs)
        if _is_compiling():
            return traced(self, args, kwargs)
        return outermost(self, args, kwargs)

    # Met as a frame of its own (the module inside a compiled model), this is passed over, as PyTorch's own
    # `__call__` is: what is compiled then is the module's `forward`. It is still traced inside a compiled step.
    pass_over(call)
    pass_over(outermost)
    return call

"""quiet: bookkeeping that Dynamo must not look at, whichever compiled function it was called from."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

from torch._C._dynamo import eval_frame

_Function = TypeVar("_Function", bound=Callable[..., Any])


def quiet(function: _Function) -> _Function:
    """`function`, with frame evaluation as in plain Python while it runs.

    Code called from a compiled function at a graph break is compiled in its turn, and that would include our
    record keeping. Unlike `torch.compiler.disable`, this imports no compiler.
    """

    @functools.wraps(function)
    def undisturbed(*args: Any, **kwargs: Any) -> Any:
        before = eval_frame.set_eval_frame(None)
        try:
            return function(*args, **kwargs)
        finally:
            eval_frame.set_eval_frame(before)

    return cast("_Function", undisturbed)


def pass_over(function: Callable[..., Any]) -> None:
    """Have Dynamo run this function's own frame as it is, and look at the frames that it calls.

    It is still traced where a compiled function calls it. What `torch.compiler.disable(recursive=False)`
    does inside.
    """
    pieces: Any = eval_frame
    as_it_is = pieces._FrameExecStrategy(pieces._FrameAction.SKIP, pieces._FrameAction.DEFAULT)
    pieces.set_code_exec_strategy(function.__code__, as_it_is)

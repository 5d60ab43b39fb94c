"""quiet: bookkeeping that Dynamo must not look at, whichever compiled function it was called from."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

from torch._C._dynamo.eval_frame import set_eval_frame

_Function = TypeVar("_Function", bound=Callable[..., Any])


def quiet(function: _Function) -> _Function:
    """`function`, with frame evaluation as in plain Python while it runs.

    Code called from a compiled function at a graph break is compiled in its turn, and that would include our
    record keeping. Unlike `torch.compiler.disable`, this imports no compiler.
    """

    @functools.wraps(function)
    def undisturbed(*args: Any, **kwargs: Any) -> Any:
        before = set_eval_frame(None)
        try:
            return function(*args, **kwargs)
        finally:
            set_eval_frame(before)

    return cast("_Function", undisturbed)

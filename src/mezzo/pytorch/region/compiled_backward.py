"""The backward pass of a compiled function, made as an eager one runs: outside of every region.

`torch.compile` makes both passes while the function is called, and by default makes the backward pass under the
autocast state of that call. Eager code runs `backward()` outside of it. The two differ where an op's backward pass
falls into other ops than the op itself: the products of an FP32 `linear` inside a 16-bit region would be taken for
products of the region, and numbers beyond fp16 overflow on their way into them. (`torch.amp` has that fault.)
"""

from __future__ import annotations

_DEFAULT, _OFF = "same_as_forward", "off"


def make_it_outside() -> None:
    """From now on, in this process. A setting that the user has changed stays, as does an older PyTorch's."""
    from torch._functorch import config  # part of the keys of PyTorch's compile caches

    if getattr(config, "backward_pass_autocast", None) == _DEFAULT:
        config.backward_pass_autocast = _OFF

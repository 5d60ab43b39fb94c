"""Count the operations and saved bytes of a loss function in the graph of `torch.compile`, before code is generated."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Graphs:
    """What AOTAutograd hands to Inductor.

    Args:
        forward: operations of the forward graph.
        backward: and of the backward graph.
        saved: the floating tensors that forward leaves for backward, and the gradients that arrive.
    """

    forward: list[torch.fx.Node]
    backward: list[torch.fx.Node]
    saved: list[Tensor]

    def bytes_saved(self, *dtypes: torch.dtype) -> int:
        """Bytes of what is saved, in these formats or in all."""
        return sum(t.numel() * t.element_size() for t in self.saved if not dtypes or t.dtype in dtypes)


def graphs_of(loss_of: Callable[..., Tensor], *inputs: Tensor) -> Graphs:
    """A loss function compiled up to Inductor's door: its decompositions, its choice of what to save, no code."""
    import torch._inductor.lowering
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch._aot_autograd.utils import make_boxed_func
    from torch._functorch.partitioners import min_cut_rematerialization_partition
    from torch._inductor.decomposition import select_decomp_table

    found: dict[str, tuple[Any, Any]] = {}

    def compiler(side: str) -> Any:
        def keep(module: Any, arguments: Any) -> Any:
            assert side not in found, "the function broke into several graphs"
            found[side] = module, arguments
            return make_boxed_func(module.forward)

        return keep

    torch._dynamo.reset()
    backend = aot_autograd(
        fw_compiler=compiler("forward"),
        bw_compiler=compiler("backward"),
        partition_fn=min_cut_rematerialization_partition,
        decompositions=select_decomp_table(),
    )
    torch.compile(loss_of, backend=backend, fullgraph=True)(*inputs).backward()
    torch._dynamo.reset()
    operations = {
        side: [node for node in module.graph.nodes if node.op == "call_function"]
        for side, (module, _) in found.items()
    }
    saved = [t for t in found["backward"][1] if isinstance(t, Tensor) and t.is_floating_point()]
    return Graphs(operations["forward"], operations["backward"], saved)

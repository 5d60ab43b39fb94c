"""`weights=` and `state=` of MixedPrecision: first the policy that they ask for, then the model and the
optimizer put into it.

Choosing touches nothing, so that everything a user can get wrong in words is refused before a weight is
rounded. Putting it into force is undone if it fails halfway.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from torch import Tensor, nn
from torch.optim import Optimizer

from mezzo.core.compute import activations_of
from mezzo.core.errors import UnsupportedPrecisionError, UsageError, unknown_name
from mezzo.core.format_names import dtype_name
from mezzo.core.masters import STATE_FORMATS
from mezzo.core.policy import Policy
from mezzo.pytorch import auto
from mezzo.pytorch.dtypes import name_of
from mezzo.pytorch.optim.adopt import Adopted, adopt
from mezzo.pytorch.optim.fused import FusedOptimizer
from mezzo.pytorch.optim.with_masters import WithMasters, with_masters
from mezzo.pytorch.scaling import gradients
from mezzo.pytorch.training.accumulation import SIXTEEN_BITS
from mezzo.pytorch.weights.lowering import lower_weights, take_master

# The keyword's word -> the policy's masters. "masters" goes with either 16-bit format.
WEIGHTS = {"fp32": "fp32", "split": "split", "split8": "split8", "masters": "fp32"}


def chosen(policy: Policy, weights: str | None, state: str | None, device_type: str) -> tuple[Policy, str]:
    """The policy with the weights and the optimizer state that were asked for.

    `auto` with 16-bit weights is settled here, without a trial: split and split8 exist in bf16 alone, and for
    the others the hardware decides.

    Args:
        policy: as the user gave it.
        weights: one of `WEIGHTS`, or None for what the policy says.
        state: ``fp32``, ``bf16`` or ``int8``, or None for what the policy says.
        device_type: ``"cpu"``, ``"cuda"``, ...

    Returns:
        The policy, and why `auto` became what it is ("" where it did not).

    Raises:
        UsageError: weights that the precision can't have, or that contradict the policy.
        UnsupportedPrecisionError: `auto` with 16-bit weights, where the hardware has no 16-bit format.
    """
    if weights is not None and weights not in WEIGHTS:
        raise unknown_name("kind of weights", str(weights), WEIGHTS, where="MixedPrecision: ")
    if state is not None:
        state = dtype_name(state)
        if state not in STATE_FORMATS:
            raise unknown_name("state format", str(state), STATE_FORMATS, where="MixedPrecision: ")
        policy = replace(policy, state=state)
    if weights is None:
        return _settled(policy)
    if weights == "fp32":
        if policy.params != "fp32":
            raise UsageError(
                f"MixedPrecision: weights='fp32', and policy '{policy}' stores parameters in {policy.params}. "
                "Leave one of the two out."
            )
        return policy, ""
    why = ""
    compute = policy.compute
    if compute == "auto":
        if weights == "masters":
            found, why = auto.resolve(policy, device_type)
            compute = found.compute
            if compute == "fp32":
                raise UnsupportedPrecisionError(
                    f"MixedPrecision: weights='masters' stores weights in the format that is computed in, and "
                    f"this {device_type} device has no fast 16-bit one. Name it all the same: "
                    "precision='bf16'; or leave weights out."
                )
        else:
            compute, why = "bf16", f"bf16: weights={weights!r} are stored in it, so nothing was timed"
    stored = activations_of(compute)
    if stored == "fp32":
        raise UsageError(
            f"MixedPrecision: weights={weights!r} stores weights in 16 bits, and precision={compute!r} computes in "
            "FP32, which would not see the rest of them. Use precision='bf16', or weights='fp32'."
        )
    masters = WEIGHTS[weights]
    if stored == "fp16" and masters != "fp32":
        raise UsageError(
            f"MixedPrecision: weights={weights!r} keeps the lower bits of an FP32 value whose upper half is the "
            "weight, which bf16 is and fp16 is not. fp16 weights have separate FP32 masters: "
            "weights='masters'. Or use precision='bf16'."
        )
    if policy.params != "fp32" and (policy.params, policy.masters) != (stored, masters):
        raise UsageError(
            f"MixedPrecision: weights={weights!r}, and policy '{policy}' says params={policy.params},"
            f"masters={policy.masters}. Leave one of the two out."
        )
    return replace(policy, compute=compute, params=stored, masters=masters), why


def _settled(policy: Policy) -> tuple[Policy, str]:
    """A policy whose own words store parameters in 16 bits, with its compute known.

    Raises:
        UsageError: it computes in another format than it stores.
    """
    if policy.params in ("fp32", policy.activations):
        return policy, ""
    if policy.compute == "auto":
        why = f"{policy.params}: parameters are stored in it, so nothing was timed"
        return replace(policy, compute=policy.params), why
    raise UsageError(
        f"MixedPrecision: policy '{policy}' stores parameters in {policy.params} and computes in "
        f"{policy.compute}, which would not see the rest of them. Use compute={policy.params}."
    )


_NEEDS_FUSED = (
    "MixedPrecision: release_gradients=True steps inside backward, a parameter at a time, which only a "
    "mezzo.optim optimizer can do (or torch.optim.AdamW, Adam or SGD, which is made into one), and this is "
    "{got}."
)


@dataclass
class Trained:
    """What a policy's weights made of a model and its optimizer.

    Args:
        fused: the optimizer whose kernel does everything in one pass; None where `optimizer` is another.
        optimizer: the one whose `step` is called.
        lowered: parameters that were stored in 16 bits here.
    """

    fused: FusedOptimizer | None
    optimizer: Optimizer
    lowered: list[Tensor]

    @property
    def stored_as(self) -> str:
        """How weights are stored, in a few words: ``fp32``, or a format and its masters."""
        for group in self.optimizer.param_groups:
            for param in group["params"]:
                if param.dtype in SIXTEEN_BITS:
                    return f"{name_of(param.dtype)} with masters={group.get('masters', 'fp32')}"
        return "fp32"

    @property
    def wants_fp32_gradients(self) -> bool:
        """Whether 16-bit gradients would be converted anyway: torch's optimizer works on FP32 masters."""
        return _has_separate_masters(self.optimizer)


def put_into_force(
    model: nn.Module,
    optimizer: Optimizer,
    policy: Policy,
    others: Iterable[Tensor] = (),
    *,
    fused: bool = False,
) -> Trained:
    """Store the model's weights as the policy says, and give them an optimizer that knows their masters.

    Args:
        model: FP32, or 16-bit already.
        optimizer: a FusedOptimizer of these modes, a WithMasters, one that was adopted before, or one of
            torch's to be adopted.
        policy: from `chosen`.
        others: parameters that somebody else trains; they stay as they are.
        fused: whether only a FusedOptimizer will do.

    Raises:
        UsageError: the optimizer can't have such weights, or can't be fused. Model and optimizer are as before.
    """
    own = own_optimizer(optimizer)
    if isinstance(own, FusedOptimizer):
        _modes_agree(own, policy)
    elif _has_separate_masters(own) and (policy.masters != "fp32" or policy.state != "fp32"):
        raise UsageError(
            f"MixedPrecision: the optimizer keeps separate FP32 masters, and policy '{policy}' says "
            f"masters={policy.masters}, state={policy.state}. Use weights='masters', or hand in "
            "torch.optim.AdamW, Adam or SGD."
        )
    elif _has_separate_masters(own) and fused:
        raise UsageError(_NEEDS_FUSED.format(got="with_masters(...)"))
    lowered = _lower(model, policy, {id(p) for p in others}) if policy.params != "fp32" else []
    try:
        if isinstance(own, FusedOptimizer):
            return Trained(own, own, lowered)
        plain = policy.params == "fp32" and policy.state == "fp32"
        if _has_separate_masters(own) or (plain and not fused):
            return Trained(None, own, lowered)
        try:
            adopted = adopt(optimizer, masters=policy.masters, state=policy.state)
        except UsageError as error:
            if fused:
                raise UsageError(f"{_NEEDS_FUSED.format(got=type(optimizer).__name__)} {error}") from None
            if policy.masters == "fp32" and policy.state == "fp32":
                return Trained(None, with_masters(optimizer), lowered)
            raise
        return Trained(adopted, adopted, lowered)
    except BaseException:
        raise_weights(lowered)
        raise


def has_16_bit(optimizer: Optimizer) -> bool:
    """Whether an optimizer has 16-bit parameters."""
    return any(param.dtype in SIXTEEN_BITS for param in gradients.parameters(optimizer))


def clears_plainly(optimizer: Optimizer) -> bool:
    """Whether `zero_grad(set_to_none=True)` only sets every parameter's gradient to None."""
    own = own_optimizer(optimizer)
    return (
        type(own).zero_grad is Optimizer.zero_grad
        and "zero_grad" not in vars(own)
        and "zero_grad" not in vars(optimizer)
    )


def own_optimizer(optimizer: Optimizer) -> Optimizer:
    """The optimizer behind an adopted one's alias; any other is its own."""
    return optimizer.fused if isinstance(optimizer, Adopted) else optimizer


def _has_separate_masters(optimizer: Optimizer) -> bool:
    """Whether it is a WithMasters, or the optimizer inside one."""
    return isinstance(optimizer, WithMasters) or hasattr(optimizer.step, "_goes_through_masters")


def raise_weights(lowered: Iterable[Tensor]) -> None:
    """Make parameters FP32 again, to the last bit, whose masters no optimizer has taken yet."""
    for param in lowered:
        master = take_master(param)
        grad, param.grad = param.grad, None
        param.data = param.detach().float() if master is None else master  # 16 bits held it exactly
        if grad is not None:
            param.grad = grad.float()


def _lower(model: nn.Module, policy: Policy, others: set[int]) -> list[Tensor]:
    keep = [name for name, p in model.named_parameters(remove_duplicate=False) if id(p) in others]
    names = lower_weights(model, policy, keep=keep)
    lowered: list[Tensor] = [model.get_parameter(name) for name in names]
    if lowered and isinstance(model, nn.parallel.DistributedDataParallel):
        raise_weights(lowered)
        raise UsageError(
            "MixedPrecision: DistributedDataParallel has laid out its buckets for FP32 gradients, and these "
            f"weights would become {policy.params}. Lower them before you wrap the model: "
            f"mezzo.lower_weights(model, {policy.params!r})."
        )
    return lowered


def _modes_agree(optimizer: FusedOptimizer, policy: Policy) -> None:
    for group in optimizer.param_groups:
        masters, state = group["masters"], group["state_format"]
        if policy.params != "fp32" and masters != policy.masters:
            raise UsageError(
                f"MixedPrecision: policy '{policy}' wants masters={policy.masters!r}, and this "
                f"{type(optimizer).__name__} has masters={masters!r}. Make it with "
                f"masters={policy.masters!r}, or hand in torch.optim.AdamW, Adam or SGD."
            )
        if policy.state not in ("fp32", state):
            raise UsageError(
                f"MixedPrecision: policy '{policy}' wants state={policy.state!r}, and this "
                f"{type(optimizer).__name__} has state={state!r}. Make it with state={policy.state!r}, or "
                "hand in torch.optim.AdamW, Adam or SGD."
            )


def formats_agree(optimizer: Optimizer, policy: Policy, why: str = "") -> tuple[Policy, str]:
    """The policy, once 16-bit weights that are there already have been held against it.

    Returns:
        It, with a compute that was `auto` settled by such weights; and why it became what it is.

    Raises:
        UsageError: weights of another 16-bit format than is computed in, or without masters to be had.
    """
    own = own_optimizer(optimizer)
    has_masters = isinstance(own, FusedOptimizer) or _has_separate_masters(own) or policy.params != "fp32"
    for param in gradients.parameters(own):
        if param.dtype not in SIXTEEN_BITS:
            continue
        fmt = name_of(param.dtype)
        if policy.compute == "auto":
            policy, why = policy.resolved(fmt), f"{fmt}: weights are stored in it, so nothing was timed"
        if not has_masters:
            raise UsageError(
                f"MixedPrecision: a parameter is {fmt}. Updates smaller than half a unit in its last place would "
                "be lost: keep the model FP32 (no .half(), no .bfloat16()), and weights='masters' (for bf16 "
                "also 'split', 'split8') stores it in 16 bits with what is needed beside it; or keep the model "
                "as it is, and give weights= or a mezzo.optim optimizer."
            )
        if policy.activations != fmt:
            raise UsageError(
                f"MixedPrecision: a parameter is {fmt}, and policy '{policy}' computes in {policy.compute}. Use "
                f"precision={fmt!r}, or keep the model FP32."
            )
    return policy, why

"""A selective policy that matches no operator: everything is recomputed."""

from collections.abc import Callable, Collection
from typing import Any

from lowtide.doctor import checkpoint_seam
from lowtide.doctor.finding import Check, Finding, Gain
from lowtide.doctor.step_under_test import StepUnderTest

CHECK = Check(
    code="LT106",
    severity="waste",
    title="a selective checkpointing policy never says save: everything is recomputed",
    symptom="the step is as slow as under full checkpointing",
    source="pytorch#176065 (aten.mm is not aten.mm.default)",
    mend="Compare with overloads: torch.ops.aten.mm.default.",
)
_NO_NAMES = "Let the policy save something, or checkpoint without one: as it is, it costs its calls alone."


def find(setup: StepUnderTest) -> Finding | None:
    asked = [c for c in setup.calls if c.decisions]
    if not asked or any(said == "save" for c in asked for _, said in c.decisions or ()):
        return None
    number = sum(sum((c.decisions or {}).values()) for c in asked)
    packets = asked[0].policy_names
    met = sorted({op for c in asked for op, _ in c.decisions or () if op.rpartition(".")[0] in packets})
    overloads = met or [f"{p}.default" for p in packets]
    why = ""
    if packets:
        why = f"; it names {', '.join(packets)}, and what runs is {', '.join(met) or 'something else'}"
    return CHECK.found(
        f"asked {number} times in {len(asked)} checkpointed calls, the policy said recompute every time{why}",
        module=asked[0].path,
        mend=f"Compare with overloads: {', '.join(f'torch.ops.{op}' for op in overloads)}." if overloads else _NO_NAMES,
        gain=_gain(setup, packets),
        fix="\n".join(f"torch.ops.{op}  # in place of torch.ops.{op.rpartition('.')[0]}" for op in overloads),
    )


def _gain(setup: StepUnderTest, packets: Collection[str]) -> Gain:
    if not packets:
        return Gain(why_not="the policy names no operator, so there is nothing to mend it with")
    return setup.gain(lambda: checkpoint_seam.changed_policies(lambda policy: _of_packets(policy, packets)))


def _of_packets(policy: Callable[..., Any], packets: Collection[str]) -> Callable[..., Any]:
    """The policy as it was meant: it is asked of the packet where it names one, not of the packet's overload."""

    def asked(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
        packet = getattr(op, "overloadpacket", op)
        return policy(ctx, packet if str(packet) in packets else op, *args, **kwargs)

    return asked

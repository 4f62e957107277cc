"""A selective policy that matches no operator: everything is recomputed."""

from lowtide.doctor.finding import Check, Finding
from lowtide.doctor.setup import Setup

CHECK = Check(
    code="LT106",
    severity="waste",
    title="a selective checkpointing policy never says save: everything is recomputed",
    symptom="the step is as slow as under full checkpointing",
    source="pytorch#176065 (aten.mm is not aten.mm.default)",
    mend="Compare with overloads: torch.ops.aten.mm.default.",
)


def look(setup: Setup) -> Finding | None:
    asked = [c for c in setup.calls if c.decisions]
    if not asked or any(said == "save" for c in asked for _, said in c.decisions or ()):
        return None
    number = sum(sum((c.decisions or {}).values()) for c in asked)
    packets = asked[0].policy_names
    why = ""
    if packets:
        met = sorted({op for c in asked for op, _ in c.decisions or () if op.rpartition(".")[0] in packets})
        why = f"; it names {', '.join(packets)}, and what runs is {', '.join(met) or 'something else'}"
    return CHECK.found(
        f"asked {number} times in {len(asked)} checkpointed calls, the policy said recompute every time{why}",
        module=asked[0].path,
        fix="\n".join(f"torch.ops.{p}.default  # in place of torch.ops.{p}" for p in packets),
    )

"""What a forecast assumes, in words."""

from __future__ import annotations

from lowtide.foresight.device_peak import FRAGMENTATION
from lowtide.foresight.quantized_layers import installed_version
from lowtide.foresight.rank_memory import RankMemory, precision_words
from lowtide.foresight.training_setup import PRECISIONS, TrainingSetup
from lowtide.graph.step_graph import StepGraph


def assumptions(setup: TrainingSetup, rank: RankMemory, graph: StepGraph | None) -> list[str]:
    device = setup.device
    dtype = PRECISIONS[setup.precision][1] or setup.dtype
    found = [precision_words(setup), rank.rule]
    if setup.attention == "eager":
        found.append("attention: eager, its scores are stored")
    elif device.kind != "cpu":
        kernels = {op.name for op in graph.ops if "attention" in op.name} if graph is not None else set()
        named = next((k for k in ("flash", "efficient") if any(k in name for name in kernels)), None)
        found.append(f"attention: {named or 'math' if graph is not None else 'not traced'} kernel")
    if dtype not in device.matrix_flops:
        found.append(f"{device.title} has no matrix units for {dtype}: counted at the rate of a wider one")
    share = ", ".join(f"{100 * f:.0f} %" for f in FRAGMENTATION)
    found.append(f"fragmentation: {share} of what a step makes (low, expected, high; assumed)")
    if setup.makes_gradients:
        found.append("zero_grad() has freed the gradients: backward makes them")
    else:
        found.append("gradients are there before the step, which adds to them")
    found.append("what the model returned beside its loss is let go before backward; a loop that names it holds it")
    if device.kind not in ("cpu", "cuda"):
        found.append(f"the kernels of {device.kind} are not known: the CPU's are taken")
    if setup.quantized:
        version = installed_version()
        as_of = f"bitsandbytes {version}" if version else "bitsandbytes of today, which is not installed here,"
        found.append(f"4-bit layers as {as_of} runs them: a weight is expanded for each product")
    if setup.selective_op:
        found.append(
            "layers are checkpoints that keep attention and every other matrix product; no plan was looked for"
        )
    if setup.cuda_version is not None:
        found.append(f"a context of CUDA {setup.cuda_version}")
    if setup.pipeline_parallel > 1:
        found.append("one forward, one backward in turn (1F1B); ranks wait while the pipeline fills and drains")
    if graph is not None:
        found += graph.provenance.get("assumed", "").splitlines()
    if device.kind != "cpu":
        compared = "some steps were" if device.error_fraction < type(device).error_fraction else "no step was"
        found.append(f"{compared} compared with a real {device.title}; times may be off by {device.error_fraction:.0%}")
    return [line for line in found if line]

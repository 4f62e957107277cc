"""A training step in a process of its own, whose address space is limited."""

from support.training_steps import run

_SCRIPT = """
import resource, sys, torch, lowtide
torch.set_num_threads(1)
layers = []
for _ in range(24):
    layers += [torch.nn.Linear(64, 64), torch.nn.Hardswish()]
model, x = torch.nn.Sequential(*layers), torch.randn(131072, 64)  # 32 MiB a tensor, 48 of them stored: 1.5 GiB
import lowtide.api, lowtide.tape.offload.disk_tier
used = next(int(l.split()[1]) * 1024 for l in open("/proc/self/status") if l.startswith("VmSize"))
resource.setrlimit(resource.RLIMIT_AS, (used + int(sys.argv[1]) * 2**20,) * 2)
try:
    if len(sys.argv) > 2:
        options = dict(option.split("=") for option in sys.argv[2:])
        offload = lowtide.Offload(scratch_dir=options.get("scratch_dir"))
        fit = lowtide.fit(model, x, budget=options["budget"], offload=offload)
        assert fit.plan.plain_peak_bytes - fit.plan.resident_bytes > 1.4 * 2**30
        assert "scratch_dir" not in options or fit.plan.bytes_by_action["disk_offload"] > 2**29
    loss = model(x).square().mean()
    loss.backward()
    print("trained", all(p.grad is not None for p in model.parameters()))
except (RuntimeError, MemoryError) as error:
    print("no memory" if "allocate memory" in str(error) or isinstance(error, MemoryError) else error)
"""


def limited(spare_mib: int, *options: str) -> str:
    """Output of a step that may allocate ``spare_mib`` more, fitted with ``options`` (``name=value``) if any."""
    return run(_SCRIPT, str(spare_mib), *options)

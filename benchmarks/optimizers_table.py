"""The table of optimizer states in ``docs/foresight.md``."""

from __future__ import annotations

from foresight_table import percent

_MIB = 2**20


def optimizers_table(lines: list[dict]) -> str:
    """A row per optimizer: state foreseen before the first step beside what one step leaves, on each device."""
    by_name: dict[str, dict[str, dict]] = {}
    for line in lines:
        by_name.setdefault(line["optimizer"], {})[line["on"]] = line
    rows = [
        "| optimizer | of the weights | CPU: foreseen | after a step | counted | CUDA: foreseen | after a step "
        "| counted |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    not_run = []
    for name, on in by_name.items():
        cells = []
        for device in ("cpu", "cuda"):
            line = on.get(device, {"error": "not run"})
            if "error" in line:
                cells += ["-", "-", "-"]
                not_run.append(f"- {name}, {device}: {_short(line['error'])}")
                continue
            counted = line["counted_bytes"]
            cells += [*(_off(line[key], counted) for key in ("foreseen_bytes", "after_one_step_bytes")), _mib(counted)]
        shares = [line["counted_bytes"] / line["parameter_bytes"] for line in on.values() if "error" not in line]
        rows.append(f"| {name} | {100 * shares[0]:.0f} % | {' | '.join(cells)} |" if shares else _empty(name))
    ran = [line for line in lines if "error" not in line and line["counted_bytes"]]
    worst = max((abs(line["foreseen_bytes"] / line["counted_bytes"] - 1) for line in ran), default=0.0)
    packages = {name: version for line in lines for name, version in line["packages"].items()}
    versions = ", ".join(f"{name} {version}" for name, version in sorted(packages.items()))
    torches = " and ".join(dict.fromkeys(line["torch"] for line in lines))
    note = f"{len(ran)} states, the worst foreseen {percent(worst)} off. torch {torches}, {versions}."
    return "\n".join([*rows, "", note, "", "Not run:", "", *not_run])


def _empty(name: str) -> str:
    return f"| {name} |{' - |' * 7}"


def _off(found: int, counted: int) -> str:
    if found == counted:
        return "equal"
    return percent(found / counted - 1) if counted else f"{found:,} B"


def _mib(size: int) -> str:
    return f"{size / _MIB:.2f} MiB"


def _short(error: str) -> str:
    """The cause alone, its first sentence."""
    if "rehearsed (" in error:
        error = error.partition("rehearsed (")[2].rpartition("):")[0]
    return error.partition(". ")[0].strip(".: ") + "."

"""What whoever starts the script wants of its processes."""

import json
import os
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path


@dataclass(frozen=True)
class Request:
    """Read from the JSON file that ``STANDIN_SCRIPT`` names.

    Attributes:
        steps: Optimizer steps after which the process ends; 0: it runs to its own end.
        ranks: How many ranks the job has, of which ``rank`` alone exists; 0: as the script's launcher says.
        objects: A folder for what ranks send one another as objects; runs of several ranks share it.
        sends_to: The process ends when it has sent ``sends`` lists of objects to this rank.
        history: Record who allocated what, which says what the peak is made of.
        snapshot: A file for PyTorch's memory viewer.
        no_weights: ``from_pretrained`` of a folder without weights gives random ones that take no memory.
        time: After the steps, a few more for the host's time, and one that is recorded.
        clock_step_ms: The script's own clocks say that a step takes so long; 0: they say what it takes here.
        clock_host_ms: Of it, the host's own time.
        plugins: Python files whose ``start(torch)`` is called too.
        context_mib: What the driver's context takes of each device.
        nccl_mib: What NCCL's buffers take, where there are ranks.
    """

    steps: int = 3
    ranks: int = 0
    rank: int = 0
    ranks_per_node: int = 8
    objects: str = ""
    sends_to: int = -1
    sends: int = 0
    history: bool = True
    snapshot: str = ""
    no_weights: bool = False
    time: bool = False
    clock_step_ms: float = 0.0
    clock_host_ms: float = 0.0
    plugins: tuple[str, ...] = ()
    context_mib: int = 0
    nccl_mib: int = 0

    @property
    def folder(self) -> Path:
        return Path(os.environ["STANDIN_SCRIPT"]).parent


@cache
def request() -> Request:
    given = json.loads(Path(os.environ["STANDIN_SCRIPT"]).read_text())
    return Request(**{field.name: given[field.name] for field in fields(Request) if field.name in given})

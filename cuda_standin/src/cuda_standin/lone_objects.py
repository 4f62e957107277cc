"""Python objects that ranks send one another, where one rank exists at a time: kept in a folder for the others' runs.

A stage of a pipeline tells the next one what its outputs look like. The run of each rank keeps what it sends; the run
of another rank finds it, or is told which rank has to run first.
"""

from __future__ import annotations

import pickle
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist


class LoneObjects:
    """``send_object_list`` and ``recv_object_list`` of rank ``rank``.

    Args:
        folder: Where objects are kept; None: nothing that another rank sends is ever there.
        sent: Called with the receiver and how many lists it has been sent, after each.
        missing: Called with the sender and how many lists it would have sent, before its absence is an error.
    """

    def __init__(
        self, rank: int, folder: Path | None = None, sent: Callable[[int, int], object] = lambda to, count: None,
        missing: Callable[[int, int], object] = lambda source, count: None,
    ) -> None:  # fmt: skip
        self._rank = rank
        self._folder = folder
        self._sent, self._missing = sent, missing
        self._counts: Counter[tuple[int, int]] = Counter()  # lists from a rank to a rank

    def send(self, object_list: Sequence[Any], dst: int | None = None, group: Any = None, device: Any = None,
             group_dst: int | None = None, *args: Any, **kwargs: Any) -> None:  # fmt: skip
        to = _global(dst, group, group_dst)
        path = self._next(self._rank, to)
        if path is not None:
            new = path.with_suffix(".new")
            new.write_bytes(pickle.dumps(list(object_list)))
            new.replace(path)
        self._sent(to, self._counts[self._rank, to])

    def receive(self, object_list: list[Any], src: int | None = None, group: Any = None, device: Any = None,
                group_src: int | None = None, *args: Any, **kwargs: Any) -> int:  # fmt: skip
        source = _global(src, group, group_src)
        path = self._next(source, self._rank)
        if path is None or not path.is_file():
            self._missing(source, self._counts[source, self._rank])
            raise RuntimeError(
                f"recv_object_list from rank {source}: that rank does not exist, and what it would send is not known.\n"
                "Give what it is asked for beforehand: PipelineStage takes input_args= and output_args=."
            )
        object_list[:] = pickle.loads(path.read_bytes())
        return source

    def _next(self, source: int, to: int) -> Path | None:
        self._counts[source, to] += 1
        return self._folder / f"{source}-{to}-{self._counts[source, to]}" if self._folder is not None else None


def _global(rank: int | None, group: Any, group_rank: int | None) -> int:
    if rank is None and group_rank is not None:
        return dist.get_global_rank(group or dist.group.WORLD, group_rank)
    return rank or 0

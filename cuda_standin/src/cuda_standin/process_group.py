"""One rank of N without the others: ``init_process_group("nccl")`` returns at once, and so does every collective.

PyTorch's own ``ProcessGroupNCCL`` runs on the stand-in's NCCL library (``csrc/nccl.cpp``), so streams, events, futures
and how long tensors are held are PyTorch's. Without ``install`` the same library joins real processes.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import importlib
import os
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from cuda_standin import lone_gloo
from cuda_standin.lone_objects import LoneObjects
from cuda_standin.lone_store import LoneStore


class Collective(NamedTuple):
    """How often a collective ran, and the bytes of one rank's part in all calls."""

    calls: int
    part_bytes: int


def _library() -> ctypes.CDLL:
    library = ctypes.CDLL("libnccl.so.2") if torch.version.cuda else None
    if library is None or not hasattr(library, "standin_nccl_alone"):
        loaded = "no CUDA build" if library is None else "another libnccl.so.2 than the stand-in's"
        raise RuntimeError(
            f"PyTorch {torch.__version__} has {loaded}, so ranks that do not exist cannot be stood in for.\n"
            "Run the Python of the stand-in's environment. A PyTorch that has NCCL linked into it, as some builds that "
            "are not from PyPI, cannot be used."
        )
    library.standin_nccl_name.restype = ctypes.c_char_p
    library.standin_nccl_calls.restype = library.standin_nccl_bytes.restype = ctypes.c_ulonglong
    return library


def collectives() -> dict[str, Collective]:
    """What NCCL was asked for since this process began, by name: ``all_gather``, ``reduce_scatter``, ``send``, ..."""
    library = _library()
    found: dict[str, Collective] = {}
    while name := library.standin_nccl_name(len(found)):
        kind = len(found)
        found[name.decode()] = Collective(library.standin_nccl_calls(kind), library.standin_nccl_bytes(kind))
    return found


class Installed:
    """What ``install`` changed; ``remove()`` puts it back."""

    def __init__(self) -> None:
        self._undo = contextlib.ExitStack()
        self.stores: list[LoneStore] = []

    def remove(self) -> None:
        """End the process group, and let later ones be real ones."""
        atexit.unregister(self.end_group)
        self.end_group()
        self._undo.close()

    def end_group(self) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()

    def _replace(self, owner: Any, name: str, new: Any) -> None:
        if hasattr(owner, name):
            self._undo.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, new)

    def _environ(self, name: str, value: object) -> None:
        before = os.environ.get(name)
        self._undo.callback(os.environ.pop if before is None else os.environ.__setitem__, name, before)  # type: ignore[arg-type]
        os.environ[name] = str(value)


def install(world_size: int = 8, rank: int = 0, objects: LoneObjects | None = None) -> Installed:
    """Make this process rank ``rank`` of ``world_size``, of which no other exists.

    Every other rank is taken to hold what this one holds: ``all_gather`` repeats this rank's part, a sum is
    ``world_size`` times it, an average is it, ``all_to_all`` gives what this rank would send to itself, from each.
    What a root that does not exist would send stays as it is; a receive gets what this rank sends in the same group
    of calls (a ring), else zeros; whole numbers (votes and counts) are what this rank last sent to that one, else
    ones. Objects of a root that does not exist stay what they are; those of a sender are what ``objects`` has of it,
    else they are refused.

    ``RANK``, ``WORLD_SIZE``, ``LOCAL_RANK``, ``LOCAL_WORLD_SIZE``, ``MASTER_ADDR`` and ``MASTER_PORT`` are set as a
    launcher does; the local ones go by the number of devices. Stores of PyTorch are kept in this process, and
    ``gloo`` groups follow the same rules (before PyTorch 2.14: sums are this rank's own).

    Raises:
        ValueError: ``rank`` is not below ``world_size``.
        RuntimeError: The NCCL library that is loaded is not the stand-in's, or a process group exists already.
    """
    if not 0 <= rank < world_size:
        raise ValueError(f"rank={rank} of world_size={world_size}: ranks go from 0 to world_size - 1.")
    if dist.is_initialized():
        raise RuntimeError("a process group exists already. Call install() before init_process_group().")
    library, done = _library(), Installed()
    objects = objects or LoneObjects(rank)

    devices = max(torch.cuda.device_count(), 1)

    def store(*args: Any, **kwargs: Any) -> LoneStore:
        # C++ calls methods of Python only as long as Python keeps the object.
        done.stores.append(LoneStore(world_size, before_communicator))
        return done.stores[-1]

    def before_communicator(key: str) -> None:
        library.standin_nccl_next_nodes(_nodes(_ranks_of_group(key, world_size), devices))

    def told(split: Any) -> Any:
        def split_group(self: Any, new_ranks: list[int], *args: Any, **kwargs: Any) -> Any:
            if self.rank() in new_ranks:
                library.standin_nccl_next_split(len(new_ranks), sorted(new_ranks).index(self.rank()))
                own = dist.get_process_group_ranks(self)
                library.standin_nccl_next_nodes(_nodes([own[rank] for rank in new_ranks], devices))
            return split(self, new_ranks, *args, **kwargs)

        return split_group

    def kept_where_absent(broadcast: Any) -> Any:
        def broadcast_object_list(object_list: list[Any], src: int | None = None, *args: Any, **kwargs: Any) -> None:
            if src in (None, rank):
                broadcast(object_list, src, *args, **kwargs)

        return broadcast_object_list

    for name, value in {
        "WORLD_SIZE": world_size, "RANK": rank, "LOCAL_RANK": rank % devices,
        "LOCAL_WORLD_SIZE": min(world_size, devices), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 29500,
        # It reads the store from a thread of its own, to hear of other ranks' errors.
        "TORCH_NCCL_ENABLE_MONITORING": 0,
    }.items():  # fmt: skip
        done._environ(name, value)
    library.standin_nccl_alone(1)
    done._undo.callback(library.standin_nccl_alone, 0)
    # torch.distributed.rendezvous is also the name of a function.
    for module in (dist, distributed_c10d, importlib.import_module("torch.distributed.rendezvous")):
        for name in ("TCPStore", "FileStore"):
            done._replace(module, name, store)
    done._replace(distributed_c10d, "_store_based_barrier", lambda *args, **kwargs: None)
    # Groups get communicators of their own: a split is what asks the other ranks. split_group says what it leads to.
    done._replace(distributed_c10d, "_get_split_source", lambda group: None)
    if hasattr(dist.ProcessGroup, "split_group"):
        done._replace(dist.ProcessGroup, "split_group", told(dist.ProcessGroup.split_group))
    done._replace(distributed_c10d, "ProcessGroupGloo", lone_gloo.LoneGloo)
    for module in (dist, distributed_c10d):
        done._replace(module, "broadcast_object_list", kept_where_absent(dist.broadcast_object_list))
        done._replace(module, "send_object_list", objects.send)
        done._replace(module, "recv_object_list", objects.receive)
    # NCCL's watchdog lets go of a step's tensors some 0.1 s later: in an interpreter that has ended, the process dies.
    atexit.register(done.end_group)
    return done


def _nodes(ranks: Iterable[int], ranks_per_node: int) -> int:
    """Machines that ``ranks`` are on."""
    return len({rank // ranks_per_node for rank in ranks})


def _ranks_of_group(key: str, world_size: int) -> Iterable[int]:
    """Of the group whose name is in ``key``, under which a communicator's id is stored: ``.../NAME//cuda//0``."""
    parts = [part for part in key.split("/") if part]
    for group, name in distributed_c10d._world.pg_names.items():
        if "cuda" in parts and parts[parts.index("cuda") - 1] == name:
            return distributed_c10d._world.pg_group_ranks.get(group) or range(world_size)
    return range(world_size)


@contextlib.contextmanager
def lone_rank(world_size: int = 8, rank: int = 0) -> Iterator[None]:
    """``install``, and ``remove`` at the end."""
    installed = install(world_size, rank)
    try:
        yield
    finally:
        installed.remove()

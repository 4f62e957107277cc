"""Waits, rounding rules and device guards of lowtide, each with the test that finds out when it is gone.

    python tests/accelerator/mutations.py [NUMBER ...]

Each is taken out of a copy of the sources, and its test has to fail there. ``test_mutations.py`` runs them all.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

TESTS = Path(__file__).parents[1]
SOURCES = TESTS.parent / "src"
TIMEOUT_S = 600


@dataclass(frozen=True)
class Mutation:
    """``old`` becomes ``new`` in ``file`` of the package; ``test`` is to fail then.

    Attributes:
        what: What is gone.
        test: A file of ``tests`` and what ``-k`` chooses of it.
    """

    what: str
    file: str
    old: str
    new: str
    test: tuple[str, str]


_TIER, _STREAMS, _MEMORY = "tape/offload/host_tier.py", "device/streams.py", "device/memory.py"
_GENERATORS, _NAMES = "device/generators.py", "device/names.py"


def _host(name: str) -> tuple[str, str]:
    return "accelerator/test_host_tier.py", name


def _steps(name: str) -> tuple[str, str]:
    return "accelerator/test_planned_steps.py", name


MUTATIONS = (
    Mutation(
        "a copy waits for the op that makes what it reads, and for who had the memory before",
        _TIER,
        "            stream.wait_stream(owner)\n",
        "",
        _host("memory_of_what_moved and late-early"),
    ),
    Mutation(
        "a store waits for the last fetch from its block",
        _TIER,
        "out.wait_event(self._block.last_read)",
        "pass",
        _host("fetch_for_another_stream"),
    ),
    Mutation(
        "the compute stream waits for the store before the memory is used again",
        _TIER,
        "            self._wait_for_store()\n",
        "            self._wait_for_store.detach()\n",
        _host("memory_of_what_moved and early-late"),
    ),
    Mutation(
        "the compute stream waits for the fetch before it reads",
        _TIER,
        "        self._wait_for_fetch()\n",
        "        self._wait_for_fetch.detach()\n",
        _host("memory_of_what_moved and early-late"),
    ),
    Mutation(
        "a store that nobody settles is waited for",
        _TIER,
        "weakref.finalize(self, _wait, self._device, owner, copied)",
        "weakref.finalize(HostCopy, _wait, self._device, owner, copied)",
        _host("nobody_settles and early-late"),
    ),
    Mutation(
        "a fetch that nobody wants is waited for",
        _TIER,
        "weakref.finalize(self, _wait, self._device, owner, copied)",
        "weakref.finalize(HostCopy, _wait, self._device, owner, copied)",
        _host("nobody_wants and early-late"),
    ),
    Mutation(
        "the event is of the stream that copies",
        _TIER,
        "copied.record(stream)",
        "copied.record(streams.new_stream(self._device))",
        _host("memory_of_what_moved and early-late"),
    ),
    Mutation(
        "memory to fetch into is of the compute stream",
        _TIER,
        "with hidden_from_modes():\n            self._buffer = ",
        "with hidden_from_modes(), streams.on_stream(back):\n            self._buffer = ",
        _host("step_whose_tensors_move and late-early and demand"),
    ),
    Mutation(
        "the device is put back after work on another stream",
        _STREAMS,
        "        torch.accelerator.set_device_index(device_before)\n",
        "",
        _host("second_device and late-early"),
    ),
    Mutation(
        "the stream is put back after work on another",
        _STREAMS,
        "        torch.accelerator.set_stream(before)\n",
        "",
        _host("memory_of_what_moved"),
    ),
    Mutation(
        "the stream is that of the device which is asked for",
        _STREAMS,
        "torch.accelerator.current_stream(index_of(device))",
        "torch.accelerator.current_stream()",
        _host("second_device or own_streams"),
    ),
    Mutation(
        "a block of the pool is free again when its copy dies",
        _TIER,
        "        weakref.finalize(self, tier.pool.free, self._block)\n",
        "",
        _host("share_a_pool and late-early"),
    ),
    Mutation(
        "the stream that memory belongs to waits for its copy, whoever asks for it",
        _TIER,
        "    owner.wait_event(event)\n",
        "",
        _host("several_streams"),
    ),
    Mutation(
        "a stream that asks for a copy waits for it, whoever has the memory",
        _TIER,
        "        current.wait_event(event)\n",
        "        pass\n",
        _host("several_streams"),
    ),
    Mutation(
        "the allocator knows of a stream that reads what was fetched into the memory of another",
        _TIER,
        "            buffer.record_stream(reader)\n",
        "            pass\n",
        _host("another_stream_reads"),
    ),
    Mutation(
        "a larger block takes the place of a smaller one",
        _TIER,
        "                        self._give_back(self._free[-1:])\n",
        "",
        _host("pool_for_several_shapes"),
    ),
    Mutation(
        "a smaller storage may have a larger block",
        _TIER,
        "if place < len(self._free) else None",
        "if self._free[place:] and self._free[place].size() == size else None",
        _host("pool_for_several_shapes"),
    ),
    Mutation(
        "memory is unpinned only after copies that still run",
        "device/pinning.py",
        "        synchronize_all()\n",
        "        pass\n",
        _host("registered_memory"),
    ),
    Mutation(
        "the pool has a limit",
        _TIER,
        "if self.pinned_bytes + size > self.budget_bytes:",
        "if False:",
        _host("no_room_in_a_full_pool"),
    ),
    Mutation(
        "pinned memory is the host's",
        "device/pinning.py",
        'device="cpu", pin_memory=True',
        "pin_memory=True",
        _host("pinned_is_in_host_memory"),
    ),
    Mutation(
        "memory that cannot be pinned is an error of the tier's own",
        "measurement/links.py",
        "except PinningError as error:",
        "except ZeroDivisionError as error:",
        _host("cannot_be_pinned_plans_without"),
    ),
    Mutation(
        "storages are in whole blocks",
        "device/block_size.py",
        "    return -(-size // block) * block",
        "    return size",
        _steps("random_numbers_and_peaks"),
    ),
    Mutation(
        "a block has 512 bytes",
        "device/block_size.py",
        "BLOCK_BYTES = 512",
        "BLOCK_BYTES = 256",
        _steps("random_numbers_and_peaks"),
    ),
    Mutation(
        "states of generators are in host memory",
        _GENERATORS,
        "return 0 if is_accelerator(device) else",
        "return",
        _steps("random_numbers_and_peaks"),
    ),
    Mutation(
        "a rehearsal puts generators of devices back",
        _GENERATORS,
        "kinds = {t.device.type for t in tensors if is_accelerator(t.device)}",
        "kinds = set()",
        _steps("leaves_the_generators"),
    ),
    Mutation(
        "the state is of the generator of the model's device",
        _GENERATORS,
        "get_rng_state(index_of(device))",
        "get_rng_state(0)",
        _steps("random_numbers_and_peaks"),
    ),
    Mutation(
        "the state is set in the generator of the model's device",
        _GENERATORS,
        "set_rng_state(state, index_of(device))",
        "set_rng_state(state, 0)",
        _steps("random_numbers_and_peaks"),
    ),
    Mutation(
        "a replay draws from the recorded state",
        _GENERATORS,
        "    now = state_of(device)\n    set_state(device, state)\n",
        "    now = state_of(device)\n",
        _steps("random_numbers_and_peaks"),
    ),
    Mutation(
        "after a replay the generator goes on where it was",
        _GENERATORS,
        "        set_state(device, now)\n",
        "        pass\n",
        _steps("random_numbers_and_peaks or watched_fit"),
    ),
    Mutation(
        "a number names the device, not the current one",
        _NAMES,
        "return torch.accelerator.current_device_index() if index is None else index",
        "return torch.accelerator.current_device_index()",
        _steps("random_numbers_and_peaks"),
    ),
    Mutation(
        "the users peak is given back",
        _MEMORY,
        "    if not is_accelerator(device):\n        return\n    index = index_of(device)\n    with _lock:",
        "    return\n    index = index_of(device)\n    with _lock:",
        _steps("users_peak"),
    ),
    Mutation(
        "what the allocator holds unused can be allocated",
        _MEMORY,
        "return free + held - ",
        "return free + 0 * held - ",
        _steps("held_unused"),
    ),
    Mutation(
        "a model on two devices is refused",
        "tracing/model_facts.py",
        "    if len(devices) > 1:",
        "    if False:",
        _steps("split_over_two"),
    ),
    Mutation(
        "memory that runs out while a plan is tried is answered with a smaller one",
        "training/rehearsal.py",
        "                    if group is not None or not is_out_of_memory(error):\n                        raise",
        "                    raise",
        ("api/test_rehearsal_memory.py", "after_the_last_rehearsal"),
    ),
    Mutation(
        "verify cuts the batch when memory runs out",
        "verifier.py",
        "                if not (is_out_of_memory(error) or isinstance(error, RehearsalMemoryError)):  # of measure\n"
        "                    raise",
        "                raise",
        _steps("verify_compares_fewer_rows"),
    ),
    Mutation(
        "one thread at a time takes pinned memory",
        _TIER,
        "        with self._lock:\n            self._collect_freed()\n            return self._take",
        "        with threading.Lock():\n            self._collect_freed()\n            return self._take",
        _host("two_threads"),
    ),
    Mutation(
        "what is left of a large block is not split off below 1 MiB",
        "simulation/caching_allocator.py",
        "rest > SMALL_BYTES",
        "rest >= BLOCK_BYTES",
        _steps("every_case_has_the_predicted_peak and decoder32"),
    ),
    Mutation(
        "a peak is measured from an allocator that has nothing cached",
        "side_by_side.py",
        "release = release_cached_memory if is_accelerator(self.device) else lambda: None",
        "release = lambda: None",
        _steps("weights_and_batches_in_large_blocks"),
    ),
)


def found(mutation: Mutation) -> tuple[bool, str]:
    """Whether the test fails without what the mutation takes away; and what pytest said last."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "src"
        shutil.copytree(SOURCES, copy, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
        path = copy / "lowtide" / mutation.file
        text = path.read_text()
        if text.count(mutation.old) != 1:
            raise ValueError(f"{mutation.file} has {text.count(mutation.old)} times {mutation.old!r}, not once")
        path.write_text(text.replace(mutation.old, mutation.new))
        file, chosen = mutation.test
        ours = [str(copy), str(TESTS), str(TESTS.parent / "benchmarks")]
        command = [sys.executable, "-m", "pytest", "-n", "0", "-q", "-x", "--tb=no", "-p", "no:cacheprovider"]
        done = subprocess.run(
            [*command, str(TESTS / file), "-k", chosen],
            env=os.environ | {"PYTHONPATH": os.pathsep.join(ours)},
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
        )
    # 1: a test failed. Killed by a signal counts too: a wrong address ends the process. 5 is "no tests".
    return done.returncode == 1 or done.returncode < 0, (done.stdout.strip().splitlines() or [done.stderr[-300:]])[-1]


def main() -> int:
    chosen = [int(argument) for argument in sys.argv[1:]] or range(len(MUTATIONS))
    missed = 0
    for number in chosen:
        seen, said = found(MUTATIONS[number])
        missed += not seen
        print(f"{number:3} {'found ' if seen else 'MISSED'} {MUTATIONS[number].what}: {said}", flush=True)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())

"""The planner's process: reads requests from standard input, a line each, and writes answers to standard output.

Run by ``planner_process.py`` as ``python -m lowtide.planning.planner_child``. It imports no torch. It ends when its
standard input ends, and when its parent is gone, whatever it computes at that moment.
"""

import os
import select
import signal
import sys
import threading
import traceback
from contextlib import suppress
from queue import SimpleQueue

NICENESS = 10  # On one busy core a training step beside it keeps nine tenths.
READY = "lowtide planner ready"  # its first line
_PARENT_POLL_MS = 2000
_CHUNK_BYTES = 1 << 20
_BY_THREAD = sys.platform == "linux"  # there each thread has a niceness of its own, and begins with its maker's


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the training script
    if not _BY_THREAD:
        os.nice(NICENESS)
    answers_to = os.dup(1)
    os.dup2(2, 1)  # what a library prints is no answer
    requests: SimpleQueue[bytes] = SimpleQueue()
    threading.Thread(target=_read_requests, args=(requests, os.getppid()), daemon=True).start()
    from lowtide.planning.plan_request import PlanRequest
    from lowtide.planning.worker import answers

    def work(request: bytes) -> None:
        try:
            for answer in answers(PlanRequest.from_json(request)):
                _write_line(answers_to, answer.to_json())
                _give_way()
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(1)  # as an error in the main thread does: else nobody would ever answer

    _write_line(answers_to, READY)
    while True:
        worker = threading.Thread(target=work, args=(requests.get(),))
        worker.start()
        worker.join()


def _give_way() -> None:
    """From here on this thread takes what training leaves.

    Not before the first answer: until it is there each step takes two to three times as long as under it, which is
    more than a share of one core.
    """
    with suppress(OSError):
        if _BY_THREAD:
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)


def _read_requests(requests: SimpleQueue[bytes], parent: int) -> None:
    """Put every line of standard input into ``requests``; end the process when there is nobody to answer."""
    # The input of a parent that was killed stays open in processes that it had forked.
    poll = select.poll()
    poll.register(0, select.POLLIN)
    line = bytearray()
    while os.getppid() == parent:
        if not poll.poll(_PARENT_POLL_MS):
            continue
        chunk = os.read(0, _CHUNK_BYTES)
        if not chunk:
            break
        *ends, rest = chunk.split(b"\n")
        for end in ends:
            requests.put(bytes(line + end))
            line.clear()
        line += rest
    os._exit(0)  # a solver that is at work would keep the process


def _write_line(fd: int, text: str) -> None:
    data = memoryview(text.encode() + b"\n")
    while data:
        data = data[os.write(fd, data) :]


if __name__ == "__main__":
    main()

"""Processes that the planner may have for its child: good ones, hanging ones, bad ones."""

import sys

import psutil

from lowtide.planning import planner_process
from lowtide.planning.planner_process import PlannerProcess

LIMIT_S = 120.0  # for what takes a second; a test that waits longer hangs
# The real child, but its search never ends.
NEVER_ENDS = """
import time
from lowtide.planning import worker as planning
planning.solve = lambda *args, **options: time.sleep(600)
from lowtide.planning.planner_child import main
main()
"""
# The real child, but after the first answer it seeks no better one.
STOPS_AT_FIRST = """
import time
from lowtide.planning import worker as planning
improving = planning.improving_plans
def first_only(*args):
    yield next(iter(improving(*args)))
    time.sleep(600)
planning.improving_plans = first_only
from lowtide.planning.planner_child import main
main()
"""
# The real child, but its work ends with an error.
FAILS_AT_WORK = """
from lowtide.planning import worker as planning
def fail(request):
    raise MemoryError("too little")
planning.answers = fail
from lowtide.planning.planner_child import main
main()
"""
ANSWERS_GARBAGE = """
from lowtide.planning.planner_child import READY
print(READY, flush=True)
input()
print('{"plan": 3}', flush=True)
input()
"""
# The real child, but its solver prints.
CHATTERS = """
import os
from lowtide.planning import worker as planning
solve = planning.solve
def chatter(*args, **options):
    print("print", flush=True)
    os.write(1, b"write")
    return solve(*args, **options)
planning.solve = chatter
from lowtide.planning.planner_child import main
main()
"""


def use_script(monkeypatch, script: str) -> None:
    monkeypatch.setattr(planner_process, "_command", lambda: [sys.executable, "-c", script])


def child_of(planner: PlannerProcess) -> psutil.Process:
    return psutil.Process(planner._service._child._process.pid)


def wait_for_end(process: psutil.Process) -> None:
    process.wait(LIMIT_S)

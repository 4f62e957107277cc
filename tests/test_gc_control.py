"""The garbage collector is off where it disturbs, and never behind another thread's back."""

import gc
import threading

from lowtide.gc_control import gc_disabled


def test_it_is_off_inside_and_as_before_afterwards():
    with gc_disabled():
        assert not gc.isenabled()
        with gc_disabled():
            assert not gc.isenabled()
        assert not gc.isenabled()
    assert gc.isenabled()


def test_a_thread_leaves_it_on_for_the_others():
    seen = []

    def work():
        with gc_disabled():
            seen.append(gc.isenabled())

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()

    assert seen == [True] and gc.isenabled()

"""Work beside the forward pass: the same results with a pool and without, nothing left running, what is waited for is told."""

import copy
import threading
import time

from kvstitch.allocators.retrieval.background import Background


def pool_threads():
    return [thread for thread in threading.enumerate() if thread.name.startswith("kvstitch")]


def test_results_do_not_depend_on_the_pool():
    for workers in (0, 2):
        background = Background(workers)
        background.open()
        jobs = [background.submit(lambda i=i: i * i) for i in range(20)]
        assert background.collect(jobs) == [i * i for i in range(20)]
        background.close()
        assert not pool_threads()


def test_a_job_that_was_dropped_is_done_when_asked():
    background = Background(1)
    background.open()
    gate = threading.Event()
    first = background.submit(lambda: gate.wait(5))
    queued = [background.submit(lambda i=i: i) for i in range(3)]
    threading.Timer(0.05, gate.set).start()
    background.close()
    assert not pool_threads()
    assert background.collect([first, *queued]) == [True, 0, 1, 2]


def test_a_job_that_has_not_begun_is_done_by_whoever_asks():
    background = Background(1)
    background.open()
    gate = threading.Event()
    background.submit(gate.wait)
    by = background.submit(threading.get_ident)
    assert by.result() == threading.get_ident()
    gate.set()
    background.close()


def test_cancelled_work_is_not_done_twice():
    calls = []
    background = Background(0)
    job = background.submit(lambda: calls.append(1))
    job.cancel()
    job.result()
    job.result()
    assert calls == [1]


def test_held_work_begins_when_it_is_released_or_asked_for():
    background = Background(1)
    background.open()
    with background.holding(True):
        dropped, released = (background.submit(threading.get_ident) for _ in range(2))
    with background.holding(True):
        asked = background.submit(threading.get_ident)
    # Nobody wants it any more.
    del dropped
    assert len(background._held) == 2
    assert background.collect([asked, background.submit(lambda: 3)])[1] == 3
    background.release()
    assert not background._held and released._future is not None
    released.result()
    background.close()


def test_work_goes_on_in_the_pool_of_whoever_collects_it():
    """What the last pool dropped or never had begins in this one, several at once."""
    first, second = Background(1), Background(2)
    first.open()
    second.open()
    gate, together = threading.Event(), threading.Barrier(2)
    running = first.submit(gate.wait)
    queued = first.submit(lambda: together.wait(5) >= 0)
    with first.holding(True):
        held = first.submit(lambda: together.wait(5) >= 0)
    threading.Timer(0.05, gate.set).start()
    first.close()
    assert second.collect([running, queued, held]) == [True] * 3
    second.close()
    assert not pool_threads()


def test_work_and_waiting_are_told():
    def work():
        end = time.thread_time() + 0.02
        while time.thread_time() < end:
            pass

    background = Background(0)
    background.collect([background.submit(work)])
    assert background.busy_seconds >= 0.02 and background.exposed_seconds >= 0.02


def test_copies_share_pool_and_work():
    background = Background(0)
    job = background.submit(lambda: 3)
    assert copy.deepcopy(background) is background and copy.deepcopy([job])[0] is job

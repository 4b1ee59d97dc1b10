"""Locks of encoders around a fork: a child can take each, and a fork waits, but not for ever."""

from __future__ import annotations

import gc
import os
import threading
import time

import pytest

from saccade.encoders import locks

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork"),
    pytest.mark.filterwarnings("ignore:This process:DeprecationWarning"),
]


def status_of_child(work):
    """The exit status of a child that runs a function; 9 if it hangs."""
    child = os.fork()
    if child == 0:
        try:
            os._exit(0 if work() else 1)
        finally:
            os._exit(2)
    ends = time.monotonic() + 20
    while time.monotonic() < ends:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return status
        time.sleep(0.01)
    os.kill(child, 9)
    return os.waitpid(child, 0)[1]


def is_free(lock):
    """Whether another thread can take a lock."""
    found = []

    def take():
        found.append(lock.acquire(timeout=1))

    thread = threading.Thread(target=take)
    thread.start()
    thread.join()
    return found == [True]


def held(lock, seconds):
    """A thread that holds a lock for so long."""
    taken = threading.Event()

    def hold():
        with lock:
            taken.set()
            time.sleep(seconds)

    thread = threading.Thread(target=hold)
    thread.start()
    assert taken.wait(10)
    return thread


def test_a_lock_that_another_thread_holds_is_free_in_the_child():
    lock, other = locks.lock(), locks.lock()
    thread = held(lock, 0.3)
    assert status_of_child(lambda: is_free(lock) and is_free(other)) == 0
    thread.join()
    assert is_free(lock)
    assert is_free(other)


def test_a_fork_inside_of_the_lock_leaves_it_to_both():
    lock = locks.lock()
    with lock:
        assert status_of_child(lambda: not is_free(lock)) == 0
        assert not is_free(lock)
    assert is_free(lock)


def test_a_fork_does_not_wait_for_ever(monkeypatch):
    monkeypatch.setattr(locks, "_PATIENCE", 0.05)
    lock, other = locks.lock(), locks.lock()
    thread = held(lock, 2)
    began = time.monotonic()
    assert status_of_child(lambda: is_free(other)) == 0
    assert time.monotonic() - began < 2
    thread.join()
    assert is_free(lock)


def test_two_threads_fork_at_once():
    every = [locks.lock() for _ in range(20)]
    found = []

    def fork():
        found.append(status_of_child(lambda: is_free(every[0])))

    threads = [threading.Thread(target=fork) for _ in range(4)]
    for x in threads:
        x.start()
    for x in threads:
        x.join()
    assert found == [0] * 4
    assert all(map(is_free, every))


def test_a_lock_lives_as_long_as_its_owner():
    gc.collect()
    before = len(locks._locks)
    lock = locks.lock()
    assert len(locks._locks) == before + 1
    del lock
    assert len(locks._locks) == before

"""The thread that tokenises is ahead, keeps the order, and ends with what reads it."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace

import pytest

from saccade.encoders.tokens import _AHEAD, Tokens, ahead


def threads():
    return [x for x in threading.enumerate() if x.name.startswith("saccade-tokens")]


def test_order_and_end():
    assert list(ahead(lambda x: x * x, range(20))) == [x * x for x in range(20)]
    assert list(ahead(str, [])) == []
    assert not threads()


def test_it_is_a_few_items_ahead():
    taken = []

    def items():
        for i in range(50):
            taken.append(i)
            yield i

    found = ahead(lambda x: x, items())
    assert next(found) == 0
    assert len(taken) <= _AHEAD + 1
    found.close()
    assert not threads()


def test_an_exception_travels():
    found = ahead(lambda x: 1 // (3 - x), range(50))
    assert [next(found) for _ in range(3)] == [0, 0, 1]
    with pytest.raises(ZeroDivisionError):
        next(found)
    assert not threads()


def test_closing_waits_for_the_item_in_work_alone():
    done = []

    def work(x):
        time.sleep(0.02)
        done.append(x)

    found = ahead(work, range(50))
    next(found)
    found.close()
    assert not threads()
    assert len(done) <= _AHEAD + 1


@pytest.mark.parametrize(("error", "raised"), [(Exception("custom"), "NotCopied"), (ValueError("custom"), "ValueError")])
def test_errors_of_rust_alone_are_taken_for_such(monkeypatch, error, raised):
    def fails(*given):
        raise error

    monkeypatch.setattr("saccade.encoders.tokens._fingerprint", fails)
    made = SimpleNamespace(model_input_names=())
    with pytest.raises(Exception, match="custom") as found:
        Tokens(made, False).copy(None)
    assert type(found.value).__name__ == raised

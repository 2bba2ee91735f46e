"""Timing of single steps."""

from types import SimpleNamespace

import pytest
import torch

from kvstitch.evaluation import streams
from kvstitch.evaluation.streams import Stream


@pytest.mark.parametrize("event_at", [0, 1, 3, None])
def test_events_are_taken_off_only_where_they_were_timed(monkeypatch, event_at):
    """Each forward takes a second, an event five more; the first forward is not timed, whatever it does."""
    clock = {"now": 0.0, "events": 0.0, "steps": 0}
    monkeypatch.setattr(streams, "now", lambda device: clock["now"])

    class Model:
        device = torch.device("cpu")

        def __call__(self, **_):
            if clock["steps"] == event_at:
                clock["events"] += 5
                clock["now"] += 5
            clock["steps"] += 1
            clock["now"] += 1
            return SimpleNamespace(logits=torch.zeros(1, 1, 7))

    stream = Stream.__new__(Stream)
    stream.model, stream.cache, stream._last = Model(), None, torch.zeros(7)
    assert stream.time_steps(3, lambda: clock["events"]) == 3.0
    assert clock["steps"] == 4

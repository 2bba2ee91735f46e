"""Every tensor that is aligned with slots, against a simulation that knows tokens by name and no slots at all."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import pytest
import torch
from transformers import DynamicCache

from kvstitch.allocators import CommunityQuota, EvictingAllocator, HeadAdaptive, SegmentQuota
from kvstitch.allocators.evidence import Evidence
from kvstitch.presses import EvictionPress
from kvstitch.scorers import TOVA
from kvstitch.views import QueryWindow

FEW = dict(num_sinks=1, num_recent=2)
ALLOCATORS = {
    "segments": SegmentQuota(
        **FEW, min_segment_tokens=2, max_segment_tokens=8, window_tokens=4, window_step=1, credit_mix=0.5
    ),
    "communities": CommunityQuota(**FEW, window_tokens=6, top_k=2, target_tokens=3, run_tokens=3, min_mean_tokens=1),
    "ragged": HeadAdaptive(**FEW),
    "mask": HeadAdaptive(**FEW, mode="mask"),
}
BUDGET = 14


@dataclass(frozen=True)
class Watched(EvictingAllocator):
    """Does what another allocator does and writes down what it was given and what it gave."""

    inner: EvictingAllocator
    log: list = field(default_factory=list, compare=False)
    num_sinks: int = 1
    num_recent: int = 2

    @property
    def needs(self):
        return self.inner.needs

    def allocate(self, view, scores, keep, state):
        raise NotImplementedError("a press asks for all layers together")

    def allocate_layers(self, views, scores, keeps, states: Sequence[dict]):
        selections = self.inner.allocate_layers(views, scores, keeps, states)
        for view, keep, state, selection in zip(views, keeps, states, selections):
            # A view is the cache itself, which goes on; keys are compacted into new storage, queries are overwritten.
            queries = view.queries and QueryWindow(view.queries.rotated.clone(), view.queries.positions.clone())
            kept = replace(view, queries=queries)
            self.log.append(("event", view.layer_idx, kept, keep, dict(state), selection))
        return selections


@dataclass
class Head:
    """One kv head of one row of one layer. A token's name is its column in the sequence, padding included.

    Args:
        order: names in the order of slots, None for a slot that no token has.
        seen: names that may be attended to.
        state: what the allocator gave each token, by name of the tensor.
        keys: key of each token when it was first met.
    """

    order: list = field(default_factory=list)
    seen: set = field(default_factory=set)
    state: dict = field(default_factory=dict)
    keys: dict = field(default_factory=dict)

    def copy(self):
        return Head(list(self.order), set(self.seen), {n: dict(v) for n, v in self.state.items()}, dict(self.keys))


class Simulation:
    """Heads `[layer][row][head]`, moved by the log of a run; every event is compared before and after."""

    def __init__(self, layers: int, padding: list[int], heads: int):
        self.padding = padding
        self.heads = [[[Head() for _ in range(heads)] for _ in padding] for _ in range(layers)]
        self.arrived = [0] * layers
        self.events = [0] * layers

    def play(self, log):
        for kind, *entry in log:
            if kind == "reorder":
                self.heads = [[[head.copy() for head in layer[row]] for row in entry[0]] for layer in self.heads]
                self.padding = [self.padding[row] for row in entry[0]]
            else:
                self.event(*entry)

    def event(self, index, view, keep, state, selection):
        new = view.positions.shape[2] - len(self.heads[index][0][0].order)
        names = range(self.arrived[index], self.arrived[index] + new)
        self.arrived[index] += new
        self.events[index] += 1
        for row, heads in enumerate(self.heads[index]):
            for number, head in enumerate(heads):
                head.order += names
                head.seen |= {name for name in names if name >= self.padding[row]}
                self.compare(head, row, number, view, state)
                self.keep(head, row, number, selection)
        width = max(len(head.order) for heads in self.heads[index] for head in heads)
        for heads in self.heads[index]:
            for head in heads:
                head.order += [None] * (width - len(head.order))

    def compare(self, head, row, number, view, state):
        """The view shows the tokens that are there, with their keys and with the state that each was given."""
        padding = self.padding[row]
        assert view.positions[row, number].tolist() == [n - padding if n in head.seen else -1 for n in head.order]
        assert view.valid[row, number].tolist() == [n in head.seen for n in head.order]
        for slot, name in enumerate(head.order):
            if name in head.seen:
                key = view.keys[row, number, slot].tolist()
                assert head.keys.setdefault(name, key) == key, f"token {name} has another's key"
        assert state.keys() == head.state.keys()
        for kind, tensor in state.items():
            carried = tensor[row, number].tolist()
            for slot, value in enumerate(carried):
                name = head.order[slot]
                if name is not None:
                    assert value == head.state[kind][name], f"{kind} of token {name}"
            known = [name for name in head.order[len(carried) :] if name in head.state[kind]]
            assert not known, "slots without state are those that came since"

    def keep(self, head, row, number, selection):
        slots = [slot for slot in selection.slots[row, number].tolist() if slot >= 0]
        head.state = {
            kind: dict(zip((head.order[slot] for slot in slots), tensor[row, number].tolist()))
            for kind, tensor in selection.state.items()
        }
        kept = [head.order[slot] for slot in slots]
        hidden = selection.hidden
        gone = [] if hidden is None else [n for n, h in zip(kept, hidden[row, number].tolist()) if h]
        head.seen = (head.seen & set(kept)) - set(gone)
        head.order = kept


def generate(model, press, ids, mask, **options):
    with press(model):
        return model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=26, do_sample=False, **options)


@pytest.fixture
def watched(monkeypatch):
    """`watched(name)` -> a press of that allocator and the log of its events and of the beams' changes of place."""

    def make(name):
        allocator = Watched(ALLOCATORS[name])
        move = DynamicCache.reorder_cache

        def reorder(cache, beams):
            allocator.log.append(("reorder", beams.tolist()))
            move(cache, beams)

        monkeypatch.setattr(DynamicCache, "reorder_cache", reorder)
        return EvictionPress(TOVA(share="group"), allocator, BUDGET, interval=5, compress_prompt=True), allocator.log

    return make


@pytest.mark.parametrize("name", ALLOCATORS)
def test_rows_and_heads_keep_what_is_theirs(llama, left_padded, watched, name):
    press, log = watched(name)
    ids, mask, _ = left_padded([24, 19])
    generate(llama, press, ids, mask)
    simulation = Simulation(layers=4, padding=[0, 5], heads=2)
    simulation.play(log)
    assert min(simulation.events) >= 5
    # Heads parted, or a mix-up of heads would not show.
    assert all(layer[0][0].order != layer[0][1].order or name == "mask" for layer in simulation.heads)
    assert all(layer[0][0].seen != layer[0][1].seen for layer in simulation.heads)


@pytest.mark.parametrize("name", ALLOCATORS)
def test_beams_keep_what_is_theirs(llama, random_tokens, watched, name):
    press, log = watched(name)
    ids = random_tokens(2, 24, seed=3)
    generate(llama, press, ids, torch.ones_like(ids), num_beams=3)
    assert any(kind == "reorder" and entry[0] != list(range(6)) for kind, *entry in log)
    simulation = Simulation(layers=4, padding=[0] * 6, heads=2)
    simulation.play(log)
    assert min(simulation.events) >= 5


def test_credit_is_each_tokens_own_history(llama, left_padded, watched):
    """decay * old + (1 - decay) * mass, kept by token in Python floats over all events."""
    press, log = watched("segments")
    ids, mask, _ = left_padded([24, 19])
    generate(llama, press, ids, mask)
    segments = press.allocator.inner
    options = {name: getattr(segments, name) for name in Evidence.__dataclass_fields__}
    history = {}
    for _, index, view, keep, _, selection in log:
        usage = Evidence(**options).of_layers([view], view.valid, keep)
        for row in range(2):
            for head in range(2):
                owner = index, row, head
                names = view.positions[row, head].tolist()
                used = {n: max(u, 0.0) + 1e-12 for n, u in zip(names, usage[row, head].tolist()) if n >= 0}
                total = sum(used.values())
                old = history.get(owner, {})
                new = {
                    n: segments.credit_decay * old.get(n, 0.0) + (1 - segments.credit_decay) * u / total
                    for n, u in used.items()
                }
                slots = [slot for slot in selection.slots[row, head].tolist() if slot >= 0]
                assert len(slots) == BUDGET
                history[owner] = {names[slot]: new[names[slot]] for slot in slots}
                expected = torch.tensor([new[names[slot]] for slot in slots])
                torch.testing.assert_close(selection.state["credit"][row, head], expected, atol=1e-7, rtol=1e-5)
    assert len(log) >= 4 * 5

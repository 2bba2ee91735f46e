"""Uses that nobody plans: caches from elsewhere, copies, other modes, models without a head, allocators that err."""

import copy
import warnings

import pytest
import torch
from transformers import DynamicCache

from kvstitch.allocators import EvictingAllocator, GlobalTopK, Pyramid, SegmentQuota, Selection
from kvstitch.presses import EvictionPress, RetrievalPress
from kvstitch.presses.cache import Request, StitchLayer
from kvstitch.presses.versions import chunks_are_right
from kvstitch.scorers import TOVA, KeyDiff, SnapKV, TriAttention

TOPK = GlobalTopK(num_sinks=1, num_recent=1)


def feed(model, ids, cache, mask=None, positions=None):
    with torch.no_grad():
        return model(ids, attention_mask=mask, position_ids=positions, past_key_values=cache, use_cache=True).logits


def test_a_padded_cache_filled_before_the_press_keeps_its_padding(llama, random_tokens):
    ids, mask = random_tokens(2, 24), torch.ones(2, 24, dtype=torch.int64)
    mask[1, :13] = 0
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    dense, cache = DynamicCache(config=llama.config), DynamicCache(config=llama.config)
    for target in (dense, cache):
        feed(llama, ids[:, :20], target, mask[:, :20], positions[:, :20])
    with EvictionPress(KeyDiff(), TOPK, 500)(llama) as run:
        for stop in range(21, 25):
            new = slice(stop - 1, stop)
            expected = None
            with run.paused():
                expected = feed(llama, ids[:, new], dense, mask[:, :stop], positions[:, new])
            got = feed(llama, ids[:, new], cache, mask[:, :stop])
            assert (got - expected).abs().max() < 1e-4
        assert run.positions(0)[1, 0].tolist() == [-1] * 13 + list(range(11))


class Recorder:
    def __init__(self):
        self.events = []

    def note(self, event):
        self.events.append(event)


@pytest.mark.parametrize("scorer", [TOVA(), TriAttention()])
def test_a_copied_cache_stays_with_a_press_that_somebody_watches(llama, random_tokens, scorer):
    recorder, ids = Recorder(), random_tokens(1, 60)
    press = EvictionPress(scorer, SegmentQuota(num_recent=2), 24, interval=8, on_event=recorder.note)
    with press(llama):
        cache = DynamicCache(config=llama.config)
        feed(llama, ids[:, :30], cache)
        for i in range(30, 44):
            feed(llama, ids[:, i : i + 1], cache)
        twin = copy.deepcopy(cache)
        for i in range(44, 60):
            assert torch.equal(feed(llama, ids[:, i : i + 1], cache), feed(llama, ids[:, i : i + 1], twin))
    assert len(recorder.events) >= 3


@pytest.mark.parametrize("scorer", [TOVA(), SnapKV(), TriAttention()])
@pytest.mark.parametrize("from_press", [True, False])
def test_a_cache_that_brings_no_queries_waits_for_them(llama, random_tokens, scorer, from_press):
    ids, cache = random_tokens(1, 60), DynamicCache(config=llama.config)
    if from_press:
        with EvictionPress(KeyDiff(), TOPK, 20, interval=100)(llama):
            feed(llama, ids[:, :10], cache)
            for i in range(10, 40):
                feed(llama, ids[:, i : i + 1], cache)
    else:
        feed(llama, ids[:, :40], cache)
    with EvictionPress(scorer, TOPK, 20, interval=8, compress_prompt=True)(llama) as run:
        for i in range(40, 60):
            feed(llama, ids[:, i : i + 1], cache)
    assert run.num_events >= 1 and run.stored_tokens[0] <= 28


@pytest.mark.parametrize("allocator", [TOPK, SegmentQuota(num_sinks=1, num_recent=2)], ids=["topk", "ams"])
@pytest.mark.parametrize("compress_prompt", [False, True])
def test_a_cache_filled_in_inference_mode_goes_on_outside(llama, random_tokens, allocator, compress_prompt):
    """An event makes new storage, the remembered queries stay what they were."""
    ids = random_tokens(1, 50)
    logits = []
    for inside in (True, False):
        cache = DynamicCache(config=llama.config)
        with EvictionPress(TOVA(), allocator, 16, interval=6, compress_prompt=compress_prompt)(llama):
            if inside:
                with torch.inference_mode():
                    llama(ids[:, :30], past_key_values=cache, use_cache=True)
            else:
                feed(llama, ids[:, :30], cache)
            logits.append([feed(llama, ids[:, i : i + 1], cache) for i in range(30, 50)])
    assert torch.equal(torch.cat(logits[0]), torch.cat(logits[1]))


def test_a_model_without_a_head(llama, random_tokens):
    base, ids = llama.model, random_tokens(1, 40)
    before = base.config._attn_implementation
    with EvictionPress(KeyDiff(), TOPK, 16, interval=6)(base) as run, torch.no_grad():
        cache = base(ids[:, :30], use_cache=True).past_key_values
        for i in range(30, 40):
            base(ids[:, i : i + 1], past_key_values=cache)
    assert run.num_events >= 1 and base.config._attn_implementation == before and not base._forward_pre_hooks


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda model: model.set_attn_implementation("eager"), "set to 'eager' inside the block"),
        (lambda model: model.train(), "training mode inside the block"),
    ],
)
def test_changes_inside_the_block_are_named(llama, random_tokens, change, message):
    with EvictionPress(KeyDiff(), TOPK, 16)(llama):
        feed(llama, random_tokens(1, 12), None)
        change(llama)
        with pytest.raises(RuntimeError, match=message):
            feed(llama, random_tokens(1, 12), None)


def test_a_row_of_a_pyramid_is_its_own_single_run(llama, random_tokens):
    ids, lengths = random_tokens(2, 42), (30, 14)
    mask = torch.ones(2, 42, dtype=torch.int64)
    mask[1, :16] = 0
    press = EvictionPress(KeyDiff(), Pyramid(allocator=TOPK), 20, interval=4)
    outputs = []
    for row in (None, 0, 1):
        cache, logits = DynamicCache(config=llama.config), []
        start = 0 if row is None else 30 - lengths[row]
        rows = slice(None) if row is None else slice(row, row + 1)
        with press(llama):
            feed(llama, ids[rows, start:30], cache, mask[rows, start:30])
            for i in range(30, 42):
                logits.append(feed(llama, ids[rows, i : i + 1], cache, mask[rows, start : i + 1]))
        outputs.append(torch.cat(logits, 1))
    for row in (0, 1):
        assert (outputs[0][row] - outputs[row + 1][0]).abs().max() < 1e-4


def test_compaction_and_positions_after_a_reset_say_that_nothing_ran(llama, random_tokens):
    with EvictionPress(KeyDiff(), TOPK, 8)(llama) as run:
        cache = DynamicCache(config=llama.config)
        feed(llama, random_tokens(1, 20), cache)
        cache.reset()
        for call in (run.compact, lambda: run.positions(0)):
            with pytest.raises(RuntimeError, match="nothing has run"):
                call()


@pytest.mark.parametrize("wrong", [[3, 1, 2], [1, 1, 2], [0, 1, 99], [-7, 1, 2], [0, -1, 2], [-1, -1, -1]])
def test_an_allocator_that_errs_is_named_before_anything_is_lost(llama, random_tokens, wrong):
    class Erring(EvictingAllocator):
        num_sinks = num_recent = 0

        def allocate(self, view, scores, keep, state):
            return Selection(torch.tensor(wrong).expand(*scores.shape[:2], 3).clone())

    with EvictionPress(KeyDiff(), Erring(), 8, interval=4)(llama) as run:
        cache = DynamicCache(config=llama.config)
        feed(llama, random_tokens(1, 20), cache)
        reason = "kept no slot in any head" if max(wrong) < 0 else "returned slots that are not unique and ascending"
        with pytest.raises(ValueError, match=f"Erring {reason}"):
            run.compact()
        assert run.stored_tokens == [20] * 4


def test_a_permutation_does_not_move_the_next_position():
    layer = StitchLayer(Request(), growth_tokens=8)
    layer.update(torch.ones(1, 2, 6, 4), torch.ones(1, 2, 6, 4))
    layer.keep(torch.tensor([5, 4, 3, 2, 1, 0]).expand(1, 2, 6))
    layer.keep(torch.tensor([5, 4, 3, 2, 1, 0]).expand(1, 2, 6))
    layer.evicted_at = 0
    layer.crop(-2)
    assert layer.next_position().tolist() == [4]


def test_tokens_outside_the_press_continue_each_row(llama, random_tokens):
    ids, mask = random_tokens(2, 22), torch.ones(2, 22, dtype=torch.int64)
    mask[1, :5] = 0
    with EvictionPress(KeyDiff(), TOPK, 500)(llama) as run:
        cache = DynamicCache(config=llama.config)
        feed(llama, ids[:, :20], cache, mask[:, :20])
        with run.paused():
            feed(llama, ids[:, 20:21], cache, mask[:, :21], torch.tensor([[20], [15]]))
        assert run.positions(0)[:, 0, -1].tolist() == [20, 15]


def test_a_retrieval_press_is_not_disturbed(llama, random_tokens):
    from kvstitch.allocators import WindowRetrieval

    ids = random_tokens(1, 40)
    with RetrievalPress(WindowRetrieval(), 14, num_sinks=2, num_recent=4)(llama) as run:
        cache = DynamicCache(config=llama.config)
        with torch.inference_mode():
            llama(ids[:, :30], past_key_values=cache, use_cache=True)
        for i in range(30, 40):
            feed(llama, ids[:, i : i + 1], cache)
    assert run.num_sparse_steps == 10


@pytest.mark.parametrize("start, step", [(1000, 1), (0, 3)])
def test_a_fraction_is_of_tokens_whatever_their_positions(llama, random_tokens, start, step):
    ids, cache = random_tokens(1, 48), DynamicCache(config=llama.config)
    positions = start + step * torch.arange(48)[None]
    with EvictionPress(KeyDiff(), TOPK, 0.25, interval=8)(llama) as run:
        feed(llama, ids[:, :39], cache, None, positions[:, :39])
        for i in range(39, 48):
            feed(llama, ids[:, i : i + 1], cache, None, positions[:, i : i + 1])
    assert [event.layers[0].slots_after for event in run.events] == [47 // 4]


def test_padding_is_counted_through_beams_and_roll_back():
    request = Request()
    layer = StitchLayer(request, growth_tokens=8)
    request.positions = torch.tensor([[-1, -1, 0, 1, 2], [0, 1, 2, -1, -1]])
    request.has_padding = request.announced = True
    layer.update(torch.ones(2, 1, 5, 4), torch.ones(2, 1, 5, 4))
    assert layer.row_tokens().tolist() == [3, 3]
    layer.reorder_cache(torch.tensor([1, 0]))
    layer.crop(-1)
    assert layer.row_tokens().tolist() == [3, 2]


@pytest.mark.parametrize("chunk", [8, 16, 32])
def test_chunks_of_generate_are_the_whole_prompt(model, left_padded, chunk):
    """Padded rows, and a last chunk of one token, which ends the prompt and is no decoded token."""
    ids, mask, _ = left_padded([33, 20])
    press = EvictionPress(KeyDiff(), TOPK, 12, interval=4, compress_prompt=True)
    options = dict(attention_mask=mask, max_new_tokens=12, do_sample=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with press(model) as run:
            whole = model.generate(ids, **options)
            events = [(event.reason, event.seen_tokens) for event in run.events]
        with press(model) as run:
            if run._facts.num_sliding_layers and not chunks_are_right(model):
                with pytest.raises(NotImplementedError, match="sliding-window layers wrongly; feed the chunks"):
                    model.generate(ids, prefill_chunk_size=chunk, **options)
                return
            assert torch.equal(model.generate(ids, prefill_chunk_size=chunk, **options), whole)
            assert [(event.reason, event.seen_tokens) for event in run.events] == events


def test_positions_of_the_users_own_are_kept_in_chunks(llama, random_tokens):
    """Only the numbers that `generate` made up itself are replaced."""
    ids = random_tokens(1, 20)
    options = dict(attention_mask=torch.ones_like(ids), max_new_tokens=5, do_sample=False)
    positions = torch.arange(7, 27)[None]
    with EvictionPress(KeyDiff(), TOPK, 12, interval=50)(llama) as run:
        if not chunks_are_right(llama):
            with pytest.raises(NotImplementedError, match="the last of your position_ids"):
                llama.generate(ids, position_ids=positions, prefill_chunk_size=8, **options)
            return
        llama.generate(ids, position_ids=positions, prefill_chunk_size=8, **options)
        assert run.positions(0)[0, 0, :20].tolist() == positions[0].tolist()


def test_attention_weights_are_refused(llama, random_tokens):
    ids = random_tokens(1, 12)
    with EvictionPress(KeyDiff(), TOPK, 12)(llama):
        with pytest.raises(NotImplementedError, match="output_attentions"):
            llama.generate(ids, max_new_tokens=2, output_attentions=True, return_dict_in_generate=True)
        with pytest.raises(NotImplementedError, match="output_attentions"), torch.no_grad():
            llama(ids, output_attentions=True)


@pytest.mark.parametrize(
    "allocator", [SegmentQuota(window_tokens=16, window_step=4), SegmentQuota(window_tokens=8, window_step=1)]
)
def test_position_ids_that_the_caller_counts_up_in_place(llama, random_tokens, allocator):
    """Layers hold on to the positions of a forward; what the caller does to its tensor later is not theirs."""
    ids, kept = random_tokens(1, 60), []
    for in_place in (False, True):
        positions, cache = torch.zeros(1, 1, dtype=torch.int64), DynamicCache(config=llama.config)
        with EvictionPress(SnapKV(window_size=4), allocator, 44, interval=8)(llama) as run:
            for step in range(60):
                feed(llama, ids[:, step : step + 1], cache, positions=positions if in_place else positions + step)
                if in_place:
                    positions += 1
            assert run.num_events > 1
            kept.append([run.positions(layer) for layer in run.layers])
    assert all(torch.equal(one, other) for one, other in zip(*kept))

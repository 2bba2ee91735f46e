"""Triton kernel that plans an event of mass segments, one program a head, and its launcher.

Steps and formulas are those of the torch path (`mass.py`, `segments.py`, `quotas.py`); where that one keeps shapes
fixed to stay parallel, a program walks from segment to segment, since heads are what runs side by side here.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvstitch.kernels.common.tiling import next_power_of_two
from kvstitch.kernels.segment_quota.mass import mix_mass
from kvstitch.kernels.segment_quota.reference import SegmentPlan
from kvstitch.kernels.segment_quota.rules import SegmentRules
from kvstitch.kernels.segment_quota.segments import num_thresholds
from kvstitch.kernels.segment_quota.triton_quotas import public_quotas, water_fill


@triton.jit
def _present(valid, i_bh, o_t, num_slots, HAS_VALID: tl.constexpr):
    b_present = o_t < num_slots
    if HAS_VALID:
        b_present = tl.load(valid + i_bh * num_slots + o_t, mask=b_present, other=0) != 0
    return b_present


@triton.jit
def _evidence(usage, i_bh, o_t, num_slots):
    b_now = tl.load(usage + i_bh * num_slots + o_t, mask=o_t < num_slots, other=0.0).to(tl.float64)
    return tl.where((b_now > 0) & (b_now < float("inf")), b_now, 0.0)


@triton.jit
def _shares(b_x, b_present, total):
    """As `mass._normalise_` with the total of the head, which is 0 only where nothing is present."""
    return tl.where(b_present, b_x + 1e-12, 0.0) / tl.where(total > 0, total, 1.0)


@triton.jit
def _raw_total(b_x, b_present):
    """What a tile adds to the total: its last running sum, in slot order, as the torch path adds."""
    b_running = tl.cumsum(tl.where(b_present, b_x + 1e-12, 0.0), 0)
    return tl.sum(tl.where(tl.arange(0, b_x.shape[0]) == b_x.shape[0] - 1, b_running, 0.0), 0)


@triton.jit
def _update_credit(
    b_now, credit, i_bh, o_t, known, HAS_HISTORY: tl.constexpr, DECAY: tl.constexpr, NEW_IS_MASS: tl.constexpr
):
    """As `mass._update_credit`."""
    b_updated = b_now * (1 - DECAY)
    m_known = o_t < known
    if NEW_IS_MASS:
        b_updated = tl.where(m_known, b_updated, b_now)
    if HAS_HISTORY:
        # The product rounds in the credit's own dtype, as in the torch path.
        b_old = tl.load(credit + i_bh * known + o_t, mask=m_known, other=0.0) * DECAY
        b_updated += tl.where(m_known, b_old.to(tl.float64), 0.0)
    return b_updated


@triton.jit
def _write_mass(
    usage, credit, mass, updated, valid, i_bh, num_slots, known,
    HAS_VALID: tl.constexpr, HAS_CREDIT: tl.constexpr, HAS_HISTORY: tl.constexpr, DECAY: tl.constexpr,
    MIX: tl.constexpr, NEW_IS_MASS: tl.constexpr, SCALE: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """As `mass.mix_mass` with float64: fills the mass and the updated credit of a head.

    Three normalisations take four passes over the slots; each reads what it needs again, so that nothing but totals has
    to be held, however many slots there are. Every thread reads only what it wrote itself.
    """
    p_mass, p_updated = mass + i_bh * num_slots, updated + i_bh * num_slots
    total = 0.0
    total = total.to(tl.float64)
    for start in range(0, num_slots, BLOCK_T):
        o_t = start + tl.arange(0, BLOCK_T)
        b_present = _present(valid, i_bh, o_t, num_slots, HAS_VALID)
        total += _raw_total(_evidence(usage, i_bh, o_t, num_slots), b_present)
    history_total = total * 0
    for start in range(0, num_slots, BLOCK_T):
        o_t = start + tl.arange(0, BLOCK_T)
        b_present = _present(valid, i_bh, o_t, num_slots, HAS_VALID)
        b_now = _evidence(usage, i_bh, o_t, num_slots)
        if SCALE or not HAS_CREDIT:
            b_now = _shares(b_now, b_present, total)
        b_updated = tl.zeros_like(b_now)
        if HAS_CREDIT:
            b_updated = _update_credit(b_now, credit, i_bh, o_t, known, HAS_HISTORY, DECAY, NEW_IS_MASS)
        tl.store(p_mass + o_t, b_now, mask=o_t < num_slots)
        tl.store(p_updated + o_t, b_updated, mask=o_t < num_slots)
        history_total += _raw_total(b_updated, b_present)
    if HAS_CREDIT:
        mixed_total = total * 0
        for start in range(0, num_slots, BLOCK_T):
            o_t = start + tl.arange(0, BLOCK_T)
            b_present = _present(valid, i_bh, o_t, num_slots, HAS_VALID)
            b_history = tl.load(p_updated + o_t, mask=o_t < num_slots, other=0.0)
            if SCALE:
                b_history = _shares(b_history, b_present, history_total)
            b_now = tl.load(p_mass + o_t, mask=o_t < num_slots, other=0.0)
            b_mixed = b_now * MIX + b_history * (1 - MIX)
            tl.store(p_mass + o_t, b_mixed, mask=o_t < num_slots)
            mixed_total += _raw_total(b_mixed, b_present)
        for start in range(0, num_slots, BLOCK_T):
            o_t = start + tl.arange(0, BLOCK_T)
            b_present = _present(valid, i_bh, o_t, num_slots, HAS_VALID)
            b_mixed = tl.load(p_mass + o_t, mask=o_t < num_slots, other=0.0)
            tl.store(p_mass + o_t, _shares(b_mixed, b_present, mixed_total), mask=o_t < num_slots)


@triton.jit
def _write_running(
    mass, valid, running, rank, slot_after, i_bh, num_slots, HAS_VALID: tl.constexpr, BLOCK_T: tl.constexpr
):
    """Fills, for a head, what is looked up by slot later; returns how many slots are valid.

    `running` [T + 1]: mass before each slot; `rank` [T]: valid slots up to each; `slot_after` [T + 1]: the slot after
    the n-th valid one.
    """
    p_running = running + i_bh * (num_slots + 1)
    p_after = slot_after + i_bh * (num_slots + 1)
    tl.store(p_running, 0.0)
    tl.store(p_after, 0)
    before = 0.0
    before = before.to(tl.float64)
    count = num_slots * 0
    o_tile = tl.arange(0, BLOCK_T)
    for start in range(0, num_slots, BLOCK_T):
        o_t = start + o_tile
        m_t = o_t < num_slots
        b_present = _present(valid, i_bh, o_t, num_slots, HAS_VALID)
        b_prefix = before + tl.cumsum(tl.load(mass + i_bh * num_slots + o_t, mask=m_t, other=0.0).to(tl.float64), 0)
        b_rank = count + tl.cumsum(b_present.to(tl.int32), 0)
        tl.store(p_running + 1 + o_t, b_prefix, mask=m_t)
        tl.store(rank + i_bh * num_slots + o_t, b_rank, mask=m_t)
        tl.store(p_after + b_rank, o_t + 1, mask=b_present)
        before = tl.sum(tl.where(o_tile == BLOCK_T - 1, b_prefix, 0.0), 0)
        count = tl.max(b_rank, 0)
    # Threads look up what others have written.
    tl.debug_barrier()
    return count


@triton.jit
def _cuts(
    running, rank, i_bh, o_c, num_slots, count,
    SEGMENT_MASS: tl.constexpr, THRESHOLDS: tl.constexpr, INCLUDE: tl.constexpr,
):  # fmt: skip
    """As `segments._cuts`: int32 edges [BLOCK_C], past the last one beyond every slot."""
    if INCLUDE:
        b_reached = (o_c + 1).to(tl.float64) * SEGMENT_MASS - 1e-6
    else:
        # As `segments._public_thresholds`: the public code compares in float32, in steps of eight.
        o_first = tl.where(o_c < THRESHOLDS - THRESHOLDS % 8, o_c - o_c % 8, o_c)
        b_exact = (o_first.to(tl.float64) * SEGMENT_MASS + SEGMENT_MASS).to(tl.float32).to(tl.float64)
        b_stepped = b_exact + (o_c - o_first).to(tl.float64) * SEGMENT_MASS
        b_reached = b_stepped.to(tl.float32).to(tl.float64)
    # The first slot whose running mass reaches each threshold.
    b_low = tl.zeros_like(o_c)
    b_high = b_low + num_slots - 1
    while tl.max(b_high - b_low, 0) > 0:
        b_middle = (b_low + b_high) // 2
        b_mass = tl.load(running + i_bh * (num_slots + 1) + 1 + b_middle)
        if not INCLUDE:
            b_mass = b_mass.to(tl.float32).to(tl.float64)
        b_low = tl.where(b_mass < b_reached, tl.minimum(b_middle + 1, b_high), b_low)
        b_high = tl.where(b_mass < b_reached, b_high, b_middle)
    b_cuts = tl.load(rank + i_bh * num_slots + b_low)
    if not INCLUDE:
        b_cuts = tl.minimum(tl.maximum(b_cuts - 1, 1), count - 1)
    return tl.where(o_c < THRESHOLDS, b_cuts, 0x7FFFFFFF)


@triton.jit
def _next_edge(b_cuts, least, count, MAX: tl.constexpr, EVEN: tl.constexpr, SPLIT: tl.constexpr):
    """The first edge at or after `least`, of the cuts and of the edges that split what is longer than MAX."""
    end = tl.minimum(tl.min(tl.where(b_cuts >= least, b_cuts, 0x7FFFFFFF), 0), count)
    if SPLIT:
        start = tl.max(tl.where(b_cuts < least, b_cuts, 0), 0)
        length = end - start
        ahead = least - start
        if EVEN:
            parts = tl.maximum((length + MAX - 1) // MAX, 1)
            shorter = tl.maximum(length // parts, 1)
            longer = length - shorter * parts
            in_longer = (ahead + shorter) // (shorter + 1)
            part = tl.where(ahead <= longer * (shorter + 1), in_longer, (ahead - longer + shorter - 1) // shorter)
            end = tl.minimum(start + part * shorter + tl.minimum(part, longer), end)
        else:
            end = tl.minimum(start + (ahead + MAX - 1) // MAX * MAX, end)
    return tl.where(least >= count, count, end)


@triton.jit
def _walk(
    b_cuts, o_r, count,
    MIN: tl.constexpr, MAX: tl.constexpr, EVEN: tl.constexpr, SPLIT: tl.constexpr, TAIL: tl.constexpr,
):  # fmt: skip
    """As `segments._split_long` and `_merge_short`: starts and ends of the segments, int32 [BLOCK_R]."""
    b_starts = tl.zeros_like(o_r) + count
    b_ends = b_starts
    start = count * 0
    place = count * 0
    while start < count:
        end = _next_edge(b_cuts, start + MIN, count, MAX, EVEN, SPLIT)
        if TAIL:
            # An end this close to the last would leave a short segment.
            end = tl.where(end > count - MIN, count, end)
        if TAIL and SPLIT:
            middle = (start + end + 1) // 2
            halve = end - start > MAX
            b_starts = tl.where((o_r == place) & halve, start, b_starts)
            b_ends = tl.where((o_r == place) & halve, middle, b_ends)
            start = tl.where(halve, middle, start)
            place += halve.to(tl.int32)
        b_starts = tl.where(o_r == place, start, b_starts)
        b_ends = tl.where(o_r == place, end, b_ends)
        start = end
        place += 1
    return b_starts, b_ends


@triton.jit(do_not_specialize=["num_slots", "known", "num_segments"])
def _segment_plan_kernel(
    usage, credit, mass, valid, keep,
    edges, slot_edges, lengths, masses, quotas, updated, num_first, first_recent, running, rank, slot_after,
    num_heads, num_slots, known, num_segments,
    HAS_MASS: tl.constexpr, HAS_VALID: tl.constexpr, HAS_CREDIT: tl.constexpr,
    HAS_HISTORY: tl.constexpr, DECAY: tl.constexpr, MIX: tl.constexpr, NEW_IS_MASS: tl.constexpr, SCALE: tl.constexpr,
    SEGMENT_MASS: tl.constexpr, THRESHOLDS: tl.constexpr, INCLUDE: tl.constexpr, SEGMENT_TOKENS: tl.constexpr,
    MIN: tl.constexpr, MAX: tl.constexpr, EVEN: tl.constexpr, SPLIT: tl.constexpr, TAIL: tl.constexpr,
    NUM_SINKS: tl.constexpr, NUM_RECENT: tl.constexpr, SINK_FIRST: tl.constexpr,
    COUNTED: tl.constexpr, SEPARATE: tl.constexpr, PUBLIC: tl.constexpr, BY_LENGTH: tl.constexpr, FLOOR: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    i_bh = tl.program_id(0).to(tl.int64)
    o_r = tl.arange(0, BLOCK_R)
    if not HAS_MASS:
        _write_mass(
            usage, credit, mass, updated, valid, i_bh, num_slots, known,
            HAS_VALID, HAS_CREDIT, HAS_HISTORY, DECAY, MIX, NEW_IS_MASS, SCALE, BLOCK_T,
        )  # fmt: skip
    count = _write_running(mass, valid, running, rank, slot_after, i_bh, num_slots, HAS_VALID, BLOCK_T)

    if SEGMENT_TOKENS > 0:
        b_starts = tl.minimum(o_r * SEGMENT_TOKENS, count)
        b_ends = tl.minimum((o_r + 1) * SEGMENT_TOKENS, count)
    elif THRESHOLDS == 0 and not EVEN:
        # The public code returns before it looks at lengths when no threshold exists.
        b_starts = tl.where(o_r == 0, 0, count)
        b_ends = tl.zeros_like(o_r) + count
    else:
        o_c = tl.arange(0, BLOCK_C)
        b_cuts = _cuts(running, rank, i_bh, o_c, num_slots, count, SEGMENT_MASS, THRESHOLDS, INCLUDE)
        b_starts, b_ends = _walk(b_cuts, o_r, count, MIN, MAX, EVEN, SPLIT, TAIL)

    p_running = running + i_bh * (num_slots + 1)
    p_after = slot_after + i_bh * (num_slots + 1)
    m_r = o_r < num_segments
    b_slot_starts = tl.load(p_after + b_starts, mask=m_r, other=0)
    b_slot_ends = tl.load(p_after + b_ends, mask=m_r, other=0)
    # The last segment also takes the empty slots after it.
    b_slot_ends = tl.where(o_r == num_segments - 1, num_slots, b_slot_ends)
    b_masses = tl.load(p_running + b_slot_ends, mask=m_r, other=0.0)
    b_masses -= tl.load(p_running + b_slot_starts, mask=m_r, other=0.0)

    budget = tl.minimum(tl.load(keep + i_bh // num_heads).to(tl.int32), count)
    if SINK_FIRST:
        sinks = tl.minimum(budget, NUM_SINKS)
        recent = tl.minimum(budget - sinks, NUM_RECENT)
    else:
        recent = tl.minimum(budget, NUM_RECENT)
        sinks = tl.minimum(budget - recent, NUM_SINKS)
    recent_from = tl.maximum(sinks, count - recent)
    b_length = tl.where(m_r, b_ends - b_starts, 0).to(tl.float64)
    b_must = tl.minimum(b_ends, sinks) + tl.maximum(b_ends, recent_from)
    b_must -= tl.minimum(b_starts, sinks) + tl.maximum(b_starts, recent_from)
    b_must = tl.where(m_r, b_must, 0).to(tl.float64)

    b_aside = b_must if SEPARATE else tl.zeros_like(b_must)
    b_counted = b_must if COUNTED else tl.zeros_like(b_must)
    b_shared = b_length - b_aside
    shared_keep = budget.to(tl.float64) - tl.sum(b_aside, 0)
    if PUBLIC:
        b_quota = public_quotas(b_shared, b_masses, b_counted, shared_keep, FLOOR)
    else:
        b_quota = water_fill(b_shared, b_shared if BY_LENGTH else b_masses, b_counted, shared_keep, FLOOR)
    b_quota += b_aside

    o_out = i_bh * num_segments + o_r
    tl.store(lengths + o_out, b_length, mask=m_r)
    tl.store(masses + o_out, b_masses, mask=m_r)
    tl.store(quotas + o_out, b_quota.to(tl.int64), mask=m_r)
    o_edge = i_bh * (num_segments + 1)
    tl.store(edges + o_edge + 1 + o_r, b_ends.to(tl.int64), mask=m_r)
    tl.store(slot_edges + o_edge + 1 + o_r, b_slot_ends.to(tl.int64), mask=m_r)
    tl.store(edges + o_edge, 0)
    tl.store(slot_edges + o_edge, 0)
    tl.store(num_first + i_bh, sinks.to(tl.int64))
    tl.store(first_recent + i_bh, recent_from.to(tl.int64))


def segment_plan_triton(
    usage: Tensor, credit: Tensor | None, keep: Tensor, valid: Tensor | None, rules: SegmentRules
) -> SegmentPlan:
    """Arguments and result of `api.segment_plan`."""
    batch, heads, slots = usage.shape
    has_mass = rules.mass_dtype == "float32" or (rules.batch == "batch_mean" and batch > 1)
    if has_mass:
        mass, updated = mix_mass(usage, credit, valid, rules)
    else:
        mass, updated = (usage.new_empty(usage.shape, dtype=torch.float64) for _ in range(2))
    thresholds = 0 if rules.segment_tokens else num_thresholds(rules.segment_mass)
    split = not rules.segment_tokens and slots > rules.max_segment_tokens
    whole = not rules.segment_tokens and thresholds == 0 and rules.split == "chunk"
    segments = thresholds + 1 + ((slots - 1) // rules.max_segment_tokens if split and not whole else 0)
    if rules.segment_tokens:
        segments = triton.cdiv(slots, rules.segment_tokens)
    new = lambda *last, dtype: torch.empty(batch, heads, *last, dtype=dtype, device=usage.device)
    plan = SegmentPlan(
        edges=new(segments + 1, dtype=torch.int64),
        slot_edges=new(segments + 1, dtype=torch.int64),
        lengths=new(segments, dtype=torch.float64),
        masses=new(segments, dtype=torch.float64),
        quotas=new(segments, dtype=torch.int64),
        credit=updated,
        num_first=new(1, dtype=torch.int64),
        first_recent=new(1, dtype=torch.int64),
    )
    _segment_plan_kernel[(batch * heads,)](
        usage.contiguous(),
        None if credit is None else credit.contiguous(),
        mass.contiguous(),
        None if valid is None else valid.contiguous(),
        keep.contiguous(),
        *plan,
        new(slots + 1, dtype=torch.float64),
        new(slots, dtype=torch.int32),
        new(slots + 1, dtype=torch.int32),
        heads,
        slots,
        0 if credit is None else credit.shape[-1],
        segments,
        HAS_MASS=has_mass,
        HAS_VALID=valid is not None,
        HAS_CREDIT=rules.credit,
        HAS_HISTORY=credit is not None,
        DECAY=float(rules.credit_decay),
        MIX=float(rules.credit_mix),
        NEW_IS_MASS=rules.credit_init == "mass",
        SCALE=rules.credit_scale == "mass",
        SEGMENT_MASS=float(rules.segment_mass),
        THRESHOLDS=thresholds,
        INCLUDE=rules.boundary == "include",
        SEGMENT_TOKENS=rules.segment_tokens or 0,
        MIN=rules.min_segment_tokens,
        MAX=rules.max_segment_tokens,
        EVEN=rules.split == "even",
        SPLIT=split,
        TAIL=rules.merge == "forward_then_tail",
        NUM_SINKS=rules.num_sinks,
        NUM_RECENT=rules.num_recent,
        SINK_FIRST=rules.must_priority == "sink",
        COUNTED=rules.must_keep == "first_counted",
        SEPARATE=rules.must_keep == "first_separate",
        PUBLIC=rules.quota == "reference",
        BY_LENGTH=rules.quota == "length",
        FLOOR=rules.min_keep_tokens,
        BLOCK_T=1024,
        BLOCK_R=max(2, next_power_of_two(segments)),
        BLOCK_C=max(2, next_power_of_two(thresholds)),
        num_warps=4,
    )
    return plan

"""A running top-k in registers, for Triton kernels (the role of WarpSelect, arXiv 1702.08734).

The list of a row is K int64 keys in any order. A key holds the score in its upper half, turned into an integer that
orders like the float, and the complement of the index in its lower half: the largest key is the best entry, the lower
index first among equals, and no two keys are equal. An empty entry is smaller than any key.
"""

import triton
import triton.language as tl


@triton.jit
def key_scores(b_keys):
    """Scores of the keys; -inf for empty entries."""
    ordered = (b_keys >> 32).to(tl.int32)
    bits = ordered ^ ((ordered >> 31) & 0x7FFFFFFF)
    return tl.where(ordered == -0x80000000, float("-inf"), bits.to(tl.float32, bitcast=True))


@triton.jit
def key_indices(b_keys):
    return 0x7FFFFFFF - (b_keys & 0x7FFFFFFF).to(tl.int32)


@triton.jit
def empty_list(ROWS: tl.constexpr, K: tl.constexpr):
    # Distinct, so that one insertion replaces one of them.
    return tl.full((ROWS, K), -(2**63), tl.int64) + tl.arange(0, K).to(tl.int64)[None, :]


@triton.jit
def may_enter(b_keys, b_best):
    """Whether any row's best score could enter its list: the test that spares most tiles an insertion.

    b_keys [ROWS, K], b_best [ROWS] float32.
    """
    b_enters = (b_best > float("-inf")) & (b_best >= key_scores(tl.min(b_keys, 1)))
    return tl.max(b_enters.to(tl.int32), 0) > 0


@triton.jit
def insert_tile(b_keys, b_score, o_index):
    """Merge a tile into the lists.

    b_keys [ROWS, K]; b_score [ROWS, COLUMNS] float32, -inf where not eligible; o_index int32, [1 or ROWS, COLUMNS].

    Each round moves the best remaining entry of every row, so there are as many rounds as the row with most entries to
    add has.
    """
    b_new = _best_key(b_score, o_index)
    b_worst = tl.min(b_keys, 1)
    while tl.max((b_new > b_worst).to(tl.int32), 0) > 0:
        b_replaced = (b_keys == b_worst[:, None]) & (b_new > b_worst)[:, None]
        b_keys = tl.where(b_replaced, b_new[:, None], b_keys)
        b_score = tl.where(o_index == key_indices(b_new)[:, None], float("-inf"), b_score)
        b_new = _best_key(b_score, o_index)
        b_worst = tl.min(b_keys, 1)
    return b_keys


@triton.jit
def _best_key(b_score, o_index):
    b_best = tl.max(b_score, 1)
    b_first = tl.min(tl.where(b_score == b_best[:, None], o_index, 0x7FFFFFFF), 1)
    # Adding zero turns -0.0 into 0.0. Negative floats order backwards as integers; flipping all bits but the sign turns
    # them round.
    bits = (b_best + 0.0).to(tl.int32, bitcast=True)
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    b_key = (ordered.to(tl.int64) << 32) | (0x7FFFFFFF - b_first).to(tl.int64)
    return tl.where(b_best > float("-inf"), b_key, -(2**63))

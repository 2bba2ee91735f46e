"""Soft-capped logits in Triton kernels (Gemma 2, arXiv 2408.00118)."""

import triton
import triton.language as tl


@triton.jit
def softcap_log2(b_logit, softcap):
    """softcap * tanh(logit / softcap), both in the same unit."""
    b_ratio = b_logit / softcap
    b_exp = tl.exp2(-2.885390081777927 * tl.abs(b_ratio))
    b_tanh = (1 - b_exp) / (1 + b_exp)
    b_tanh = tl.where(b_ratio < 0, -b_tanh, b_tanh)
    # 1 - exp cancels near zero, where most logits are; the series is good to 1e-8 there.
    b_square = b_ratio * b_ratio
    b_series = b_ratio * (1 - b_square * (0.3333333333 - b_square * 0.1333333333))
    return softcap * tl.where(b_square < 0.0025, b_series, b_tanh)

"""How much of the cache may stay: the one place where tokens, bytes and fractions become a number of slots."""

import re
from dataclasses import dataclass
from fractions import Fraction
from numbers import Integral

import torch
from jaxtyping import Int64
from torch import Tensor

_BYTE_UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


@dataclass(frozen=True)
class Budget:
    """A limit on the stored slots of each kv head; protected sinks and recent tokens count inside it.

    Exactly one of the three is given; `Budget.of` reads the short forms that users write.

    Args:
        tokens: slots per kv head.
        fraction: share *kept* (not removed) of the tokens that a row has seen, in (0, 1], applied anew at each event.
            Taken as the decimal that was written, so 0.1 of 30 is 3.
        bytes: keys and values of one row over all compressed layers.
    """

    tokens: int | None = None
    fraction: float | None = None
    bytes: int | None = None

    def __post_init__(self):
        given = {name: value for name, value in vars(self).items() if value is not None}
        if len(given) != 1:
            raise ValueError(f"`budget` takes exactly one of tokens, fraction or bytes, got {given or 'none'}")
        for name in ("tokens", "bytes"):
            value = given.get(name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or not 0 < value < 2**62):
                raise ValueError(f"`budget` in {name} must be a positive integer below 2**62, got {value!r}")
        if self.fraction is not None and not 0 < self.fraction <= 1:
            raise ValueError(f"`budget` as a kept fraction must be in (0, 1], got {self.fraction!r}")

    @classmethod
    def of(cls, value: "Budget | int | float | str") -> "Budget":
        """`256` is tokens, `0.25` a kept fraction, `"64MiB"` bytes (B, KB, MB, GB, KiB, MiB, GiB)."""
        if isinstance(value, Budget):
            return value
        if isinstance(value, bool):
            raise TypeError(f"`budget` must be tokens (256), a kept fraction (0.25) or bytes ('64MiB'), got {value!r}")
        if isinstance(value, Integral):
            # Of any library: numpy's are no int.
            return cls(tokens=int(value))
        if isinstance(value, float):
            if value > 1 or value <= 0:
                hint = f"; write {int(value)} for tokens" if value > 1 and value.is_integer() else ""
                raise ValueError(f"`budget` as a float is a kept fraction in (0, 1], got {value!r}{hint}")
            return cls(fraction=value)
        if isinstance(value, str):
            match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]+)", value.strip())
            if match and match[2].upper() in _BYTE_UNITS:
                return cls(bytes=int(Fraction(match[1]) * _BYTE_UNITS[match[2].upper()]))
        raise TypeError(f"`budget` must be tokens (256), a kept fraction (0.25) or bytes ('64MiB'), got {value!r}")

    def require_at_least(self, slots: int) -> None:
        """Refuse a fixed number of tokens too small to hold the sinks and the newest token."""
        if self.tokens is not None and self.tokens < slots:
            raise ValueError(
                f"`budget` must hold the sinks and at least one more token: at least {slots} tokens, got {self.tokens}; "
                "raise `budget` or lower the allocator's `num_sinks`"
            )

    def slots(self, seen_tokens: Int64[Tensor, "B"], bytes_per_slot: int, least: int) -> Int64[Tensor, "B"]:
        """Slots per kv head that each row may hold now.

        Args:
            seen_tokens: tokens of each row so far, padding excluded; on the CPU, and so is the result.
            bytes_per_slot: bytes that one slot per kv head costs in all compressed layers together.
            least: floor (what is kept in any case, such as sinks, and one more); a fraction of a short row may fall below it and is lifted to it.

        Raises:
            ValueError: a budget in bytes that buys fewer than `least` slots.
        """
        if self.tokens is not None:
            return torch.full_like(seen_tokens, self.tokens)
        if self.bytes is not None:
            slots = self.bytes // bytes_per_slot
            if slots < least:
                raise ValueError(
                    f"`budget` of {self.bytes} bytes buys {slots} slots per kv head ({bytes_per_slot} bytes each over the "
                    f"compressed layers), but what is kept in any case and one slot more need {least}: at least {least * bytes_per_slot}"
                )
            return torch.full_like(seen_tokens, slots)
        # In Python's integers: the numerator of a long decimal times a long text is more than 64 bits hold.
        share = Fraction(str(self.fraction))
        kept = [max(tokens * share.numerator // share.denominator, least) for tokens in seen_tokens.tolist()]
        return torch.tensor(kept, dtype=torch.int64)

    def __str__(self) -> str:
        if self.tokens is not None:
            return f"{self.tokens} tokens"
        return f"{self.bytes} bytes" if self.bytes is not None else f"{self.fraction:g} of the tokens"

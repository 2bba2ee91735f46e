"""Which of the valid names was meant. Needs no torch: a typo on a command line is answered before that is loaded."""

from collections.abc import Iterable
from difflib import get_close_matches


def did_you_mean(wrong: object, valid: Iterable[str]) -> str:
    """`; did you mean 'layer'?`, or nothing if no name is near; capitals make no difference."""
    by_lower = {name.lower(): name for name in valid}
    near = get_close_matches(str(wrong).lower(), by_lower, n=1, cutoff=0.4)
    return f"; did you mean {by_lower[near[0]]!r}?" if near else ""

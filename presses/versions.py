"""What differs between the versions of transformers that kvstitch supports, 5.2 to 5.24; no other module knows."""

import inspect
from collections.abc import Mapping
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

# The argument that carries the cache through the decoder was renamed in 5.24.
_CACHE_ARGUMENTS = ("past_key_values", "cache")


def cache_argument(parameters: Mapping[str, Any]) -> str:
    """Name under which a decoder with these parameters takes its cache."""
    return next((name for name in reversed(_CACHE_ARGUMENTS) if name in parameters), _CACHE_ARGUMENTS[0])


def passed_cache(arguments: Mapping[str, Any]) -> Any | None:
    """The cache among a decoder's arguments, under whichever name; None if none was passed."""
    return next((arguments[name] for name in _CACHE_ARGUMENTS if arguments.get(name) is not None), None)


def query_count(query: Tensor | int) -> int:
    """Number of new tokens from what `get_mask_sizes` is given: their count, or in 5.2 their positions."""
    return query if isinstance(query, int) else query.shape[0]


def length_after_crop(tokens: int, seen_tokens: int) -> int:
    """Logical length that `crop(tokens)` asks for: `-n` removes n in every version, above 0 is a length before 5.16."""
    return seen_tokens + tokens if tokens <= 0 else min(tokens, seen_tokens)


def chunks_are_right(model: PreTrainedModel) -> bool:
    """Whether `generate(prefill_chunk_size=…)` goes on where the last chunk ended; 5.2 begins anew with each."""
    return "is_first_iteration" in inspect.signature(model._prefill).parameters

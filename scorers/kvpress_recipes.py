"""What each scorer press of kvpress 0.5 wants to be given, and which of them cannot be given it."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Recipe:
    """Inputs of a kvpress `score`.

    Args:
        hidden: what stands in for the hidden states: "none", "rotated_queries", "plain_queries" or "plain_keys".
        window: name of the press's attribute that says how many queries it takes, or the number itself.
        draws: whether it may draw from torch's global generator.
    """

    hidden: str = "none"
    window: str | int = 0
    draws: bool = False


# The nearest class in a press's ancestry decides, so a subclass that changes other things is served as well.
RECIPES = {
    "KnormPress": Recipe(),
    "KeyDiffPress": Recipe(),
    "LagKVPress": Recipe(),
    "CURPress": Recipe(draws=True),
    "RandomPress": Recipe(draws=True),
    "QFilterPress": Recipe(),
    "LeverageScorePress": Recipe(hidden="plain_keys", draws=True),
    "TOVAPress": Recipe(hidden="rotated_queries", window=1),
    "SnapKVPress": Recipe(hidden="rotated_queries", window="window_size"),
    "ExpectedAttentionPress": Recipe(hidden="plain_queries"),
    "CapPress": Recipe(hidden="plain_queries"),
}

REFUSED = {
    "StreamingLLMPress": "its 0/1 scores depend on a compression ratio; use kvstitch.scorers.StreamingLLM",
    "ObservedAttentionPress": (
        "it adds up the attention of every query since the prompt began, which no cache keeps; "
        "use kvstitch.scorers.SnapKV"
    ),
    "NonCausalAttnPress": "it needs the query of every cached token, and only recent queries are kept",
    "CompactorPress": "it needs the query of every cached token, and only recent queries are kept",
    "CriticalKVPress": "it needs the output projection of the attention module, which scorers never see",
    "KVzapPress": "it needs the hidden state of every cached token and a surrogate model from the hub",
    "ExpectedAttentionStatsPress": "it needs a statistics file from the hub; use kvstitch.scorers.ExpectedAttention",
}


def recipe_for(press: object) -> Recipe:
    """The recipe of a kvpress `ScorerPress`.

    A class of somebody else's that descends from `ScorerPress` directly gets keys and values only.

    Raises: NotImplementedError for a press that cannot be given what it needs.
    """
    for ancestor in type(press).__mro__:
        name = ancestor.__name__
        if name in REFUSED:
            raise NotImplementedError(f"KVPressScorer cannot serve {type(press).__name__}: {REFUSED[name]}")
        if name == "QFilterPress" and press.q_filters is None:
            raise NotImplementedError(
                "KVPressScorer cannot serve a QFilterPress without filters: it loads them from the hub by the model's "
                "name; call press.post_init_from_model(model) or set press.q_filters first"
            )
        if name in RECIPES:
            return RECIPES[name]
    return Recipe()

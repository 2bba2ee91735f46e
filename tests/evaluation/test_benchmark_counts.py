"""A count that no benchmark can work with is refused when it is made, and not after minutes of work."""

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import InstantiationException
from hydra.utils import instantiate

import kvstitch.configs
from kvstitch.evaluation.options import check_counts

CONFIGS = next(iter(kvstitch.configs.__path__))
REFUSED = {
    "event": ["rounds=0", "slots=0", "num_layers=0", "num_kv_heads=0", "head_dim=-1", "threads=0", "memory_layers=0"],
    "compact": ["rounds=0"],
    "kernels": [
        "rounds=0", "steps=0", "budget=0", "interval=0", "top_k=0", "contexts=[]", "contexts=[0]", "reference_contexts=[0]",
        "decode=[[qwen3-4b,0]]",
    ],
    "retrieval": [
        "threads=0", "decode.rounds=0", "decode.steps=0", "decode.contexts=[]", "decode.budget=0", "decode.tokens_per_region=0",
        "decode.num_layers=0", "update.rounds=0", "update.repeats=0", "update.lengths=[]", "update.lengths=[-5]",
        "prefill.rounds=0", "prefill.tokens=0", "prefill.budget=0",
    ],
    "community_quality": ["pieces=0", "threads=0", "lengths=[]", "lengths=[0]", "budgets=[]", "budgets=[0]"],
}  # fmt: skip
OF_ANOTHER_KIND = {
    "event": ["rounds=abc", "rounds=1.5"],
    "kernels": ["contexts=8192", "contexts=[a]"],
    "retrieval": ["decode.rounds=null", "update.lengths=4096"],
    "community_quality": ["pieces=two", "budgets=64"],
}
CASES = [(name, text, kind) for table, kind in ((REFUSED, ValueError), (OF_ANOTHER_KIND, TypeError))
         for name, texts in table.items() for text in texts]  # fmt: skip


@pytest.mark.parametrize(("name", "override", "kind"), CASES, ids=lambda value: getattr(value, "__name__", value))
def test_a_count_that_cannot_be_is_named_at_once(name, override, kind):
    with initialize_config_dir(CONFIGS, version_base="1.3"):
        config = compose("bench", overrides=[f"bench={name}", f"bench.{override}"])
    (parsed,) = OverridesParser.create().parse_overrides([f"bench.{override}"])
    with pytest.raises(InstantiationException) as caught:
        instantiate(config.bench, _convert_="all")
    # The part of a benchmark is made on its own, so that its error lies below that of the whole.
    cause = caught.value.__cause__
    assert isinstance(cause, kind) and parsed.key_or_group in str(cause), cause
    assert "must be" in str(cause) and ", got " in str(cause)


def test_what_a_list_may_hold():
    check_counts("a", [1, 2])
    check_counts("a", (), may_be_empty=True)
    for value, message in (
        ([], "a must be a list of whole numbers of at least 1, got an empty one"),
        ([1, 0], "a must be a list of whole numbers of at least 1, got 0 in it"),
    ):
        with pytest.raises(ValueError, match=message):
            check_counts("a", value)
    for value, message in (
        (5, r"got 5; write a=\[5\] for one"),
        ([True], "got True in it"),
        (["b"], "got 'b' in it"),
    ):
        with pytest.raises(TypeError, match=message):
            check_counts("a", value)

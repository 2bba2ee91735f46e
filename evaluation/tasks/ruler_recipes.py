"""How each of RULER's thirteen tasks fills a document (arXiv 2404.06654); settings are its own, the wording is ours."""

import math
import random
import string
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice

from kvstitch.evaluation.tasks import vocabulary
from kvstitch.evaluation.tasks.generated import Draft, Pool, background, scattered

_NOISE = "The sea is calm. The air is clear. The boats are out. On they go, and home they come."
_REMEMBER = "Some facts are hidden in the text below. Remember them, for they will be asked for.\n\n"


# What the value of a needle is called, and how one is drawn.
_VALUES = {"number": ("number", vocabulary.number), "uuid": ("identifier", vocabulary.identifier)}


@dataclass(frozen=True)
class Recipe:
    """Deterministic drafts by number of units of filler, and the least and the most of them that make sense."""

    draft: Callable[[int], Draft]
    least: int = 0
    most: int | None = None


@dataclass(frozen=True)
class NeedleKind:
    """One of the eight needle tasks.

    Args:
        haystack: "noise" (one sentence again and again), "essay", or "needles" (facts about other names).
        key: "word" or "uuid".
        value: "number" or "uuid".
        keys: facts in the text, the asked ones included.
        values: of each asked name.
        queries: names asked for.
    """

    haystack: str
    key: str = "word"
    value: str = "number"
    keys: int = 1
    values: int = 1
    queries: int = 1


NEEDLES = {
    "niah_single_1": NeedleKind("noise"),
    "niah_single_2": NeedleKind("essay"),
    "niah_single_3": NeedleKind("essay", value="uuid"),
    "niah_multikey_1": NeedleKind("essay", keys=4),
    "niah_multikey_2": NeedleKind("needles"),
    "niah_multikey_3": NeedleKind("needles", key="uuid", value="uuid"),
    "niah_multivalue": NeedleKind("essay", values=4),
    "niah_multiquery": NeedleKind("essay", keys=4, queries=4),
}


def needles(rng: random.Random, kind: NeedleKind, book: list[str] | None) -> Recipe:
    """Facts "the code of <name> is <value>" among other text, some of them asked for."""
    keys = _keys(rng, kind)
    what, values = _VALUES[kind.value]
    facts = [(key, values(rng)) for key in islice(keys, kind.keys) for _ in range(kind.values)]
    asked = list(dict.fromkeys(key for key, _ in facts))[: kind.queries]
    rng.shuffle(facts)
    state = rng.getrandbits(64)
    sentence = f"Note that the code {what} of {{}} is {{}}."
    if kind.haystack == "needles":
        filler = Pool(sentence.format(key, values(rng)) for key in keys)
    else:
        filler = Pool(background(rng, book) if kind.haystack == "essay" else _repeated(_NOISE))
    question = _needle_question(what, asked, many=kind.values * kind.queries > 1)
    gold = tuple(value for key, value in facts if key in asked)

    def draft(units: int) -> Draft:
        texts = scattered(random.Random(state), [sentence.format(*fact) for fact in facts], filler.first(units))
        place = texts.index(sentence.format(*next(fact for fact in facts if fact[0] == asked[0])))
        separator = " " if kind.haystack == "essay" else "\n"
        return Draft(_REMEMBER + separator.join(texts), question, gold, {"depth": round(place / len(texts), 4)})

    return Recipe(draft)


def variable_tracking(rng: random.Random, chains: int = 1, hops: int = 4) -> Recipe:
    """Chains of assignments in noise; wanted are all variables that have the first chain's value."""
    taken: list[list[str]] = []
    statements: list[list[str]] = []
    drawn = _different(lambda: vocabulary.letters(rng, 5, string.ascii_uppercase))
    values = list(islice(_different(lambda: vocabulary.number(rng, 5)), chains))
    for value in values:
        chain = list(islice(drawn, hops + 1))
        taken.append(chain)
        sources = [value, *(f"VAR {name}" for name in chain)]
        statements.append([f"VAR {name} = {source}" for name, source in zip(chain, sources)])
    # Chains run side by side, each in its own order.
    order = [index for index, chain in enumerate(statements) for _ in chain]
    rng.shuffle(order)
    queues = [iter(chain) for chain in statements]
    lines = [next(queues[index]) for index in order]
    state = rng.getrandbits(64)
    filler = Pool(_repeated(_NOISE))
    question = (
        f"\n\nQuestion: Which variables have the value {values[0]}, directly or through others?\n"
        f"Answer: {len(taken[0])} variables have the value {values[0]}:"
    )

    def draft(units: int) -> Draft:
        texts = scattered(random.Random(state), lines, filler.first(units))
        context = "Follow the assignments of variables in the text below.\n\n" + "\n".join(texts)
        return Draft(context, question, tuple(taken[0]))

    return Recipe(draft)


def common_words(rng: random.Random, common: int = 10, common_times: int = 30, rare_times: int = 3) -> Recipe:
    """A numbered list in which some words come much more often than the others; wanted are those."""
    pool = Pool(vocabulary.words(rng))
    state = rng.getrandbits(64)
    question = (
        f"\n\nQuestion: Which {common} words of the list are the most frequent?\n"
        f"Answer: The {common} most frequent words are:"
    )

    def draft(units: int) -> Draft:
        chosen = pool.first(common + units)
        entries = chosen[:common] * common_times + chosen[common:] * rare_times
        random.Random(state).shuffle(entries)
        listed = " ".join(f"{number}. {word}" for number, word in enumerate(entries, 1))
        context = (
            "In the list below some words come more often than others. Remember the most frequent ones.\n\n" + listed
        )
        return Draft(context, question, tuple(chosen[:common]))

    return Recipe(draft, least=1)


def frequent_words(rng: random.Random, exponent: float = 2.0, vocabulary_size: int = 2000) -> Recipe:
    """Coded words whose frequencies fall with a power of their rank; dots take the first rank, the next three are wanted.

    Of n words, rank k gets n k^-a / zeta(a).
    """
    pool = Pool(_different(lambda: vocabulary.letters(rng, 6, string.ascii_lowercase)))
    state = rng.getrandbits(64)
    weights = [rank**-exponent for rank in range(1, vocabulary_size + 1)]
    # The tail of zeta beyond the vocabulary, by its integral.
    zeta = sum(weights) + (vocabulary_size + 0.5) ** (1 - exponent) / (exponent - 1)
    question = (
        "\n\nQuestion: Leave the dots aside. Which three coded words are the most frequent?\n"
        "Answer: The three most frequent coded words are:"
    )

    def draft(units: int) -> Draft:
        counts = [int(units * weight / zeta) for weight in weights]
        coded = ["...", *pool.first(sum(map(bool, counts)) - 1)]
        text = [word for word, count in zip(coded, counts) for _ in range(count)]
        random.Random(state).shuffle(text)
        context = "Words of a code stand in the text below. Keep count of each of them.\n\n" + " ".join(text)
        return Draft(context, question, tuple(coded[1:4]))

    # From here on ranks four and five differ by more than what rounding takes.
    return Recipe(draft, least=math.ceil(2 * zeta / (4**-exponent - 5**-exponent)))


def documents(
    rng: random.Random, question: str, answers: tuple[str, ...], needed: list[str], others: list[str]
) -> Recipe:
    """Numbered documents, those that hold the answer among others, in a drawn order."""
    others = [text for text in rng.sample(others, len(others)) if text not in needed]
    state = rng.getrandbits(64)

    def draft(units: int) -> Draft:
        chosen = needed + others[:units]
        order = random.Random(state)
        order.shuffle(chosen)
        listed = "\n\n".join(f"Document {number}:\n{text}" for number, text in enumerate(chosen, 1))
        context = f"Read the documents below; a question about them follows.\n\n{listed}"
        asked = f"\n\nAnswer with a few words and nothing else.\nQuestion: {question}\nAnswer:"
        return Draft(context, asked, answers, {"depth": round(chosen.index(needed[0]) / len(chosen), 4)})

    return Recipe(draft, most=len(others))


def _needle_question(what: str, asked: list[str], many: bool) -> str:
    listed = ", ".join(asked[:-1]) + " and " + asked[-1] if len(asked) > 1 else asked[0]
    plural = "s" if many else ""
    wanted, verb = ("are all", "are") if many else ("is", "is")
    return (
        f"\n\nQuestion: What {wanted} the code {what}{plural} of {listed} in the text above?\n"
        f"Answer: The code {what}{plural} of {listed} {verb}"
    )


def _keys(rng: random.Random, kind: NeedleKind) -> Iterator[str]:
    return vocabulary.names(rng) if kind.key == "word" else _different(lambda: vocabulary.identifier(rng))


def _repeated(text: str) -> Iterator[str]:
    while True:
        yield text


def _different(draw: Callable[[], str]) -> Iterator[str]:
    """Drawn again and again, what came before left out."""
    seen = set()
    while True:
        value = draw()
        if value not in seen:
            seen.add(value)
            yield value

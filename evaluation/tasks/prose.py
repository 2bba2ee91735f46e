"""Harmless prose without digits, to fill the space between the facts of a generated document."""

import random
from collections.abc import Iterator
from string import Formatter

from transformers import PreTrainedTokenizerBase

from kvstitch.evaluation.tasks.encoding import encode

_SLOTS = {
    "who": (
        "the clerk", "the harbour master", "an old carpenter", "the younger sister", "a travelling doctor", "the miller",
        "the night watchman", "a retired captain", "the schoolteacher", "the baker's son", "a quiet stranger",
        "the gardener", "the postman", "a visiting inspector", "the innkeeper", "the apprentice", "a tired musician",
        "the shepherd", "the ferryman", "a careful bookbinder",
    ),
    "where": (
        "by the river", "near the old bridge", "behind the market hall", "at the edge of the forest", "in the back room",
        "under the wooden stairs", "on the far side of the square", "along the coast road", "beside the stone well",
        "in the attic", "outside the north gate", "at the end of the lane", "in the empty theatre", "on the upper terrace",
        "close to the railway", "in the shade of the church",
    ),
    "when": (
        "in the early morning", "before the shops had opened", "late in the autumn", "during the long rain",
        "on the first warm evening", "after the harvest", "while the bells were ringing", "towards the end of the week",
        "in the middle of the winter", "shortly before supper", "when the fog had lifted", "on the day of the fair",
    ),
    "what": (
        "a broken lantern", "the torn map", "a basket of apples", "the heavy ladder", "some letters", "a roll of cloth",
        "the painted sign", "an iron kettle", "the wet coats", "a pair of boots", "the wooden cart", "a bundle of firewood",
        "the silver bell", "an unfinished drawing", "the blue umbrella", "a jar of honey", "the spare key", "a folded tent",
    ),
    "how": (
        "slowly", "without a word", "with great care", "in a hurry", "cheerfully", "as if nothing had happened",
        "rather clumsily", "with a short laugh", "against all advice", "patiently",
    ),
    "why": (
        "the road was still closed", "nobody had asked for it", "the roof had started to leak", "the boat was late again",
        "there was little else to do", "the wind had turned", "the old rule still held", "the guests were expected soon",
        "the lamp had gone out", "the neighbours had complained",
    ),
}  # fmt: skip
_TEMPLATES = (
    "{When}, {who} carried {what} to a place {where}.",
    "{Who} put down {what} {where} and went home {how}.",
    "It was said that {who} had found {what} {where}, though few believed it.",
    "Because {why}, {who} waited {where} and looked after {what}.",
    "{When} there was nobody {where} except {who}.",
    "{Who} talked about {what} {how}, and then said nothing more.",
    "Although {why}, {who} mended {what} {when}.",
    "Nothing stood {where} but {what}, and {who} left it there.",
    "{Who} remembered how, {when}, somebody had sold {what} {where}.",
    "The door {where} stayed shut since {why}.",
    "{Who} asked for {what} and was told to come back {when}.",
    "They walked {where} {how}, and {who} told them about {what}.",
    "Some people thought that {what} belonged to {who}, for {why}.",
    "{When} the light was poor {where}, so {who} worked {how}.",
    "{Who} would rather have stayed {where}, but {why}.",
    "Between the two houses {where}, {who} had hidden {what}.",
)


# What generated tasks ask about: short, common and not in the prose.
NAMES = (
    "amber", "birch", "cedar", "dahlia", "ember", "falcon", "garnet", "hazel", "indigo", "jasper", "kestrel", "laurel",
    "maple", "nutmeg", "olive", "pepper", "quartz", "raven", "saffron", "thistle", "umber", "violet", "walnut", "yarrow",
    "zinnia", "alder", "basil", "cobalt", "daisy", "elm", "fern", "ginger", "heron", "iris", "juniper", "kiwi", "lotus",
    "mango", "nettle", "orchid", "poppy", "quince", "robin", "sage", "tulip", "urchin", "velvet", "willow",
)  # fmt: skip


def prose(rng: random.Random, tokenizer: PreTrainedTokenizerBase, tokens: int) -> list[str]:
    """Sentences that, each after a space, take at most `tokens` tokens, and all but a sentence's worth of them."""
    taken = []
    for sentence in sentences(rng):
        tokens -= len(encode(tokenizer, " " + sentence))
        if tokens < 0:
            return taken
        taken.append(sentence)


def sentences(rng: random.Random) -> Iterator[str]:
    """Endless sentences drawn from `rng`; some 10^5 different ones, so that two seldom agree in one document."""
    while True:
        template = rng.choice(_TEMPLATES)
        words = {}
        for _, slot, _, _ in Formatter().parse(template):
            if slot is not None:
                phrase = rng.choice(_SLOTS[slot.lower()])
                words[slot] = phrase[0].upper() + phrase[1:] if slot[0].isupper() else phrase
        yield template.format(**words)

"""Harmless prose without digits, to fill the space between the facts of a generated document.

Sentences are drawn from enough words and patterns that a document of some thousand tokens seldom says the same phrase twice:
a model that remembers everything would otherwise guess the filler from its earlier copies, and what an evicting one loses by
forgetting it would hide what it loses by forgetting the facts.
"""

import random
from collections.abc import Iterator
from string import Formatter

from transformers import PreTrainedTokenizerBase

from kvstitch.evaluation.tasks.encoding import encode

_WORDS = {
    "person": """clerk carpenter doctor miller watchman captain teacher baker stranger gardener postman inspector innkeeper
        apprentice musician shepherd ferryman bookbinder widow cook soldier painter nurse farmer sailor tailor printer judge
        student hunter fisherman merchant librarian weaver blacksmith pilgrim actor secretary porter mechanic beekeeper cousin
        neighbour grandmother uncle daughter brother visitor surveyor potter glazier butcher organist lawyer driver lodger
        chemist jeweller butler orphan cobbler""",
    "trait": """old young tired quiet careful cheerful stubborn patient clumsy proud shy honest lonely curious retired gentle
        nervous generous absent-minded talkative polite suspicious thoughtful restless humble impatient well-dressed
        soft-spoken forgetful hopeful""",
    "thing": """lantern map basket ladder letter cloth sign kettle coat boot cart drawing umbrella jar key tent bell rope barrel
        mirror clock hat saddle violin spoon blanket shovel candle wheel bucket trunk ribbon needle chair curtain hammer bottle
        newspaper portrait whistle anchor plough carpet teapot drum stove envelope telescope compass bench pillow chimney
        bicycle wallet photograph knife scarf ledger birdcage crate""",
    "quality": """broken torn heavy wooden painted iron wet silver blue dusty folded cracked yellow borrowed forgotten rusty
        narrow empty striped polished crooked faded leather brass useless expensive woollen hollow muddy spare unfinished
        carved greasy tiny enormous tangled copper secondhand locked""",
    "place": """river bridge market forest stairs square coast well attic gate lane theatre terrace railway church harbour mill
        orchard cellar meadow tavern station chapel quarry garden kitchen barn lighthouse library courtyard cemetery workshop
        bakery school hospital stable tower valley marsh island hillside ferry greenhouse hallway balcony""",
    "where": """near behind beside beyond inside outside opposite above below around""",
    "when": """in the early morning|late in the autumn|during the long rain|after the harvest|shortly before supper|on market
        day|when the fog had lifted|at the end of the war|while the bells rang|as soon as it was dark|on the second Sunday|before
        anyone was awake|in a year of bad harvests|towards midnight|just after the funeral|that same spring|once the snow had
        melted|all through the summer|on the day of the wedding|for the first time in years|halfway through the concert|one
        windy afternoon|at low tide|every other evening|not long ago|in the week of the fair""",
    "did": """carried|mended|sold|hid|found|painted|dropped|borrowed|cleaned|lost|returned|described|stole|bought|examined|buried|
        admired|measured|wrapped|moved|burned|repaired|inherited|weighed|guarded|drew|collected|refused|emptied|dragged""",
    "how": """slowly|without a word|with great care|in a hurry|cheerfully|rather clumsily|against all advice|patiently|by
        mistake|with both hands|out of habit|almost in secret|for a small fee|under protest|to everyone's surprise|as a favour|
        in silence|with a sigh|for no good reason|more than once""",
    "why": """the road was still closed|nobody had asked for it|the roof had started to leak|the boat was late again|there was
        little else to do|the wind had turned|the guests were expected soon|the lamp had gone out|the neighbours complained|the
        price had fallen|it looked like thunder|the doctor had forbidden it|the horses were tired|the letter never came|the
        soup was getting cold|the company had gone bankrupt|her sister insisted|the ice was too thin|the law had changed|it
        was somebody's birthday|the train had been cancelled|the paint was not dry|the dog kept barking|the money ran out""",
}  # fmt: skip
_PATTERNS = (
    "{When}, the {trait} {person} {did} a {quality} {thing} {where} the {place}.",
    "The {person} {did} the {thing} {how}, for {why}.",
    "It was said that a {trait} {person} had a {quality} {thing}, though few believed it.",
    "Because {why}, the {person} waited {where} the {place} and thought about the {thing}.",
    "{When} there was nobody {where} the {place} except a {person}.",
    "A {quality} {thing} is worth more than a {quality} {thing}, said the {person}.",
    "Although {why}, we {did} the {quality} {thing} {how}.",
    "Nothing stood {where} the {place} but a {thing}, and the {person} left it there.",
    "Her {person} remembered how somebody {did} a {thing} {where} the {place}.",
    "The {place} stayed shut since {why}.",
    "Ask the {person}, they told us, and look {where} the {place} {when}.",
    "They walked to the {place} {how}, and a {trait} {person} showed them the {thing}.",
    "Some people thought that the {thing} belonged to the {person}, others that the {person} {did} it.",
    "Was it the {trait} {person} who {did} my {thing}?",
    "I would rather have stayed {where} the {place}, but {why}.",
    "Between the {place} and the {place} lay a {quality} {thing}.",
    "Every {person} in the village knew that {why}.",
    "{When} the {person} married a {person}, {how}.",
    "My {thing} is {quality}, yours is {quality}, and the {person} has none.",
    "What the {person} {did} {where} the {place} was never explained.",
    "So {why}, and that was how the {trait} {person} came to own the {place}.",
    "The {person} looked {trait}, the {person} looked {trait}, and {why}.",
    "You could hear the {thing} from the {place}, especially {when}.",
    "Neither the {person} nor the {person} {did} the {thing} {how}.",
    "Two hours later a {quality} {thing} was discovered {where} the {place}.",
    "If {why}, then why had the {person} gone to the {place}?",
    "Once more they {did} the {thing}, this time {how}.",
    "Old stories mention a {place} where {why}.",
    "With a {thing} like that, joked the {trait} {person}, one could buy a {place}.",
    "Later {why}, so the {person} kept the {quality} {thing} {where} the {place}.",
    "The view of the {place} made the {person} {trait}.",
    "Please put the {thing} {where} the {thing}, wrote the {person}.",
)
_CHOICES = {
    name: [" ".join(word.split()) for word in (words.split("|") if "|" in words else words.split())]
    for name, words in _WORDS.items()
}

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
    """Endless sentences drawn from `rng`; a pattern returns only after all the others were used."""
    while True:
        for pattern in rng.sample(_PATTERNS, len(_PATTERNS)):
            yield _fill(rng, pattern)


def _fill(rng: random.Random, pattern: str) -> str:
    parts = []
    for text, slot, _, _ in Formatter().parse(pattern):
        phrase = rng.choice(_CHOICES[slot.lower()]) if slot is not None else ""
        parts.append(text + (phrase[0].upper() + phrase[1:] if slot is not None and slot[0].isupper() else phrase))
    sentence = "".join(parts)
    for vowel in "aeiou":
        sentence = sentence.replace(f" a {vowel}", f" an {vowel}").replace(f"A {vowel}", f"An {vowel}")
    return sentence

"""Words for generated documents: names that are asked for, words that are counted, numbers and identifiers."""

import random
import uuid
from collections.abc import Iterator

_ADJECTIVES = """able amber ancient awake bitter blue bold brave brief bright brisk broad calm careful cheap clean clear clever
    close coarse cold common cool crisp cruel curious damp dark deep dense dim distant dry dull eager early easy empty equal
    even fair false famous fast fierce final fine firm flat fond fresh full gentle giant glad golden grand gray great green
    happy harsh heavy hollow honest huge humble icy idle inner keen kind large late lazy lean light little lively local lone
    long loose loud loyal lucky mad major mellow merry mild minor misty modern modest narrow neat new noble odd old open
    orange outer pale plain polite poor proud pure quick quiet rapid rare raw ready red rich rigid ripe rough round royal rude
    rural rusty sad safe salty sandy sharp short shy silent silver simple sleepy slim slow small smart smooth soft solid sour
    spare steady steep stern stiff strange strict strong sunny sweet swift tall tame tender thick thin tidy tight tiny tired
    tough urban usual vague vast violet vivid warm wary weak wet white whole wide wild windy wise wooden yellow young""".split()
_NOUNS = """acorn anchor apple apron arrow badge bagel baker banjo barn basil basin basket beach beacon bead bean bell bench
    berry blanket blossom boat bottle bowl branch bread brick bridge broom brush bucket button cabin cactus camel camera candle
    canoe canyon carpet carrot castle cedar chain chair chapel cherry chest chimney circle citrus clay cliff clock cloud clover
    coast cobweb coin comet compass copper coral cotton cradle crane crayon creek crow crown cup curtain daisy dance desert
    desk diary dolphin donkey door dragon drum duck eagle easel echo elbow engine falcon feather fence fern fiddle field finch
    flag flame flute forest fork fossil fountain fox frog garden garlic gate ginger glacier glove goat grape gravel guitar
    hammer harbor harp hat hawk hazel hedge helmet heron hill honey hood horn horse island ivory jacket jar jewel kettle key
    kite kitten ladder lagoon lake lamp lantern leaf lemon lens letter lily lion lizard locket lotus magnet map maple marble
    market meadow melon mirror mitten moon moss moth motor mountain mural needle nest nickel novel oak oasis ocean olive onion
    orchard otter oven owl paddle palace panda paper parrot path peach pearl pebble pencil pepper piano pigeon pillow pine
    planet plate pocket poem pond pony poppy prairie puzzle quarry quilt rabbit raft rain raven reef ribbon river road robin
    rocket roof rope rose saddle sail salmon scarf school shell shoe silk sled snail soap sofa spark spider spoon spruce square
    squirrel stable star statue steam stone stove straw summer swan table teapot temple thistle thunder tiger timber toad torch
    tower trail train tulip tunnel turtle umbrella valley vase velvet village violin wagon walnut water wave whale wheat wheel
    whistle willow window winter wolf wool wren yarn zebra""".split()

# Different names that `names` can draw.
NUM_NAMES = len(_ADJECTIVES) * len(_NOUNS)


def names(rng: random.Random) -> Iterator[str]:
    """Different names of two words, e.g. "calm-otter", in a drawn order; some fifty thousand."""
    for place in rng.sample(range(NUM_NAMES), NUM_NAMES):
        yield f"{_ADJECTIVES[place // len(_NOUNS)]}-{_NOUNS[place % len(_NOUNS)]}"


def words(rng: random.Random) -> Iterator[str]:
    """Different words in a drawn order: first single ones, then names."""
    single = sorted({*_ADJECTIVES, *_NOUNS})
    yield from rng.sample(single, len(single))
    yield from names(rng)


def number(rng: random.Random, digits: int = 7) -> str:
    """A number without leading zeros."""
    return str(rng.randrange(10 ** (digits - 1), 10**digits))


def identifier(rng: random.Random) -> str:
    """A random UUID (version 4)."""
    return str(uuid.UUID(int=rng.getrandbits(128), version=4))


def letters(rng: random.Random, count: int, alphabet: str) -> str:
    """`count` letters, each drawn by itself."""
    return "".join(rng.choice(alphabet) for _ in range(count))

"""Key-value retrieval: the value of one key in a JSON object of random identifiers (arXiv 2307.03172)."""

import json
import random
from dataclasses import dataclass
from typing import ClassVar

from transformers import PreTrainedTokenizerBase

from kvstitch.evaluation.tasks import vocabulary
from kvstitch.evaluation.tasks.fields import text_field, typed_field
from kvstitch.evaluation.tasks.generated import GeneratedOrRead
from kvstitch.evaluation.tasks.records import Parts
from kvstitch.evaluation.tasks.sources import BadRecord, Record


@dataclass(frozen=True, kw_only=True)
class KeyValues(GeneratedOrRead):
    """Pairs of UUIDs; over the samples the asked one goes through the object from its beginning to its end.

    Args:
        num_keys: pairs of a generated object; about 80 tokens each.
        path: a JSON Lines file with `ordered_kv_records`, `key` and `value`, read instead.
    """

    num_keys: int = 75
    grader: str = "contains_any"
    max_new_tokens: int = 64

    sizes: ClassVar[tuple[str, ...]] = ("num_keys",)

    def make(self, rng: random.Random, index: int, tokenizer: PreTrainedTokenizerBase) -> Record:
        """See `Generated.make`."""
        pairs = [[vocabulary.identifier(rng), vocabulary.identifier(rng)] for _ in range(self.num_keys)]
        asked = index % self.num_samples * (self.num_keys - 1) // max(self.num_samples - 1, 1)
        return {"ordered_kv_records": pairs, "key": pairs[asked][0], "value": pairs[asked][1]}

    def parts(self, record: Record, where: str) -> Parts:
        """See `Records.parts`."""
        pairs = typed_field(record, "ordered_kv_records", list, "a list of pairs", where)
        if not all(
            isinstance(pair, list) and len(pair) == 2 and all(isinstance(x, str) for x in pair) for pair in pairs
        ):
            raise BadRecord(f"{where}: field 'ordered_kv_records' must hold pairs of texts")
        key, value = (text_field(record, name, where) for name in ("key", "value"))
        keys = [name for name, _ in pairs]
        if key not in keys or pairs[keys.index(key)][1] != value:
            raise BadRecord(f"{where}: 'ordered_kv_records' does not map {key!r} to {value!r}")
        listed = ",\n ".join(f"{json.dumps(name)}: {json.dumps(text)}" for name, text in pairs)
        context = f"Take the value of a key from this JSON object.\n\n{{{listed}}}\n\n"
        depth = round(keys.index(key) / max(len(keys) - 1, 1), 4)
        return self.asked(
            context, f'Key: "{key}"\nThe value of this key:', (value,), {"depth": depth, "keys": len(keys)}
        )

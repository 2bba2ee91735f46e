"""The first sample of a run as the model reads it, so that a wrong template or a wrong split is seen before the figures are."""

from collections.abc import Iterator, Sequence

from transformers import PreTrainedTokenizerBase

from kvstitch.evaluation.tasks.base import Sample

FIRST_SAMPLE = "first_sample.txt"


def sample_text(sample: Sample, tokenizer: PreTrainedTokenizerBase) -> str:
    """Everything that is fed, decoded with its special tokens, under a line that says what it is and how long."""
    return "\n".join(_parts(sample, tokenizer)) + "\n"


def _parts(sample: Sample, tokenizer: PreTrainedTokenizerBase) -> Iterator[str]:
    def part(title: str, ids: Sequence[int]) -> str:
        return f"===== {title}, {len(ids)} tokens =====\n{tokenizer.decode(list(ids), skip_special_tokens=False)}"

    yield f"===== sample {sample.id} {dict(sample.meta) or ''}".rstrip()
    yield part("prompt", sample.prompt_ids)
    if sample.trace_ids:
        yield part("trace (replay feeds it through the press)", sample.trace_ids)
    for number, question in enumerate(sample.questions, 1):
        yield part(f"question {number}", question.cue_ids)
        yield f"===== its answer: {' | '.join(question.gold)} (room for {question.max_new_tokens} tokens) ====="

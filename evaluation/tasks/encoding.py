"""From text to the token ids of a sample, checked against the length that the model allows."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from transformers import PreTrainedTokenizerBase

from kvstitch.evaluation.tasks.base import Question, Sample, Scalar, Task


@dataclass(frozen=True)
class Ask:
    """A question as text: what leads to the answer, the accepted or wanted answers, and what plots group by."""

    cue: str
    gold: tuple[str, ...]
    meta: Mapping[str, Scalar] = field(default_factory=dict)


def encode(tokenizer: PreTrainedTokenizerBase, text: str, special: bool = False) -> list[int]:
    """Token ids of a text of any length; `special` adds what the tokenizer puts around a text (a begin token, mostly)."""
    return tokenizer(text, add_special_tokens=special, verbose=False)["input_ids"]


def chat_prompt(tokenizer: PreTrainedTokenizerBase, prompt: str) -> str:
    """The prompt as a user's message in the tokenizer's chat template, up to where the assistant begins to answer.

    Raises:
        ValueError: the tokenizer has no chat template.
    """
    if not tokenizer.chat_template:
        raise ValueError(
            "task.chat=true needs a tokenizer with a chat template, and this one has none; use task.chat=false"
        )
    messages = [{"role": "user", "content": prompt}]
    return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)


def build_sample(
    task: Task,
    tokenizer: PreTrainedTokenizerBase,
    max_positions: int,
    *,
    id: str,
    prompt: str,
    trace: str = "",
    asks: Sequence[Ask] = (),
    meta: Mapping[str, Scalar] | None = None,
) -> Sample:
    """Tokenise prompt, trace and cues, each by itself, so that what is prefilled never depends on what follows.

    Raises:
        ValueError: no tokens in the prompt, or more tokens than `max_positions`.
    """
    if task.chat:
        prompt_ids = encode(tokenizer, chat_prompt(tokenizer, prompt))  # the template writes the begin token itself
    else:
        prompt_ids = encode(tokenizer, prompt, special=True)
    questions = tuple(
        Question(ask.cue, tuple(encode(tokenizer, ask.cue)), ask.gold, task.max_new_tokens, dict(ask.meta))
        for ask in asks
    )
    return split_sample(
        task,
        max_positions,
        id=id,
        prompt_ids=prompt_ids,
        trace_ids=encode(tokenizer, trace),
        questions=questions,
        meta=meta,
    )


def prompt_room(
    task: Task, tokenizer: PreTrainedTokenizerBase, max_positions: int, *, trace: str = "", asks: Sequence[Ask] = ()
) -> int:
    """Tokens that a prompt may have so that `build_sample` accepts it with this trace and these questions.

    Raises:
        ValueError: fewer than two.
    """
    frame = encode(tokenizer, chat_prompt(tokenizer, "")) if task.chat else encode(tokenizer, "", special=True)
    cues = max((len(encode(tokenizer, ask.cue)) + task.max_new_tokens for ask in asks), default=0)
    room = max_positions - len(frame) - len(encode(tokenizer, trace)) - cues
    if room < 2:
        raise ValueError(
            f"the model's {max_positions} positions leave no room for a prompt: {cues} go to the longest question with "
            f"task.max_new_tokens={task.max_new_tokens}; take fewer"
        )
    return room


def truncate_middle(tokenizer: PreTrainedTokenizerBase, text: str, most: int) -> tuple[str, int]:
    """Text of at most `most` tokens, its middle cut out if it has more, and how many tokens are gone.

    Beginning and end keep half each, as LongBench does (arXiv 2308.14508): instructions and question stand there.

    Raises:
        NotImplementedError: a tokenizer that does not say where its tokens stand in the text.
    """
    if not tokenizer.is_fast:
        raise NotImplementedError("task.truncate_middle=true needs a fast tokenizer")
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    places, before = encoded["offset_mapping"], len(encoded["input_ids"])
    if before <= most:
        return text, 0
    # Where the two ends meet, new tokens can form; then a little more has to go.
    for allowed in range(most, 1, -1):
        head, tail = allowed // 2, allowed - allowed // 2
        shorter = text[: places[head - 1][1]] + text[places[before - tail][0] :]
        after = len(encode(tokenizer, shorter))
        if after <= most:
            return shorter, before - after
    raise ValueError(f"cannot cut a text of {before} tokens to {most}")


def split_sample(
    task: Task,
    max_positions: int,
    *,
    id: str,
    prompt_ids: Sequence[int],
    trace_ids: Sequence[int] = (),
    questions: tuple[Question, ...] = (),
    meta: Mapping[str, Scalar] | None = None,
) -> Sample:
    """Move the border between prompt and trace to `task.prefill_tokens`, if that is set, and check the length.

    Raises:
        ValueError: no tokens in the prompt, or more tokens than `max_positions`.
    """
    if task.prefill_tokens is not None:
        context = [*prompt_ids, *trace_ids]
        prompt_ids, trace_ids = context[: task.prefill_tokens], context[task.prefill_tokens :]
    if not prompt_ids:
        raise ValueError(f"sample {id!r}: the prompt holds no tokens")
    context_tokens = len(prompt_ids) + len(trace_ids)
    answer_tokens = max((len(question.cue_ids) + question.max_new_tokens for question in questions), default=0)
    if context_tokens + answer_tokens > max_positions:
        raise ValueError(
            f"sample {id!r} needs {context_tokens + answer_tokens} positions ({context_tokens} of prompt and trace, "
            f"{answer_tokens} of cue and answer), but the model has {max_positions}: take shorter text or fewer "
            "task.max_new_tokens, or a model with a longer context"
        )
    return Sample(id, tuple(prompt_ids), tuple(trace_ids), questions, dict(meta or {}))

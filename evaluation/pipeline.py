"""Questions about one long context, which is read and compressed once: any press, ours or kvpress's, or none."""

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvstitch.evaluation.metrics import NonFiniteLogits
from kvstitch.evaluation.models import LoadedModel, stop_token_ids
from kvstitch.evaluation.streams import Stream
from kvstitch.presses import EvictionPress, RetrievalPress
from kvstitch.presses.eviction import EvictionRun

Press = Callable[[PreTrainedModel], AbstractContextManager]
# Never part of a text, so that a chat template can be cut where the context ends.
_MARK = "\x00kvstitch\x00"


class ContextPipeline:
    """Answers questions about a context, called like a transformers pipeline.

    Each question is asked of a copy of the cache as the context left it, so answers do not depend on which questions came
    before, and are those that the question would get alone. Decoding is greedy.

    Args:
        model: any causal language model, in eval mode.
        tokenizer: its tokenizer; a chat template is used if there is one.
    """

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase):
        self._loaded = LoadedModel(model, tokenizer)

    def __call__(
        self,
        context: str,
        questions: Sequence[str] | None = None,
        *,
        question: str | None = None,
        press: Press | None = None,
        max_new_tokens: int = 50,
        answer_prefix: str = "",
    ) -> dict[str, Any]:
        """Read the context, compress it, answer.

        With an `EvictionPress` the context is compressed before the questions if `compress_prompt` is set, and in any case
        every `interval` tokens from there on; one that never evicts anything although the context is longer than its budget
        is warned about. kvpress's presses compress the context; those that work while decoding are
        refused.

        Args:
            context: the text.
            questions: asked independently of each other.
            question: a single one, instead.
            press: `EvictionPress`, `RetrievalPress` or a kvpress press; None reads everything.
            max_new_tokens: most tokens of an answer.
            answer_prefix: how every answer begins.

        Returns:
            `{"answers": [...]}` for questions, `{"answer": ...}` for a question.

        Raises:
            ValueError: both or neither of `questions` and `question`, an empty one or one that is no text, an empty context, `max_new_tokens` below 1.
            NotImplementedError: a press that cannot work here.
        """
        if (questions is None) == (question is None):
            raise ValueError("give either `questions`, a list, or `question`, a text")
        if isinstance(questions, str):
            raise ValueError(f"`questions` must be a list of texts, got {questions!r}; write question={questions!r}")
        for each in [question] if questions is None else questions:
            if not isinstance(each, str) or not each:
                raise ValueError(f"a question must be a text that is not empty, got {each!r}")
        if questions is not None and not len(questions):
            raise ValueError("`questions` is empty")
        if not context:
            raise ValueError("`context` is empty")
        if max_new_tokens < 1:
            raise ValueError(f"`max_new_tokens` must be at least 1, got {max_new_tokens}")
        context_ids, asked = self._encode(context, [question] if questions is None else questions, answer_prefix)
        read = (
            _read_with_ours if press is None or isinstance(press, EvictionPress | RetrievalPress) else _read_with_theirs
        )
        with torch.no_grad(), read(self._loaded, press, context_ids) as answer:
            answers = [self._decode(answer(ids, max_new_tokens)) for ids in asked]
        return {"answer": answers[0]} if questions is None else {"answers": answers}

    def _encode(self, context: str, questions: Sequence[str], prefix: str) -> tuple[list[int], list[list[int]]]:
        """Tokens of the context with all that comes before it, and of each question with what leads to its answer."""
        tokenizer = self._loaded.tokenizer
        if tokenizer.chat_template is None:
            before, after = tokenizer.bos_token or "", "\n"
        else:
            messages = [{"role": "user", "content": _MARK}]
            template = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
            before, after = template.split(_MARK)
        encode = lambda text: tokenizer.encode(text, add_special_tokens=False)
        # The line break belongs to the context, so that the first word of a question is a word.
        return encode(before + context), [encode("\n" + question + after + prefix) for question in questions]

    def _decode(self, token_ids: Sequence[int]) -> str:
        return self._loaded.tokenizer.decode(token_ids, skip_special_tokens=True)


Answer = Callable[[Sequence[int], int], list[int]]


@contextmanager
def _read_with_ours(
    loaded: LoadedModel, press: EvictionPress | RetrievalPress | None, context_ids: Sequence[int]
) -> Iterator[Answer]:
    """The context in the cache; gives what answers a question from a copy of it."""
    if press is None:
        stream = Stream(loaded.model)
        stream.prefill(context_ids)
        yield lambda ids, most: _continue(loaded, stream, None, ids, most)
        return
    with press(loaded.model) as run:
        stream = Stream(loaded.model)
        stream.prefill(context_ids)
        run.end_prefill()
        is_over = isinstance(press, EvictionPress) and _is_over(press, run, len(context_ids))
        yield lambda ids, most: _continue(loaded, stream, press, ids, most)
        if is_over and not run.bound and not press.compress_prompt:
            warnings.warn(
                f"the press evicted nothing, although the context of {len(context_ids)} tokens is longer than "
                f"`budget`={press.budget}: no question and answer together reached `interval`={press.interval} tokens. "
                "compress_prompt=True in the press compresses the context before the questions",
                # Past the context manager: whoever called the pipeline.
                stacklevel=4,
            )


def _is_over(press: EvictionPress, run: EvictionRun, context_tokens: int) -> bool:
    """Whether the cache holds more than the budget, so that an event would evict something."""
    if press.budget.bytes is not None:
        return run.kept_bytes > press.budget.bytes
    seen = torch.tensor([context_tokens])
    return context_tokens > int(press.budget.slots(seen, bytes_per_slot=1, least=press.allocator.num_sinks + 1))


def _continue(
    loaded: LoadedModel, stream: Stream, press: EvictionPress | RetrievalPress | None, ids: Sequence[int], most: int
) -> list[int]:
    with stream.branch(press) as branch:
        if isinstance(press, RetrievalPress):
            # Retrieval is at work in forwards of a single token only.
            for token in ids:
                branch.feed([token])
        else:
            branch.feed(ids)
        return branch.greedy(most, stop_token_ids(loaded))


@contextmanager
def _read_with_theirs(loaded: LoadedModel, press: Press, context_ids: Sequence[int]) -> Iterator[Answer]:
    """A kvpress press at work while the context is read. Its cache forgets how long the text was, so positions are given."""
    refuse_decoding(press)
    stream = Stream(loaded.model)
    with press(loaded.model):
        stream.prefill(context_ids)
    yield lambda ids, most: theirs_at(loaded, stream, len(context_ids), ids, most)


def theirs_at(loaded: LoadedModel, stream: Stream, start: int, ids: Sequence[int], most: int) -> list[int]:
    """Greedy answer from a copy of a cache that no longer knows how long its text was.

    Args:
        stream: a context read with a kvpress press.
        start: tokens of the context.
        ids: what leads to the answer; may be empty.
        most: most tokens to decode.

    Raises:
        NonFiniteLogits: NaN instead of a prediction.
    """
    stop_ids = stop_token_ids(loaded)
    with stream.branch(None) as branch:
        tokens: list[int] = []
        last, fed = branch._last, list(ids)
        while True:
            if fed:
                positions = torch.arange(start, start + len(fed), device=loaded.model.device)[None]
                inputs = torch.tensor([fed], device=loaded.model.device)
                last = loaded.model(input_ids=inputs, position_ids=positions, past_key_values=branch.cache).logits[
                    0, -1
                ]
                start += len(fed)
            if last.isnan().any():
                raise NonFiniteLogits(f"the logits after {len(tokens)} decoded tokens hold NaN")
            fed = [int(last.argmax())]
            if fed[0] in stop_ids:
                return tokens
            tokens += fed
            if len(tokens) == most:
                return tokens


def refuse_decoding(press: Press) -> None:
    """Raises:
    NotImplementedError: a kvpress press that compresses while decoding.
    """
    # Not imported, because kvpress is an extra; whoever has such a press has it.
    names = {kind.__name__ for kind in type(press).__mro__}
    refused = names & {"DecodingPress", "PrefillDecodingPress", "DMSPress"}
    if refused:
        raise NotImplementedError(
            f"{refused.pop()} compresses while decoding, which this pipeline leaves to kvstitch's own presses; use "
            "EvictionPress(scorer=KVPressScorer(...), ...)"
        )
    if not callable(press):
        raise TypeError(f"`press` must be an EvictionPress, a RetrievalPress or a kvpress press, got {press!r}")

"""Several questions over one compressed context: each answer is the one that the question gets alone."""

import random
from importlib import import_module
from importlib.util import find_spec

import pytest
import torch
from transformers import DynamicCache

from kvstitch.evaluation.kvpress_bridge import ForKVPress
from kvstitch.evaluation.pipeline import ContextPipeline
from kvstitch.presses import RetrievalPress

# Installed and not importable is a failure, and no reason to skip.
kvpress = import_module("kvpress") if find_spec("kvpress") else None
needs_kvpress = pytest.mark.skipif(kvpress is None, reason="kvpress is not installed")

QUESTIONS = ["w7 w8 w9", "w40", "w11 w12 w13 w14 w15 w16 w17 w18 w19 w20"]


@pytest.fixture
def context():
    rng = random.Random(3)
    return " ".join(f"w{rng.randrange(3, 97)}" for _ in range(120))


@pytest.fixture
def pipeline(tiny):
    return ContextPipeline(*tiny)


@pytest.fixture(params=["none", "eviction", "while decoding", "retrieval", "kvpress"])
def press(request, make_press):
    if request.param == "kvpress" and kvpress is None:
        pytest.skip("kvpress is not installed")
    return {
        "none": lambda: None,
        "eviction": lambda: make_press(budget=40, compress_prompt=True),
        "while decoding": lambda: make_press(budget=40, interval=4),
        "retrieval": lambda: RetrievalPress(_pages(), budget=40, num_sinks=2, num_recent=8),
        "kvpress": lambda: kvpress.KnormPress(compression_ratio=0.6),
    }[request.param]()


def _pages():
    from kvstitch.allocators import PageRetrieval

    return PageRetrieval()


def test_each_answer_is_that_of_the_question_alone(pipeline, context, press):
    together = pipeline(context, QUESTIONS, press=press, max_new_tokens=6)["answers"]
    alone = [pipeline(context, question=question, press=press, max_new_tokens=6)["answer"] for question in QUESTIONS]
    assert together == alone and len(set(together)) > 1
    backwards = pipeline(context, QUESTIONS[::-1], press=press, max_new_tokens=6)["answers"]
    assert backwards == together[::-1]


def test_without_a_press_it_is_what_generate_writes(pipeline, tiny, context):
    (answer,) = pipeline(context, QUESTIONS[:1], max_new_tokens=8)["answers"]
    encode = lambda text: tiny.tokenizer.encode(text, add_special_tokens=False)
    ids = torch.tensor([encode("<s>" + context) + encode("\n" + QUESTIONS[0] + "\n")])
    wrote = tiny.model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, do_sample=False)
    assert answer == tiny.tokenizer.decode(wrote[0, ids.shape[1] :], skip_special_tokens=True)


def test_compression_changes_answers_and_the_model_is_as_it_was(pipeline, tiny, context, make_press):
    dense = pipeline(context, QUESTIONS, max_new_tokens=8)
    pressed = pipeline(context, QUESTIONS, press=make_press(budget=8, compress_prompt=True), max_new_tokens=8)
    assert pressed != dense and pipeline(context, QUESTIONS, max_new_tokens=8) == dense


@pytest.mark.parametrize("budget", [40, 0.5, "20KiB"])
def test_a_press_that_never_acts_says_so_once(pipeline, context, make_press, budget):
    idle = make_press(budget=budget, interval=512)
    message = r"evicted nothing, although the context of 121 tokens .*`interval`=512 tokens\. compress_prompt=True"
    with pytest.warns(UserWarning, match=message) as caught:
        pipeline(context, QUESTIONS, press=idle, max_new_tokens=3)
    assert len(caught) == 1 and caught[0].filename == __file__


@pytest.mark.parametrize(
    "options",
    [
        {"budget": 40, "interval": 512, "compress_prompt": True},
        {"budget": 40, "interval": 4},
        # The context fits, so that nothing is amiss.
        {"budget": 121, "interval": 512},
        {"budget": 1.0, "interval": 512},
        {"budget": "1MiB", "interval": 512},
    ],
)
def test_a_press_that_acts_or_has_nothing_to_do_says_nothing(pipeline, context, make_press, options, recwarn):
    pipeline(context, QUESTIONS, press=make_press(**options), max_new_tokens=6)
    assert not recwarn.list


def test_a_chat_template_is_cut_where_the_context_ends(tiny, context):
    tiny.tokenizer.chat_template = "w3 {{ messages[0]['content'] }} w4 w5"
    pipeline = ContextPipeline(*tiny)
    context_ids, (asked,) = pipeline._encode(context, ["w9"], " w6")
    decode = lambda ids: tiny.tokenizer.decode(ids).split()
    assert decode(context_ids) == ["w3", *context.split()] and decode(asked) == ["w9", "w4", "w5", "w6"]


@needs_kvpress
def test_a_kvpress_press_gives_what_its_own_pipeline_gives(pipeline, tiny, context):
    press = kvpress.KnormPress(compression_ratio=0.5)
    context_ids, asked = pipeline._encode(context, QUESTIONS, "")
    theirs = _their_answers(tiny, press, context_ids, asked)
    assert pipeline(context, QUESTIONS, press=press, max_new_tokens=6)["answers"] == theirs


def _their_answers(tiny, press, context_ids, asked):
    """kvpress's own pipeline from its `_forward` on, so that tokens are the same."""
    pipe = kvpress.KVPressTextGenerationPipeline(model=tiny.model, tokenizer=tiny.tokenizer)
    inputs = {"context_ids": torch.tensor([context_ids]), "questions_ids": [torch.tensor([ids]) for ids in asked]}
    with torch.no_grad():
        return pipe._forward(inputs, max_new_tokens=6, press=press, cache=DynamicCache())


@needs_kvpress
def test_our_press_in_their_pipeline_gives_what_ours_gives(pipeline, tiny, context, make_press):
    press = make_press(budget=40, compress_prompt=True)
    context_ids, asked = pipeline._encode(context, QUESTIONS, "")
    assert (
        _their_answers(tiny, ForKVPress(press), context_ids, asked)
        == pipeline(context, QUESTIONS, press=press, max_new_tokens=6)["answers"]
    )


def test_the_layers_that_are_handed_over_are_stock_and_small(tiny, make_press):
    cache = DynamicCache()
    with torch.no_grad(), ForKVPress(make_press(budget=24, compress_prompt=True))(tiny.model):
        tiny.model.model(input_ids=torch.randint(3, 97, (1, 60)), past_key_values=cache)
    assert {type(layer).__name__ for layer in cache.layers} == {"DynamicLayer"}
    assert cache.get_seq_length() == 24 and cache.layers[0].keys.untyped_storage().nbytes() == 24 * 2 * 16 * 4


def test_what_cannot_work_is_refused(pipeline, context, make_press):
    for arguments, message in (
        ({}, "give either"),
        ({"questions": ["w3"], "question": "w3"}, "give either"),
        ({"questions": "w3"}, "must be a list of texts, got 'w3'"),
        ({"questions": []}, "`questions` is empty"),
        ({"questions": ["w3", 1]}, "must be a text that is not empty, got 1"),
        ({"question": ""}, "must be a text that is not empty, got ''"),
        ({"question": "w3", "max_new_tokens": 0}, "must be at least 1, got 0"),
    ):
        with pytest.raises(ValueError, match=message):
            pipeline(context, **arguments)
    with pytest.raises(ValueError, match="`context` is empty"):
        pipeline("", question="w3")
    with pytest.raises(TypeError, match="got 'snapkv'"):
        pipeline(context, question="w3", press="snapkv")
    with pytest.raises(ValueError, match="needs compress_prompt=True"):
        ForKVPress(make_press())


@needs_kvpress
def test_a_press_that_compresses_while_decoding_is_refused(pipeline, context):
    press = kvpress.DecodingPress(kvpress.KnormPress(), target_size=32, compression_interval=16)
    with pytest.raises(NotImplementedError, match="DecodingPress compresses while decoding"):
        pipeline(context, question="w3", press=press)

"""What is asked about each English subset of LongBench, and how; graders and lengths are the paper's (arXiv 2308.14508)."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Subset:
    """One subset.

    Args:
        context: text with {context}.
        question: what follows, with {input}.
        grader: name of a grader.
        max_new_tokens: most tokens of an answer.
        chat: whether a chat model gets it as a user's message; not where worked examples or code are to be continued.
    """

    context: str
    question: str
    grader: str
    max_new_tokens: int
    chat: bool = True


def _answered_briefly(kind: str, tokens: int, extra: str = "") -> Subset:
    context = f"Read the {kind} and answer the question that follows it.\n\n{{context}}\n\n"
    question = f"Answer with a few words and without any explanation.{extra}\n\nQuestion: {{input}}\nAnswer:"
    return Subset(context, question, "token_f1", tokens)


def _summarised(kind: str, plural: str) -> Subset:
    context = f"Read the {kind}; a summary of one page is wanted.\n\n{{context}}\n\n"
    return Subset(context, f"Summarise {plural} on one page.\n\nSummary:", "rouge_l", 512)


def _continued(task: str, grader: str, tokens: int) -> Subset:
    return Subset(f"{task} Some worked examples come first.\n\n{{context}}\n", "{input}", grader, tokens, chat=False)


_CODE = Subset("Continue the code with its next line.\n{context}", "{input}", "code_similarity", 64, chat=False)
_UNANSWERABLE = ' Write "unanswerable" if the article does not tell; answer yes or no where that is asked.'

SUBSETS = {
    "narrativeqa": _answered_briefly("story", 128),
    "qasper": _answered_briefly("scientific article", 128, _UNANSWERABLE),
    "multifieldqa_en": _answered_briefly("text", 64),
    "hotpotqa": _answered_briefly("passages", 32),
    "2wikimqa": _answered_briefly("passages", 32),
    "musique": _answered_briefly("passages", 32),
    "gov_report": _summarised("report of a government agency", "the report"),
    "qmsum": Subset(
        "Read the transcript of a meeting and answer the query that follows it.\n\n{context}\n\n",
        "Answer in one or more sentences.\n\nQuery: {input}\nAnswer:",
        "rouge_l",
        512,
    ),
    "multi_news": _summarised("news articles", "all the news"),
    "trec": _continued("Name the type of the last question.", "class_label", 64),
    "triviaqa": _continued("Answer the last question with a few words.", "token_f1_first_line", 32),
    "samsum": _continued("Summarise the last dialogue in a few short sentences.", "rouge_l_first_line", 128),
    "passage_count": Subset(
        "Some of the paragraphs below are repeated.\n\n{context}\n\n",
        "How many different paragraphs are there? Answer with the number alone.\n\nAnswer:",
        "number_share",
        32,
    ),
    "passage_retrieval_en": Subset(
        "Read the numbered paragraphs; the summary of one of them follows.\n\n{context}\n\n",
        'Summary: {input}\n\nWhich paragraph was summarised? Answer in the form "Paragraph 1".\n\nAnswer:',
        "number_share",
        32,
    ),
    "lcc": _CODE,
    "repobench-p": _CODE,
}

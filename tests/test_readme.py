"""What the README shows works as it stands there."""

import re
from pathlib import Path

import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from kvstitch.allocators import SegmentQuota
from kvstitch.evaluation.pipeline import ContextPipeline
from kvstitch.evaluation.smollm2 import smollm2_folder
from kvstitch.presses import EvictionPress
from kvstitch.scorers import TOVA, Scorer
from kvstitch.views import LayerView

ROOT = Path(__file__).resolve().parents[1]
BLOCKS = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), flags=re.DOTALL)


def test_ten_lines(capsys):
    names: dict = {}
    exec(compile(BLOCKS[0], "README.md", "exec"), names)
    printed = capsys.readouterr().out
    run = names["run"]
    assert run.num_events >= 3 and max(run.stored_tokens) <= 64 + 32
    assert f"{run.stored_bytes} {run.seen_tokens}" in printed and "event 0 at" in printed


def test_the_scorer_of_add_a_scorer():
    names: dict = {"__name__": "readme"}
    exec(compile(BLOCKS[1], "README.md", "exec"), names)
    scorer = names["ValueNorm"]()
    assert isinstance(scorer, Scorer)
    positions = torch.arange(5).expand(1, 2, 5)
    values = torch.randn(1, 2, 5, 4, generator=torch.Generator().manual_seed(0))
    view = LayerView(values, values, positions, positions >= 0, 0.5, torch.tensor([5]), 0, 1)
    assert torch.equal(scorer.score(view), values.norm(dim=-1))


def test_several_questions_over_one_context():
    """What the text says in one line, with a small random model in place of the embedded one."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    snippet = re.search(r"`(ContextPipeline\(.+\[\"answers\"\])`", text).group(1)
    tokenizer = AutoTokenizer.from_pretrained(smollm2_folder())
    shape = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id, **shape)
    ).eval()
    press = EvictionPress(TOVA(), SegmentQuota.recommended(), budget=64, interval=512, compress_prompt=True)
    names = {"ContextPipeline": ContextPipeline, "model": model, "tokenizer": tokenizer, "press": press}
    names |= {"context": "The river rose in spring. " * 40, "questions": ["Why?", "When?"]}
    answers = eval(compile(snippet, "README.md", "eval"), names)
    assert len(answers) == 2 and all(isinstance(answer, str) for answer in answers)
    dense = eval(compile(snippet, "README.md", "eval"), names | {"press": None})
    # The press acted: a random model answers otherwise without it.
    assert answers != dense


def test_every_config_in_the_tables_exists():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    for group in ("scorer", "allocator"):
        for name in (path.stem for path in (ROOT / "configs" / group).glob("*.yaml")):
            shown = name in text or f"…{name.removeprefix('segment_quota')}" in text
            assert (
                shown or group == "allocator" and "retrieval" in (ROOT / f"configs/{group}/{name}.yaml").read_text()
            ), name

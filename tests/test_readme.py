"""What the README shows works as it stands there."""

import re
from pathlib import Path

import torch

from kvstitch.scorers import Scorer
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


def test_every_config_in_the_tables_exists():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    for group in ("scorer", "allocator"):
        for name in (path.stem for path in (ROOT / "configs" / group).glob("*.yaml")):
            shown = name in text or f"…{name.removeprefix('segment_quota')}" in text
            assert (
                shown or group == "allocator" and "retrieval" in (ROOT / f"configs/{group}/{name}.yaml").read_text()
            ), name

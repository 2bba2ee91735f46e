"""Compare methods on your own text: ask questions about it, with the whole cache and with compressed ones.

python examples/compare_methods.py book.txt "Who keeps the lighthouse?" "Where is it?"
"""

import argparse
from pathlib import Path

from kvstitch.allocators import GlobalTopK, SegmentQuota
from kvstitch.evaluation.models import load_hub, load_smollm2
from kvstitch.evaluation.pipeline import ContextPipeline
from kvstitch.presses import EvictionPress
from kvstitch.scorers import TOVA, KeyDiff, SnapKV

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("text", type=Path, help="a UTF-8 text file")
parser.add_argument("questions", nargs="+")
parser.add_argument("--model", help="hub id or folder; default: the embedded model")
parser.add_argument("--budget", type=int, default=256, help="slots a kv head")
parser.add_argument("--new-tokens", type=int, default=40)
options = parser.parse_args()

pipeline = ContextPipeline(*(load_hub(options.model) if options.model else load_smollm2()))
recent = min(32, options.budget // 4)
parts = {
    "SnapKV, one pool a head": (SnapKV(), GlobalTopK(num_recent=recent)),
    "KeyDiff, one pool a head": (KeyDiff(), GlobalTopK(num_recent=recent)),
    "TOVA, mass segments": (TOVA(), SegmentQuota.recommended(num_recent=recent)),
}
presses = {name: EvictionPress(*pair, options.budget, compress_prompt=True) for name, pair in parts.items()}
context = options.text.read_text(encoding="utf-8")
for name, press in {"the whole cache": None, **presses}.items():
    found = pipeline(context, options.questions, press=press, max_new_tokens=options.new_tokens)
    print(f"\n== {name}")
    for question, answer in zip(options.questions, found["answers"]):
        print(f"{question}\n    {' '.join(answer.split())}")

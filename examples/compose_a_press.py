"""Compose a press from a scorer and an allocator, and see what the cache holds.

python examples/compose_a_press.py
"""

import argparse

from kvstitch.allocators import GlobalTopK, SegmentQuota
from kvstitch.evaluation.models import load_hub, load_smollm2
from kvstitch.presses import EvictionPress
from kvstitch.scorers import TOVA, KeyDiff

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--model", help="hub id or folder; default: the embedded model")
parser.add_argument("--prompt", default="Once upon a time there was a lighthouse keeper who")
parser.add_argument("--new-tokens", type=int, default=200)
parser.add_argument("--budget", type=int, default=64, help="slots a kv head")
options = parser.parse_args()

model, tokenizer = load_hub(options.model) if options.model else load_smollm2()
inputs = tokenizer(options.prompt, return_tensors="pt").to(model.device)

# Any scorer (which tokens matter) goes with any allocator (how many, where).
presses = {
    "TOVA, one pool a head": EvictionPress(TOVA(), GlobalTopK(num_recent=8), options.budget, interval=32),
    "TOVA, mass segments": EvictionPress(TOVA(), SegmentQuota.recommended(num_recent=8), options.budget, interval=32),
    "KeyDiff, mass segments": EvictionPress(
        KeyDiff(), SegmentQuota.recommended(num_recent=8), options.budget, interval=32
    ),
}
for name, press in presses.items():
    with press(model) as run:
        output = model.generate(**inputs, max_new_tokens=options.new_tokens, do_sample=False)
    print(f"\n== {name}: {run.seen_tokens} tokens seen, {max(run.stored_tokens)} slots stored, {run.num_events} events")
    print(tokenizer.decode(output[0, inputs.input_ids.shape[1] :], skip_special_tokens=True)[:200])
    print("oldest positions that layer 0, head 0 still holds:", run.positions(layer=0)[0, 0, :12].tolist())

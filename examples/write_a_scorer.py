"""Write a scorer in one file: keep tokens whose values are long, and compare it with chance.

python examples/write_a_scorer.py book.txt
"""

import argparse
from dataclasses import dataclass
from pathlib import Path

from jaxtyping import Float32
from torch import Tensor

from kvstitch.allocators import GlobalTopK
from kvstitch.evaluation.models import load_hub, load_smollm2
from kvstitch.evaluation.replay import replay_sample
from kvstitch.evaluation.tasks import Text
from kvstitch.presses import EvictionPress
from kvstitch.scorers import Random, Scorer
from kvstitch.views import LayerView


@dataclass(frozen=True)
class ValueNorm(Scorer):
    """Length of each token's value vector, mixed with how new it is.

    Args:
        recency: share of the newest positions' advantage, 0 for none.
    """

    recency: float = 0.0

    def score(self, view: LayerView) -> Float32[Tensor, "B H T"]:
        lengths = view.values.float().norm(dim=-1)
        newest = view.next_position.view(-1, 1, 1)
        return lengths / lengths.amax(dim=-1, keepdim=True) + self.recency * view.positions / newest


parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("text", type=Path, help="a UTF-8 text file")
parser.add_argument("--model", help="hub id or folder; default: the embedded model")
parser.add_argument("--length", type=int, default=1024, help="tokens that are replayed")
parser.add_argument("--budget", type=int, default=128, help="slots a kv head")
options = parser.parse_args()

loaded = load_hub(options.model) if options.model else load_smollm2()
interval = options.length // 8
task = Text(path=str(options.text), length=options.length, num_samples=1, prefill_tokens=interval)
(sample,) = task.samples(loaded.tokenizer, options.length + 16)
for scorer in (ValueNorm(), ValueNorm(recency=0.5), Random()):
    press = EvictionPress(scorer, GlobalTopK(num_recent=8), options.budget, interval)
    metrics = replay_sample(loaded, press, task, sample, interval=interval, speed_tokens=0).record["metrics"]
    print(f"{scorer}: KL {metrics['kl']:.4f} nats, top-1 agreement {100 * metrics['top1_agreement']:.1f} %")

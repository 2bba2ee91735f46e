"""Take the query statistics that TriAttention can score with, from any model and any text.

python scripts/calibrate.py text=book.txt output=smollm2.safetensors
python scripts/calibrate.py authors_file=released.pt output=smollm2.safetensors
python scripts/run.py scorer=triattention scorer.statistics=smollm2.safetensors
"""

import hashlib
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import hydra
from hydra.utils import instantiate
from hydra_errors import require_keys
from omegaconf import DictConfig, OmegaConf
from run import CONFIGS, guarded

from kvstitch.evaluation.records import RunError
from kvstitch.evaluation.tasks.sources import read_text

if TYPE_CHECKING:
    from kvstitch.scorers import TriAttentionStatistics


def calibrate(config: DictConfig) -> None:
    """Take the statistics from a text or from a file of the authors, write them."""
    require_keys(OmegaConf.to_container(config, resolve=False), CONFIGS, "calibrate")
    plain = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
    for option in ("output", "text", "authors_file"):
        if not isinstance(plain[option], str) and (option == "output" or plain[option] is not None):
            raise RunError(f"{option} must be the name of a file, got {plain[option]!r}")
    output = Path(plain["output"])
    if output.suffix != ".safetensors":
        raise RunError(f"output must end in .safetensors, got {plain['output']}")
    if output.exists():
        raise RunError(f"{output} exists already; nothing is overwritten, choose another output")
    if (plain["text"] is None) == (plain["authors_file"] is None):
        raise RunError("give one of the two: text=FILE to calibrate on, or authors_file=FILE.pt to bring into our form")
    if plain["text"] is None:
        statistics, source = _imported(plain)
    else:
        statistics, source = _calibrated(plain)
    output.parent.mkdir(parents=True, exist_ok=True)
    statistics.save(output)
    print(f"{output}: {statistics.mean.shape[0]} layers, {source}")


def _calibrated(plain: dict) -> tuple["TriAttentionStatistics", str]:
    """Run the dense model over the text; statistics, and what they were taken from."""
    text = read_text(Path(plain["text"]).expanduser(), "text")
    for option in ("tokens", "chunk_tokens"):
        if not isinstance(plain[option], int) or plain[option] < 16:
            raise RunError(f"{option} must be a whole number of at least 16, got {plain[option]!r}")
    # Here and not above: torch and transformers take seconds, which a typo should not cost.
    from kvstitch.evaluation.models import max_positions
    from kvstitch.presses.calibration import collect_query_statistics
    from kvstitch.scorers import TriAttentionStatistics

    loaded = instantiate(plain["model"])
    limit = max_positions(loaded.model)
    if plain["tokens"] > limit:
        raise RunError(f"tokens must be at most {limit}, the positions of the model, got {plain['tokens']}")
    ids = loaded.tokenizer(text, return_tensors="pt", add_special_tokens=False).input_ids[:, : plain["tokens"]]
    if ids.shape[1] < 256:
        raise RunError(f"{plain['text']} has {ids.shape[1]} tokens; at least 256 are needed, 1,000 are better")
    layers, rotary = collect_query_statistics(loaded.model, ids, plain["chunk_tokens"])
    statistics = TriAttentionStatistics.from_running(
        layers,
        rotary,
        model=str(loaded.model.config.name_or_path or type(loaded.model).__name__),
        dtype=str(loaded.model.dtype).removeprefix("torch."),
        text_sha256=hashlib.sha256(text.encode()).hexdigest(),
    )
    return statistics, f"{ids.shape[1]} tokens of {plain['text']}"


def _imported(plain: dict) -> tuple["TriAttentionStatistics", str]:
    """Read a file of the authors for the model; statistics, and how many heads they cover."""
    path = Path(plain["authors_file"]).expanduser()
    if not path.is_file():
        raise RunError(f"authors_file={plain['authors_file']}: no such file")
    from kvstitch.presses.model import read_model
    from kvstitch.scorers import TriAttentionStatistics
    from kvstitch.views import Needs

    facts = read_model(instantiate(plain["model"]).model, Needs(rotary=True))
    try:
        statistics = TriAttentionStatistics.from_authors_file(
            path, facts.rotary, facts.num_layers, facts.num_query_heads, facts.head_dim
        )
    except ValueError as error:
        raise RunError(str(error)) from error
    covered = int((statistics.count != 0).sum())
    return statistics, f"{covered} of {statistics.count.numel()} heads of {plain['authors_file']}"


def main() -> int:
    """Exit status: 0 done, 1 refused or failed, 130 interrupted."""
    os.environ["HYDRA_FULL_ERROR"] = "1"
    statuses: list[int] = []

    @hydra.main(version_base="1.3", config_path=str(CONFIGS), config_name="calibrate")
    def job(config: DictConfig) -> None:
        statuses.append(guarded(lambda: calibrate(config), "calibrate"))

    try:
        return max([guarded(job, "calibrate"), *statuses])
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())

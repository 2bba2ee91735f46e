"""Take the query statistics that TriAttention can score with, from any model and any text.

python scripts/calibrate.py text=book.txt output=smollm2.safetensors
python scripts/run.py scorer=triattention scorer.statistics=smollm2.safetensors
"""

import hashlib
import os
import sys
from pathlib import Path

import hydra
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf
from run import CONFIGS, guarded

from kvstitch.evaluation.records import RunError
from kvstitch.evaluation.tasks.sources import read_text


def calibrate(config: DictConfig) -> None:
    """Read the text, run the dense model over it, write the file."""
    plain = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
    output = Path(plain["output"])
    if output.suffix != ".safetensors":
        raise RunError(f"output must end in .safetensors, got {plain['output']}")
    if output.exists():
        raise RunError(f"{output} exists already; nothing is overwritten, choose another output")
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
    output.parent.mkdir(parents=True, exist_ok=True)
    statistics.save(output)
    print(f"{output}: {len(layers)} layers, {ids.shape[1]} tokens of {plain['text']}")


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

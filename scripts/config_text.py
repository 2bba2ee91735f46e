"""The text of a run's configuration as it stands in its folder: what a run is, and what it is recognised by."""

from collections.abc import Mapping
from typing import Any

from omegaconf import OmegaConf


def config_text(plain: Mapping[str, Any]) -> str:
    """YAML of a resolved configuration, without what does not change the result."""
    return OmegaConf.to_yaml(OmegaConf.create(dict(plain)), sort_keys=True)

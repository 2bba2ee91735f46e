"""Hydra configuration, one YAML per class."""

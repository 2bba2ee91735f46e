"""Mass segments with quotas: where the slots of a budget go (AMS, arXiv 2605.23200)."""

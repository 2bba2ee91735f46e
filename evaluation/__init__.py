"""Tasks, replay, generation, metrics, records and plots."""

"""What a window of recent queries attends to among the stored slots."""

from kvstitch.kernels.window_attention.api import window_attention, window_usage, window_usage_layers

__all__ = ["window_attention", "window_usage", "window_usage_layers"]

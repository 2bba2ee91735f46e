"""What a scorer or an allocator may see of one cached layer; imports torch only."""

from kvstitch.views.layer import LayerView
from kvstitch.views.needs import Needs
from kvstitch.views.queries import QueryStatistics, QueryWindow
from kvstitch.views.rotary import Rotary

__all__ = ["LayerView", "Needs", "QueryStatistics", "QueryWindow", "Rotary"]

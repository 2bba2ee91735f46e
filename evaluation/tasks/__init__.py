"""Sources of samples: generated, from text, from records. A new one is a module here and a YAML in configs/task."""

from kvstitch.evaluation.tasks.babilong import BabiLong
from kvstitch.evaluation.tasks.base import Question, Sample, Task
from kvstitch.evaluation.tasks.data_sets import Hub, JsonLines
from kvstitch.evaluation.tasks.key_values import KeyValues
from kvstitch.evaluation.tasks.line_retrieval import LineRetrieval
from kvstitch.evaluation.tasks.long_bench import LongBench, LongBenchV2, RepoBenchP
from kvstitch.evaluation.tasks.math_problems import AIME24, AIME25, GSM8K, Math500
from kvstitch.evaluation.tasks.needle import Needle
from kvstitch.evaluation.tasks.needle_grid import NeedleGrid
from kvstitch.evaluation.tasks.reasoning import Reasoning
from kvstitch.evaluation.tasks.ruler import Ruler
from kvstitch.evaluation.tasks.sources import BadRecord
from kvstitch.evaluation.tasks.state_tracking import StateTracking
from kvstitch.evaluation.tasks.text import Text

__all__ = [
    "AIME24",
    "AIME25",
    "BabiLong",
    "BadRecord",
    "GSM8K",
    "Hub",
    "JsonLines",
    "KeyValues",
    "LineRetrieval",
    "LongBench",
    "LongBenchV2",
    "Math500",
    "Needle",
    "NeedleGrid",
    "Question",
    "Reasoning",
    "RepoBenchP",
    "Ruler",
    "Sample",
    "StateTracking",
    "Task",
    "Text",
]

"""Sources of samples: generated, from text, from records. A new one is a module here and a YAML in configs/task."""

from kvstitch.evaluation.tasks.base import Question, Sample, Task
from kvstitch.evaluation.tasks.needle import Needle
from kvstitch.evaluation.tasks.reasoning import Reasoning
from kvstitch.evaluation.tasks.records import BadRecord, Hub, JsonLines
from kvstitch.evaluation.tasks.text import Text

__all__ = ["BadRecord", "Hub", "JsonLines", "Needle", "Question", "Reasoning", "Sample", "Task", "Text"]

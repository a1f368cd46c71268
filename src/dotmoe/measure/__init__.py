"""Everything that `dotmoe evaluate` measures, of whatever a user can name."""

from dotmoe.measure.config import MeasureConfig, TasksConfig
from dotmoe.measure.fidelity import measure_fidelity
from dotmoe.measure.generation import measure_generation
from dotmoe.measure.models import gguf_file, model_folder
from dotmoe.measure.perplexity import measure, measure_both
from dotmoe.measure.tasks import measure_tasks
from dotmoe.measure.word_perplexity import measure_words

__all__ = [
    "MeasureConfig",
    "TasksConfig",
    "gguf_file",
    "measure",
    "measure_both",
    "measure_fidelity",
    "measure_generation",
    "measure_tasks",
    "measure_words",
    "model_folder",
]

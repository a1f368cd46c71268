"""Stage evaluate: measurements of a model, each number with the protocol beside it."""

from dotmoe.measure.config import EvaluateConfig as EvaluateConfig
from dotmoe.measure.evaluate.measurements import MEASUREMENTS as MEASUREMENTS
from dotmoe.measure.evaluate.measurements import evaluate as evaluate

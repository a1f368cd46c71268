"""Report: shows result files as tables, sentences and one picture. It computes no result again."""

from dotmoe.measure.report.results import RIVALS as RIVALS
from dotmoe.measure.report.results import RunResults as RunResults

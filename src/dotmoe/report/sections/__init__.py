"""The sections of the page, in their order, each from result files."""

from dotmoe.report.sections.behaviour import fidelity, generation
from dotmoe.report.sections.experts import analyses, experts
from dotmoe.report.sections.making import configuration, origins, verification
from dotmoe.report.sections.parts import Context, Missing, Part, Section
from dotmoe.report.sections.quality import active_experts, perplexity, tasks, word_perplexity
from dotmoe.report.sections.size import size, speed
from dotmoe.report.sections.training import alignment, overhead, recovery
from dotmoe.report.sections.verdict import verdict

__all__ = ["SECTIONS", "Context", "Missing", "Part", "Section", "verdict"]

SECTIONS = (
    (perplexity, "6_evaluate/results.json"),
    (tasks, "6_evaluate/tasks"),
    (active_experts, "6_evaluate/curve.json"),
    (word_perplexity, "6_evaluate/word_perplexity.json"),
    (fidelity, "6_evaluate/fidelity.json"),
    (generation, "6_evaluate/generation.json"),
    (size, "6_evaluate/results.json"),
    (speed, "6_evaluate/bench.json"),
    (experts, "6_evaluate/analysis"),
    (alignment, "2_align/metrics.jsonl"),
    (recovery, "4_finetune/metrics.jsonl"),
    (analyses, "6_evaluate/analysis"),
    (overhead, "6_evaluate/analysis/overhead_profile.json"),
    (verification, "6_evaluate/results.json"),
    (configuration, "config.json"),
    (origins, "6_evaluate"),
)
"""What makes each section, and the file that it reads."""

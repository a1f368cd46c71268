"""What became of the experts: load, overlap, outputs, history and cost of a finished run."""

from dotmoe.analysis.expert_outputs import Sample, expert_outputs_tsne, sampled_pairs
from dotmoe.analysis.history import kept_from_start, metric_columns, settling
from dotmoe.analysis.overhead import ProfiledRun, overhead_profile
from dotmoe.analysis.overlap import matched_overlap, normalised_mutual_information, routing_overlap
from dotmoe.analysis.routing import Routes, captured_routes
from dotmoe.analysis.utilisation import (
    LoadStatistics,
    expert_utilisation,
    load_shares,
    load_statistics,
    warnings_of,
)

__all__ = [
    "LoadStatistics",
    "ProfiledRun",
    "Routes",
    "Sample",
    "captured_routes",
    "expert_outputs_tsne",
    "expert_utilisation",
    "kept_from_start",
    "load_shares",
    "load_statistics",
    "matched_overlap",
    "metric_columns",
    "normalised_mutual_information",
    "overhead_profile",
    "routing_overlap",
    "sampled_pairs",
    "settling",
    "warnings_of",
]

"""The stages of a run in their order, and the subfolder of each."""

from pathlib import Path

STAGES = {
    "data": "0_data",
    "calibrate": "1_calibrate",
    "align": "2_align",
    "extract": "3_extract",
    "finetune": "4_finetune",
    "export": "5_export",
    "evaluate": "6_evaluate",
    "report": "7_report",
}


def from_stage_on(name: str) -> list[str]:
    """A stage and all that come after it."""
    names = list(STAGES)
    return names[names.index(name) :]


def export_folder(path: Path) -> Path:
    """The model folder meant by a path: the export of a run folder, or the path itself."""
    export = path / STAGES["export"]
    return export if any(export.glob("*")) else path

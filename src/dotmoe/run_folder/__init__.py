"""Where a run lives: a subfolder a stage, a finish marker each, the config and the provenance."""

from dotmoe.run_folder.folder import RunFolder
from dotmoe.run_folder.provenance import provenance
from dotmoe.run_folder.stages import STAGES, export_folder
from dotmoe.run_folder.whole_files import read_json, write_json, write_text

__all__ = [
    "STAGES",
    "RunFolder",
    "export_folder",
    "provenance",
    "read_json",
    "write_json",
    "write_text",
]

"""Settings and order of all tests; the fixtures that they share are in `shared_fixtures.py`."""

import gc
import os
from pathlib import Path

# Read by the Hugging Face libraries when they are imported, so they are set before any import.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_DATASETS_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["OMP_NUM_THREADS"] = "1"  # a fork waits for ever for more

LONG = (
    *("export/test_formats.py", "distributed/test_alignment_on_ranks.py"),
    *("finetune/test_repair.py", "inspection/test_simulated_memory.py"),
    *("baselines/test_compare.py", "pruning/test_pruning.py", "finetune/test_stage.py"),
    *("repo/test_commands.py", "contract/test_contract_runs.py", "e2e/test_convert.py"),
)
"""Files that take longest: they begin first, so that in the end no worker waits for another."""


def pytest_collection_modifyitems(items):
    """Workers of `make test` take whole files, in this order."""
    place = {item: item.path.relative_to(Path(__file__).parent).as_posix() for item in items}
    items.sort(key=lambda item: LONG.index(place[item]) if place[item] in LONG else len(LONG))


def pytest_collection_finish():
    """What is imported stays: no search for garbage goes through it."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure():
    gc.unfreeze()


def pytest_configure(config):
    """Fixtures are imported where tests run: what deals them out to workers needs no library."""
    if hasattr(config, "workerinput") or config.getoption("dist", "no") == "no":
        config.pluginmanager.import_plugin("shared_fixtures")
        if os.environ.get("OTHER_CPU"):
            config.pluginmanager.import_plugin("another_cpu")

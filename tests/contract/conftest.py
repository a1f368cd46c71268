"""What the contract tests share: exact tiny models, and commands as a user gives them.

These tests reach dotmoe through its command line, its public names and the files it writes. They
know nothing of its modules, so they hold for any code that does the same.
"""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch

from runs import GRANITE_FACTORS, TinyRun, rewritten

GOLDEN = Path(__file__).parent / "golden"
FEW_TOKENS = {
    "no_repair": [],
    "expert_size": 16,
    "active_experts": 3,
    "shared": 0.0,
    "seq_len": 32,
    "eval_tokens": 256,
    "calibration_tokens": 128,
    "scale_tokens": 128,
    "verify_tokens": 64,
}


def exact_numbers(name, old, generator):
    """Random multiples of a power of two, exact in every dtype and the same on every CPU."""
    whole = torch.randint(-31, 32, old.shape, generator=generator).float() / 32
    if name.endswith("norm.weight"):
        return 1 + whole / 4
    return whole / (4 if old.dim() == 2 and "embed" not in name else 2)


@pytest.fixture(scope="session")
def exact_model(tiny_dense, tmp_path_factory):
    """Writes a tiny model of a family whose weights are the same on every machine."""

    def make(family, **options):
        factors = GRANITE_FACTORS if family == "granite" else {}
        source = tiny_dense(family, **factors, **options)
        folder = tmp_path_factory.mktemp("exact") / family
        shutil.copytree(source, folder)
        generator = torch.Generator().manual_seed(7)
        with rewritten(folder) as weights:
            for name, old in sorted(weights.items()):
                weights[name] = exact_numbers(name, old, generator).to(old.dtype)
        return folder

    return make


@pytest.fixture(scope="session")
def fixed_run(exact_model, text_file, tmp_path_factory):
    """Folder of a run whose experts are drawn from a seed, by whole numbers alone; made once."""
    made = {}

    def make(family, model_options=None, **options):
        key = json.dumps([family, model_options, options])
        if key not in made:
            out = tmp_path_factory.mktemp("fixed") / "run"
            model = exact_model(family, **model_options or {})
            options = {"method": "random_split", "data": text_file, **FEW_TOKENS, **options}
            made[key] = TinyRun("convert", model, out, options).made().folder
        return made[key]

    return make


@pytest.fixture
def golden():
    """Compares a value with `golden/NAME.json`; DOTMOE_NEW_GOLDEN=1 writes that file instead."""

    def compare(name, found):
        path = GOLDEN / f"{name}.json"
        if os.environ.get("DOTMOE_NEW_GOLDEN"):
            path.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")
        return json.loads(path.read_text())

    return compare

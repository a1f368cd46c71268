"""The main commands where only PyTorch, Transformers and what these need are installed."""

import subprocess
import sys

import pytest

ABSENT = (
    *("datasets", "tyro", "docstring_parser", "lm_eval", "gguf", "accelerate", "beartype"),
    *("ot", "sklearn", "matplotlib"),
)
HIDE = f"""
import importlib.machinery, importlib.metadata, sys

def hide(finder, name):
    find = getattr(finder, name)
    def found(cls, fullname, *rest):
        if fullname.partition(".")[0] in {ABSENT}:
            return None
        return find(fullname, *rest)
    setattr(finder, name, classmethod(found))

hide(importlib.machinery.PathFinder, "find_spec")
known = importlib.metadata.Distribution.from_name
def from_name(cls, name):
    if name in {ABSENT}:
        raise importlib.metadata.PackageNotFoundError(name)
    return known(name)
importlib.metadata.Distribution.from_name = classmethod(from_name)
"""
RUN = HIDE + "from dotmoe.cli import run; sys.exit(run(sys.argv[1:]))"
COLLECT = HIDE + "import pytest; sys.exit(pytest.main(sys.argv[1:]))"


def ended(code, *words):
    line = [sys.executable, "-c", code, *map(str, words)]
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    print(done.stdout, done.stderr)
    return done


@pytest.fixture
def text(tmp_path):
    lines = [f"The {number} mills by the river grind {number * 7} sacks." for number in range(400)]
    file = tmp_path / "text.txt"
    file.write_text("\n".join(lines))
    return file


def test_convert_finetune_and_evaluate_need_no_optional_package(tiny_dense, text, tmp_path):
    def ran(*words):
        assert ended(RUN, *words).returncode == 0

    made, tuned = tmp_path / "made", tmp_path / "tuned"
    short = ["--seq-len", 32, "--scale-tokens", 32, "--verify-tokens", 32]
    repaired = ["--repair-tokens", 960, "--eval-tokens", 64]
    ran("convert", tiny_dense("llama"), made, "--data", text, *repaired, *short)
    ran("finetune", made, tuned, "--data", text, "--steps", 1, "--batch-size", 2, *short)
    ran("evaluate", tuned, "--text", text, "--max-tokens", 64)


def test_the_tests_for_a_gpu_need_none_either():
    words = ["--collect-only", "-q", "-o", "addopts=", "-m", "gpu"]
    assert "3 tests collected" in ended(COLLECT, *words, "tests/test_gpu.py").stdout

"""The examples in docstrings give what they say."""

import doctest
import importlib
from pathlib import Path

import pytest

import dotmoe

SOURCE = Path(dotmoe.__file__).parent
WITH_EXAMPLES = [path for path in sorted(SOURCE.rglob("*.py")) if ">>> " in path.read_text()]


@pytest.mark.parametrize("path", WITH_EXAMPLES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_examples_give_what_they_say(path):
    parts = path.relative_to(SOURCE.parent).with_suffix("").parts
    module = importlib.import_module(".".join(p for p in parts if p != "__init__"))
    result = doctest.testmod(module, optionflags=doctest.ELLIPSIS)
    assert result.attempted
    assert not result.failed

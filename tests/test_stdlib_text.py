"""The standard library as text: a split that holds on every machine."""

import sysconfig
from pathlib import Path

from dotmoe.data.sources import stdlib_documents, stdlib_files


def test_a_file_is_on_the_same_side_everywhere():
    root = Path(sysconfig.get_path("stdlib"))
    heldout, train = set(stdlib_files("heldout")), set(stdlib_files("train"))
    assert not train & heldout
    assert 1 / 32 < len(heldout) / len(train) < 1 / 8
    assert {root / "enum.py", root / "bz2.py", root / "pydoc.py"} <= heldout
    assert {root / "ast.py", root / "copy.py", root / "json" / "decoder.py"} <= train
    names = [str(path) for path in train]
    assert not any("site-packages" in name or "/test/" in name for name in names)
    assert len(stdlib_files("train", include_tests=True)) >= len(names)


def test_documents_are_the_texts_of_the_files():
    first = next(path for path in stdlib_files("heldout") if path.read_text().strip())
    assert next(stdlib_documents("heldout")) == first.read_text()

"""What is installed is what is in the tree."""

import tomllib
from fnmatch import fnmatch
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_every_data_file_of_the_package_is_installed():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    patterns = settings["tool"]["setuptools"]["package-data"]["dotmoe"]
    package = ROOT / "src" / "dotmoe"
    data = [
        str(path.relative_to(package))
        for path in package.rglob("*")
        if path.is_file() and path.suffix not in (".py", ".pyc")
    ]
    assert data
    assert [each for each in data if not any(fnmatch(each, one) for one in patterns)] == []

"""The one place where stock Transformers reads files: it runs no code of theirs and asks nothing.

Format dotmoe is known to it by `modeling_dotmoe`, so that an export's own copy of that code never
runs either.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from transformers.utils import logging as transformers_logging

from dotmoe.common.files import read_json, write_json
from dotmoe.models import modeling_dotmoe  # noqa: F401  (registers format dotmoe)


def read_stock(reader: Any, place: Path | None, **options: Any) -> Any:
    """What a class of Transformers reads from a local folder; None: from tensors in `options`.

    A folder that names code of its own (`auto_map`) is read by the class that Transformers has for
    its type. Raises what Transformers raises; if it has no such class, a `ValueError`.
    """
    with quiet_transformers():
        return reader.from_pretrained(
            place, local_files_only=True, trust_remote_code=False, **options
        )


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Within this context, Transformers shows no progress bars and no load report."""
    verbosity = transformers_logging.get_verbosity()
    had_bars = transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if had_bars:
            transformers_logging.enable_progress_bar()


def forget_versions(folder: Path) -> None:
    """Take the version of Transformers out of its files: a model is the same by any version."""
    for name in ("config.json", "generation_config.json"):
        if (folder / name).is_file():
            values = read_json(folder / name)
            values.pop("transformers_version", None)
            write_json(folder / name, values)

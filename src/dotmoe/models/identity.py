"""Identity of a model: one hash of all that decides what it computes and how it reads text.

Every identity is made here, of content alone: names of folders, times and model cards do not
count. Run folders keep those of their inputs and refuse others; every result of a measurement keeps
that of each model beside its name, and is shown and taken up for no other model.
"""

import hashlib
import os
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from dotmoe.common.cache import cache_folder
from dotmoe.common.errors import UserError
from dotmoe.common.files import Values, read_json, sha256_of, write_json
from dotmoe.models.tokenizer import BESIDE_WEIGHTS

FINGERPRINT = "fingerprint"
"""Key of a model's fingerprint, beside its name in results."""
_DECIDES = (
    "config.json",
    "*.safetensors",
    "*.safetensors.index.json",
    "adapter_config.json",
    "modeling_dotmoe.py",
    *BESIDE_WEIGHTS,
)
"""Files of a checkpoint that can change what it computes, and its tokenizer's. The code of an
export of format `dotmoe` is the only one that is run."""
_SLOW_BYTES = 1 << 24
"""A smaller file is hashed each time, which takes milliseconds."""
_SETTLED_NS = 2 * 10**9
"""Two writes of a file within this time may leave it with one time of change."""


def fingerprint(model: Path) -> str:
    """SHA-256 that identifies a model: a checkpoint folder, or a GGUF file.

    The first call reads all weights, about a second for a gigabyte on one core; later ones read
    those that have changed, see `cached_sha256`.
    """
    if model.is_file():
        return cached_sha256(model)
    paths = {path for pattern in _DECIDES for path in model.glob(pattern) if path.is_file()}
    names = {path.relative_to(model).as_posix() for path in paths}
    names |= {name for name in _shards_of(model) if (model / name).is_file()}
    with ThreadPoolExecutor() as threads:
        in_order = sorted(names)
        sums = threads.map(lambda name: cached_sha256(model / name), in_order)
        lines = [f"{sha256}  {name}\n" for name, sha256 in zip(in_order, sums, strict=True)]
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def _shards_of(model: Path) -> set[str]:
    """Files that an index names; they may lie below the folder."""
    named = set[str]()
    for index in model.glob("*.safetensors.index.json"):
        with suppress(UserError):  # who reads the weights says what is wrong with it
            shard_of = read_json(index).get("weight_map")
            if isinstance(shard_of, dict):
                named |= {shard for shard in shard_of.values() if isinstance(shard, str)}
    return named


def cached_sha256(file: Path) -> str:
    """SHA-256 of a file; that of a large one is kept in the user's cache until the file changes.

    A change is noticed by size, inode and the times of change of content and of inode; the system
    sets the latter, so that a tool which restores the former does not hide a change.
    """
    file = file.resolve()
    state = state_of(file)
    if state["bytes"] < _SLOW_BYTES:
        return sha256_of(file)
    name = hashlib.sha256(os.fsencode(file)).hexdigest()
    entry = cache_folder() / "fingerprints" / f"{name}.json"
    kept = _kept_in(entry)
    if kept.get("state") == state:
        return str(kept["sha256"])
    sha256 = sha256_of(file)
    changed = max(state["content_ns"], state["inode_ns"])
    is_settled = time.time_ns() - changed > _SETTLED_NS and state_of(file) == state
    if is_settled:
        with suppress(OSError):  # without a place to keep it, it is made again
            write_json(entry, {"file": str(file), "state": state, "sha256": sha256})
    return sha256


def _kept_in(entry: Path) -> Values:
    """What `cached_sha256` kept of a file; nothing if it kept nothing that can be read."""
    try:
        return read_json(entry)
    except UserError:
        return {}


def state_of(file: Path) -> Values:
    """What changes when a file does."""
    stat = file.stat()
    times = {"content_ns": stat.st_mtime_ns, "inode_ns": stat.st_ctime_ns}
    return {"bytes": stat.st_size, "inode": stat.st_ino, **times}

"""Old names of `dotmoe.files`, until their last caller is gone."""

from collections.abc import Mapping
from functools import partial

from dotmoe.files import Checksum as FileSum
from dotmoe.files import checksums as manifest_of
from dotmoe.files import damage_in, sha256_of

Manifest = Mapping[str, FileSum]
damage_in_sizes = partial(damage_in, contents=False)

__all__ = ["FileSum", "Manifest", "damage_in", "damage_in_sizes", "manifest_of", "sha256_of"]

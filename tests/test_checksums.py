"""Checksums. Oracle: sha256sum's published digests and hashlib on whole contents."""

import hashlib
import os

import pytest

from dotmoe.checksums import damage_in, manifest_of, sha256_of

# NIST's example for one block, and the digest of nothing.
KNOWN = {
    b"abc": "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad",
    b"": "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855",
}


@pytest.mark.parametrize("content", KNOWN)
def test_the_digest_is_the_published_one(content, tmp_path):
    path = tmp_path / "file"
    path.write_bytes(content)
    assert sha256_of(path) == KNOWN[content]


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "inner").mkdir()
    (tmp_path / "a").write_bytes(os.urandom(3_000_000))
    (tmp_path / "inner" / "b").write_bytes(b"b" * 100)
    (tmp_path / "unlisted").write_bytes(b"anything")
    return tmp_path


def test_the_manifest_has_sizes_and_digests_of_what_is_named(folder):
    manifest = manifest_of(folder, ["inner/b", "a"])
    assert list(manifest) == ["a", "inner/b"]
    assert manifest["inner/b"] == {"bytes": 100, "sha256": hashlib.sha256(b"b" * 100).hexdigest()}
    assert damage_in(folder, manifest) is None


def test_each_kind_of_damage_is_named(folder):
    manifest = manifest_of(folder, ["a", "inner/b"])
    path = folder / "inner" / "b"
    path.write_bytes(b"b" * 99 + b"c")
    assert damage_in(folder, manifest).startswith(f"{path} has been altered: its SHA-256")
    path.write_bytes(b"b" * 60)
    assert damage_in(folder, manifest) == f"{path} is truncated: 60 of 100 bytes"
    path.write_bytes(b"b" * 101)
    assert damage_in(folder, manifest) == f"{path} has been altered: 101 bytes instead of 100"
    path.unlink()
    assert damage_in(folder, manifest) == f"{path} is missing"
    (folder / "unlisted").unlink()
    path.write_bytes(b"b" * 100)
    assert damage_in(folder, manifest) is None

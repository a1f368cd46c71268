"""Headers that state more than their file holds are refused at once, and sound ones pass."""

import shutil
import struct

import numpy as np
import pytest
from gguf import GGUFEndian, GGUFWriter

from dotmoe.models.from_gguf import GgufFile
from dotmoe.models.gguf_header import require_sound_header
from runs import put_into, refusal

U32, STRING, ARRAY = 4, 8, 9


def text(value):
    return struct.pack("<Q", len(value)) + value.encode()


def header(*pairs, tensors=b"", num_tensors=0, num_pairs=None):
    """A GGUF of these metadata: (key, type, bytes of the value)."""
    count = len(pairs) if num_pairs is None else num_pairs
    start = b"GGUF" + struct.pack("<IQQ", 3, num_tensors, count)
    values = (text(key) + struct.pack("<I", kind) + value for key, kind, value in pairs)
    return start + b"".join(values) + tensors


def array(kind, length, content=b""):
    return struct.pack("<IQ", kind, length) + content


NAMED = ("general.architecture", STRING, text("llama"))
NESTED = array(ARRAY, 1) * 2_000
UNSOUND = {
    "an array of numbers": header(NAMED, ("a", ARRAY, array(U32, 1 << 40))),
    "an array of texts": header(NAMED, ("a", ARRAY, array(STRING, 1 << 40, text("x")))),
    "arrays in arrays": header(NAMED, ("a", ARRAY, NESTED)),
    "an unknown type": header(NAMED, ("a", ARRAY, array(77, 1 << 40))),
    "a text": header(NAMED, ("a", STRING, struct.pack("<Q", 1 << 40) + b"x")),
    "metadata": header(NAMED, num_pairs=1 << 40),
    "tensors": header(NAMED, num_tensors=1 << 40),
    "dimensions": header(
        NAMED, tensors=text("t") + struct.pack("<I", 1 << 31) + bytes(40), num_tensors=1
    ),
    "layers": header(NAMED, ("llama.block_count", U32, struct.pack("<I", 10**7))),
}


@pytest.mark.parametrize("content", UNSOUND.values(), ids=UNSOUND)
def test_a_header_that_states_more_than_the_file_holds_is_refused(content, tmp_path):
    path = tmp_path / "a.gguf"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"state|type|deep|end of the file|dimensions|block_count"):
        require_sound_header(path)
    assert "is no valid GGUF file (" in refusal(GgufFile, path)


@pytest.mark.parametrize("order", [0, 1])
def test_what_the_gguf_package_writes_is_sound_until_it_is_cut(order, tmp_path):
    path = tmp_path / "a.gguf"
    writer = GGUFWriter(path, "llama", endianess=GGUFEndian(order))
    writer.add_block_count(1)
    writer.add_token_list(["a", "é", ""] * 100)
    writer.add_array("numbers", [1.5, 2.5])
    writer.add_array("flags", [True, False])
    writer.add_bool("flag", True)
    writer.add_tensor_info("t", (3, 4), np.dtype("float32"), 48)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    require_sound_header(path)
    content = path.read_bytes().rstrip(b"\0")
    for end in range(24, len(content) - 16, 97):
        path.write_bytes(content[:end])
        with pytest.raises(ValueError, match=r"state|end of the file"):
            require_sound_header(path)


def test_a_config_of_absurd_size_or_depth_is_one_line(tiny_dense, tmp_path, command):
    model = shutil.copytree(tiny_dense("llama"), tmp_path / "model")
    config = model / "config.json"
    put_into(config, text_config={"n_layer": 10**9})
    assert "n_layer 1,000,000,000, and no model" in command("inspect", model).refusal()
    put_into(config, text_config={}, num_hidden_layers=10**9)
    assert "num_hidden_layers 1,000,000,000, and no" in command("inspect", model).refusal()
    depth = 100_000
    config.write_text('{"a":' * depth + "1" + "}" * depth)
    assert "config.json is too deeply nested" in command("inspect", model).refusal()

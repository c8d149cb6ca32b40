"""Files appear whole or not at all; one process holds a lock; what is damaged says so."""

import os
import subprocess
import sys
import tomllib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedbilevel import storage


def test_a_block_that_fails_leaves_the_earlier_file_and_no_draft(tmp_path):
    target = tmp_path / "a.txt"
    storage.write(target, "old")
    with pytest.raises(ZeroDivisionError), storage.draft(target) as draft:
        draft.write_bytes(b"half" * (1 // 0))
    assert target.read_text() == "old"
    assert [file.name for file in tmp_path.iterdir()] == ["a.txt"]


def test_a_killed_writer_leaves_a_draft_that_can_be_removed(tmp_path):
    script = (
        "import os, sys, pathlib; from fedbilevel import storage\n"
        "with storage.draft(pathlib.Path(sys.argv[1])): os._exit(9)"
    )
    (tmp_path / "inside").mkdir()
    for target in (tmp_path / "a.txt", tmp_path / "inside" / "b.txt"):
        assert subprocess.run([sys.executable, "-c", script, str(target)], check=False).returncode == 9
    storage.remove_drafts(tmp_path)
    assert [file.name for file in tmp_path.rglob("*")] == ["inside"]


@pytest.mark.skipif(os.name != "posix", reason="permissions are POSIX's")
def test_permissions(tmp_path):
    old = os.umask(0o022)
    try:
        storage.write(tmp_path / "open", "x")
        storage.write_json(tmp_path / "private", {}, mode=0o600)
    finally:
        os.umask(old)
    assert [(tmp_path / name).stat().st_mode & 0o777 for name in ("open", "private")] == [0o644, 0o600]


def test_arrays_with_their_description(tmp_path):
    arrays = {"a": np.arange(3), "b/c": np.ones((2, 2), np.float32)}
    storage.write_arrays(tmp_path / "a.npz", arrays, {"format": 1})
    found, about = storage.read_arrays(tmp_path / "a.npz")
    assert about == {"format": 1}
    assert {name: (array.dtype, array.tolist()) for name, array in found.items()} == {
        name: (array.dtype, array.tolist()) for name, array in arrays.items()
    }
    with pytest.raises(FileNotFoundError):
        storage.read_arrays(tmp_path / "absent.npz")


def test_every_cut_of_an_array_file_is_noticed(tmp_path):
    storage.write_arrays(tmp_path / "a.npz", {"a": np.arange(50)}, {"format": 1})
    whole = (tmp_path / "a.npz").read_bytes()
    for length in range(len(whole)):
        (tmp_path / "cut.npz").write_bytes(whole[:length])
        with pytest.raises(storage.Unreadable):
            storage.read_arrays(tmp_path / "cut.npz")


def test_every_flipped_bit_of_an_array_file_is_noticed(tmp_path):
    """Without a checksum some flips drop an array without a word: the archive's own sums do not cover its directory."""
    arrays = {"a": np.arange(5), "b": np.ones((2, 2), np.float32)}
    storage.write_arrays(tmp_path / "a.npz", arrays, {"format": 1})
    whole = bytearray((tmp_path / "a.npz").read_bytes())
    for place in range(len(whole)):
        for bit in (1, 64):
            whole[place] ^= bit
            (tmp_path / "b.npz").write_bytes(whole)
            whole[place] ^= bit
            with pytest.raises(storage.Unreadable):
                storage.read_arrays(tmp_path / "b.npz")
    np.savez(tmp_path / "older.npz", **arrays)  # without a checksum, as version 0.1.0 wrote them
    assert storage.read_arrays(tmp_path / "older.npz")[0].keys() == arrays.keys()


@given(st.text() | st.sampled_from(["=1+1", "-5", "'=x", "''@a", "-", "+4e", "@", "1e3"]))
def test_no_cell_of_a_csv_file_is_a_formula_and_every_text_comes_back(text):
    written = storage.harmless(text)
    assert storage.restored(written) == text
    if written[:1] in ("=", "+", "-", "@", "\t", "\r"):
        float(written)


def test_a_lock_names_its_holder_and_ends_with_it(tmp_path):
    path = tmp_path / "lock"
    assert not storage.is_locked(path)
    held = storage.lock(path)
    with held:
        assert storage.is_locked(path)
        script = (
            "import sys, pathlib; from fedbilevel import storage\n"
            "try: storage.lock(pathlib.Path(sys.argv[1]))\nexcept storage.Busy as busy: print(busy)"
        )
        told = subprocess.run([sys.executable, "-c", script, str(path)], capture_output=True, text=True, check=True)
        assert told.stdout.strip() == f"process {os.getpid()}"
    assert not storage.is_locked(path)


texts = st.text(st.characters(codec="utf-8"), max_size=8)
values = st.recursive(
    st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False) | texts,
    lambda inside: st.lists(inside, max_size=3) | st.dictionaries(texts, inside, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(texts, values, max_size=4))
def test_toml_comes_back(table):
    assert tomllib.loads(storage.toml_text(table)) == table


def test_what_toml_cannot_hold_is_named():
    assert storage.plain({"a": None, "b": (1, np.float64(2.0))}) == {"b": [1, 2.0]}
    with pytest.raises(TypeError, match=r"value\.a\[1\] is <object"):
        storage.plain({"a": [1, object()]})
    with pytest.raises(storage.Unreadable):
        storage.read_toml("a = ")

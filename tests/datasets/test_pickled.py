"""Pickled data frames are read without running what they name."""

import os
import pickle

import numpy as np
import pandas as pd
import pytest

from fedbilevel.datasets.pickled import read_frame


def plain(rows=7):
    """Columns of all kinds that are read, in blocks of one column and of several."""
    frame = pd.DataFrame(
        {
            "n": np.arange(rows),
            "x": np.linspace(0, 1, rows),
            "who": np.array(["a", "b", "c", "d", "e", "f", "g"][:rows], dtype=object),
            "y": -np.linspace(0, 1, rows),
            "small": np.arange(rows, dtype="int8"),
            "big": np.arange(rows).astype(">f8"),
        }
    )
    frame["who"] = frame["who"].astype(object)
    frame.columns = pd.Index(list(frame.columns), dtype=object)
    return frame


@pytest.mark.parametrize("protocol", [4, 5])
@pytest.mark.parametrize("rows", [1, 7])
def test_the_same_table_as_pandas_reads(protocol, rows):
    frame = plain(rows)
    found = read_frame(pickle.dumps(frame, protocol))
    pd.testing.assert_frame_equal(
        found, pickle.loads(pickle.dumps(frame, protocol)), check_column_type=False, check_dtype=False
    )
    assert found["n"].dtype == "int64"


class Evil:
    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


@pytest.mark.parametrize("hidden", [lambda evil: evil, lambda evil: [plain(), evil], lambda evil: {"_mgr": evil}])
def test_nothing_that_a_pickle_names_is_run(hidden, tmp_path):
    mark = tmp_path / "ran"
    contents = pickle.dumps(hidden(Evil(os.mkdir, str(mark))))
    with pytest.raises(ValueError, match=r"no pickled data frame .* \(it names posix.mkdir\)"):
        read_frame(contents)
    assert not mark.exists()
    pickle.loads(contents)  # what the reader did not do
    assert mark.exists()


@pytest.mark.parametrize(
    "contents",
    [b"", b"no pickle", pickle.dumps(3), pickle.dumps({}), pickle.dumps(plain())[:-200], pickle.dumps(slice(1, 2))],
)
def test_anything_else_is_refused(contents):
    with pytest.raises(ValueError, match="no pickled data frame"):
        read_frame(contents)

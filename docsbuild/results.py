"""The numbers of the pages, from the files that runs leave: ``python -m docsbuild.results`` writes them.

A page says between two comments where a table comes from, and what stands between them is made::

    <!-- made: table docs/figures/rates.csv "range == 'all'" "method = {algorithm}" "slope = {slope:+.3f}" -->
    <!-- end -->

``table FILE CONDITION "HEAD = TEMPLATE" ...`` makes one line of every row of a CSV file (or of the list ``measured`` of a JSON
file) that meets the condition, a pandas query; "" takes all rows.  Any other maker is named ``module:function`` and gets the
words behind it; modules of benchmarks/ are found.  In the middle of a sentence the comments hold a single value.

``python -m docsbuild.results keep runs/mine docs/figures/mine rows groups`` first copies these tables of a run folder,
and what was run.  ``--check`` writes nothing and fails where a page differs: a test calls it.
"""

from __future__ import annotations

import importlib
import io
import json
import math
import re
import shlex
import shutil
import sys
import tomllib
from collections.abc import Callable
from itertools import combinations
from pathlib import Path
from statistics import median

import numpy as np
import pandas as pd
import tomli_w

ROOT = Path(__file__).parents[1]
MARK = re.compile(r"<!-- made: (?P<order>.+?) -->(?P<block>\n?).*?<!-- end -->", flags=re.S)


class Number(float):
    """A float as our tables print it: .848, −.012."""

    def __format__(self, form: str) -> str:
        text = float.__format__(self, form)
        return re.sub(r"^([+−]?)0\.", r"\1.", text.replace("-", "−")) if form.endswith("f") else text


def written(page: str) -> str:
    """A page with everything between its comments made again."""

    def anew(match: re.Match[str]) -> str:
        name, *words = shlex.split(match["order"])
        break_ = "\n" if match["block"] else ""
        return f"<!-- made: {match['order']} -->{break_}{maker(name)(*words)}{break_}<!-- end -->"

    return MARK.sub(anew, page)


def maker(name: str) -> Callable[..., str]:
    module, _, function = name.rpartition(":")
    if not module:
        return globals()[function]
    if str(ROOT / "benchmarks") not in sys.path:
        sys.path.append(str(ROOT / "benchmarks"))
    return getattr(importlib.import_module(module), function)


def markdown(heads: list[str], rows: list[list[str]], right: list[bool]) -> str:
    lines = [heads, ["---:" if one else "---" for one in right], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def read(file: str) -> pd.DataFrame:
    path = ROOT / file
    if path.suffix == ".csv":
        return pd.read_csv(path)
    return pd.DataFrame(json.loads(path.read_text(encoding="utf-8"))["measured"])


def table(file: str, condition: str, *columns: str) -> str:
    rows = read(file)
    if condition:
        rows = rows.query(condition)
    assert len(rows), f"{file}: no row meets {condition}"
    pairs = [[part.strip() for part in column.rsplit(" = ", 1)] for column in columns]
    lines = [[cell(template, row) for _, template in pairs] for row in rows.to_dict("records")]
    return markdown(
        [head for head, _ in pairs], lines, [bool(re.fullmatch(r"\{[^}]+:[^}]+\}", one)) for _, one in pairs]
    )


def cell(template: str, row: dict[str, object]) -> str:
    """One cell; empty where a value is missing."""
    used = [row[name] for name in re.findall(r"\{(\w+)", template)]
    if any(isinstance(value, float) and math.isnan(value) for value in used):
        return ""
    return template.format_map({name: Number(one) if isinstance(one, float) else one for name, one in row.items()})


def table1(folder: str) -> str:
    """What `fedbilevel table1` prints of a run folder."""
    from fedbilevel.cli.table1 import print_table
    from fedbilevel.cli.terminal import console
    from fedbilevel.runs import read as read_run

    paper = console(80)  # distributions one below the other
    paper.file = io.StringIO()
    print_table(paper, read_run(ROOT / folder))
    return "```text\n" + "\n".join(line.rstrip() for line in paper.file.getvalue().strip("\n").splitlines()) + "\n```"


def rates_chosen(folder: str) -> str:
    """The learning rates that `fedbilevel table1 --grid` chose, by method."""
    rows = pd.read_csv(ROOT / folder / "rows.csv")
    wide = rows.pivot_table(
        index="method", columns=["dataset", "split"], values="rate", sort=False,
        aggfunc=lambda rates: " ".join(f"{rate:g}" for rate in sorted(set(rates))),
    )  # fmt: skip
    heads = ["method", *(f"{dataset.title()}, {split}" for dataset, split in wide.columns)]
    return markdown(
        heads, [[str(cell) for cell in line] for line in wide.itertuples()], [False] + [True] * len(wide.columns)
    )


READINGS = {
    "largest minus smallest": lambda rates, counts: max(rates) - min(rates),
    "largest distance to the rate over all rows": lambda rates, counts: max(abs(rates - rates @ counts / sum(counts))),
    "largest group against the rest": lambda rates, counts: _against_rest(rates, counts),
    "mean over pairs": lambda rates, counts: np.mean([abs(a - b) for a, b in combinations(rates, 2)]),
}
"""How the rates of groups become one gap: (rates, rows that each is a share of)."""


def _against_rest(rates: np.ndarray, counts: np.ndarray) -> float:
    first = int(np.argmax(counts))
    rest = np.arange(len(counts)) != first
    return float(abs(rates[first] - rates[rest] @ counts[rest] / counts[rest].sum()))


def readings(folder: str) -> str:
    """Mean distance between our test gap and the paper's over its methods, for every reading of the definition."""
    from fedbilevel.report.reading import published

    rows = pd.read_csv(ROOT / folder / "groups.csv").query("part == 'test'")
    rows["negatives"] = rows["count"] - rows["positives"]
    printed, lines = published(), []
    for label, rate, count in (
        ("favourable", "true_positive_rate", "positives"), ("other", "false_positive_rate", "negatives"),
    ):  # fmt: skip
        known = rows[rows[count] > 0]
        for name, gap in READINGS.items():
            runs = known.groupby(["dataset", "split", "method", "seed"])[[rate, count]].apply(
                lambda run, gap=gap: float(gap(*run.to_numpy(float).T))
            )
            means = runs.groupby(level=["dataset", "split", "method"]).mean()
            far = pd.Series({key: abs(mean - printed[*key, "test_gap"][0]) for key, mean in means.items()})
            cases = far.groupby(level=[0, 1]).mean()
            lines.append([label, name, *(f"{Number(one):.3f}" for one in (*cases, cases.mean()))])
    heads = ["Adult, I.I.D.", "Adult, non-I.I.D.", "Credit, I.I.D.", "Credit, non-I.I.D.", "all"]
    return markdown(["positive label", "groups compared by", *heads], lines, [False, False, *[True] * 5])


def slopes(file: str) -> str:
    """The fitted slopes with their intervals: a line a variant, a column for each average and range of horizons."""
    rows = read(file)
    rows["cell"] = [cell("{slope:.3f} [{low:.3f}, {high:.3f}]", row) for row in rows.to_dict("records")]
    names = {"fedbio": "FedBiO", "fedbioacc": "FedBiOAcc"}
    rows["who"] = rows["algorithm"].map(names) + ", " + rows["variant"]
    wide = rows.pivot_table(
        index=["who", "theory"], columns=["average", "range"], values="cell", aggfunc="first", sort=False
    )
    heads = ["", "theory", *(f"{average}, {'every T' if span == 'all' else span}" for average, span in wide.columns)]
    lines = [
        [who, {-0.5: "−1/2"}.get(theory, "−2/3"), *line]
        for (who, theory), line in zip(wide.index, wide.values.tolist(), strict=True)
    ]
    return markdown(heads, lines, [False] * len(heads))


def _large(bound: float) -> str:
    return f"{bound:.3g}" if bound < 100 else f"{bound:,.0f}" if bound < 1e5 else f"{bound:.1e}".replace("+0", "")


def bounds(file: str) -> str:
    """What was measured beside the theorems' bounds, by horizon; a mean over problems."""
    rows = read(file).groupby(["variant", "horizon"], sort=False)[["measured", "bound"]].mean().reset_index()
    rows["cell"] = [f"{row['measured']:.3g} / {_large(row['bound'])}" for row in rows.to_dict("records")]
    wide = rows.pivot_table(index="variant", columns="horizon", values="cell", aggfunc="first", sort=False)
    heads = ["measured / bound", *(f"T = {horizon:,}" for horizon in wide.columns)]
    return markdown(
        heads,
        [[who.capitalize(), *line] for who, line in zip(wide.index, wide.values.tolist(), strict=True)],
        [False] * len(heads),
    )


def headlines() -> str:
    """At most five figures, for the README and the first page of the results."""
    measured = {
        name: json.loads((ROOT / f"benchmarks/results/{name}.json").read_text(encoding="utf-8"))["measured"]
        for name in ("speed", "table1", "federation", "peers")
    }
    step = {
        name: median(one["run"] / one["steps"] for one in measured["speed"][f"FedBiOAcc Q=10 / {name}"])
        for name in ("torch eager", "ours autodiff", "ours fused")
    }
    study = pd.read_csv(ROOT / "docs/figures/fairness-table.csv").query("case == 'adult-sex' and interval == 'student'")
    ours = study[study["method"] == "FedBiOAcc, cells"].set_index(["metric", "distribution"])
    gaps = ours.loc["test_gap"]
    removed = sorted(-gaps["difference"] / (gaps["mean"] - gaps["difference"]))
    rounds = [second for run in measured["federation"]["rounds"]["ours"] for second in run["bilevel"]]
    faster = {name: step["torch eager"] / step[name] for name in step}
    cost = -100 * ours.loc["test_accuracy"]["difference"].min()
    seconds = measured["table1"]["table1, first"][0]["run"]
    others = maker("peers:headline")(measured["peers"])
    lines = (
        f"- Two plain losses run {faster['ours autodiff']:.0f} times as fast as in eager PyTorch, linear models with the fused "
        f"kernel {faster['ours fused']:.0f} times.\n"
        f"- On Adult by sex, learned weights remove {100 * removed[0]:.0f} to {100 * removed[-1]:.0f} % of FedAvg's gap in "
        f"true-positive rates, for {cost:.2f} points of accuracy or less.\n"
        f"- The paper's 240 runs take {seconds:.0f} s on two cores, compiling included.\n"
        f"- A round over three real sites with mutual TLS takes {median(rounds):.2f} s.\n"
        f"{others}"
    )
    return lines.rstrip("\n")


def pages() -> list[Path]:
    every = (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
    return [page for page in every if "<!-- made: " in page.read_text(encoding="utf-8")]


def keep(folder: str, target: str, *tables: str) -> None:
    """The small part of a run folder that pages need: what was run, and some of its tables."""
    source, kept = Path(folder), ROOT / target
    about = tomllib.loads((source / "run.toml").read_text(encoding="utf-8"))
    about["files"] = {f"{name}.csv": about["files"][f"{name}.csv"] for name in tables}
    kept.mkdir(parents=True, exist_ok=True)
    (kept / "run.toml").write_text(tomli_w.dumps(about), encoding="utf-8")
    for name in about["files"]:
        shutil.copy(source / name, kept)


if __name__ == "__main__":
    if sys.argv[1:2] == ["keep"]:
        keep(*sys.argv[2:])
    checking, failed = "--check" in sys.argv, False
    for page in pages():
        before = page.read_text(encoding="utf-8")
        try:
            after = written(before)
        except (OSError, KeyError, ValueError) as error:
            print(f"{page.relative_to(ROOT)}: {type(error).__name__}: {error}")
            failed = True
            continue
        if after != before:
            print(f"{page.relative_to(ROOT)}: {'differs from what its runs say' if checking else 'written'}")
            failed |= checking
            if not checking:
                page.write_text(after, encoding="utf-8")
    sys.exit(failed)

"""`fedbilevel tune` against a search of 20 candidates, by the protocol in docs/results/tuning.md.

    python benchmarks/tune.py --out runs/tune-study [--tables heart,credit] [--splits 20]
    python benchmarks/tune.py --out runs/tune-study --parts ours --known benchmarks/results/tune.csv

Every split of every table is a line of results.csv once it is done; the same command goes on after a stop.  The second command
computes only our part anew and takes the others from lines that are known.  Prints the table of the page.
"""

import argparse
import csv
import sys
from dataclasses import dataclass
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pandas as pd
from scipy import stats

from fedbilevel import datasets
from fedbilevel.algorithms.lbfgs import lbfgs
from fedbilevel.datasets import partition
from fedbilevel.engines.simulate import execute
from fedbilevel.engines.simulation import Options, Simulation
from fedbilevel.fairness.methods import ENOUGH
from fedbilevel.fairness.models import Model
from fedbilevel.fairness.trainer import capacity_for, padded
from fedbilevel.problem import ClientData
from fedbilevel.tables.encoder import Encoder
from fedbilevel.tuning.problem import UNPENALISED
from fedbilevel.tuning.program import TuneProgram, column_places, reading_of
from fedbilevel.tuning.search import CANDIDATES, PARTS, Search, held_out_loss
from fedbilevel.tuning.simulation import Tuner

TABLES = ("adult", "employment", "compas", "law-school", "hsb82", "chem97", "heart", "credit")
LOOKED_AT = ("heart", "credit")
ROOT = Path(__file__).parents[1]
MOST_ROWS = 3000
CLIENTS = 5
WHAT = ("penalties",)
COLUMNS_OF = ("ours", "search", "fit", "exact")


def prepared(name):
    """Features, labels (of a score: numbers) and the site of every row."""
    data = datasets.load(name)
    generator = np.random.default_rng(1)
    rows = np.sort(generator.permutation(len(data.y))[:MOST_ROWS])
    table, labels = data.X.iloc[rows].reset_index(drop=True), np.asarray(data.y, np.float64)[rows]
    if name in ("heart", "employment"):
        return table, labels, pd.factorize(np.asarray(data.sites)[rows], sort=True)[0]
    if data.positive is None:  # whole schools or authorities
        units = pd.factorize(np.asarray(data.sites)[rows], sort=True)[0]
        return table, labels, generator.permutation(units.max() + 1)[units] % CLIENTS
    parts = partition.dirichlet(labels.astype(int).astype(str), clients=CLIENTS, concentration=1.0, seed=0)
    sites = np.empty(len(rows), np.int64)
    for number, part in enumerate(parts):
        sites[part] = number
    return table, labels, sites


def solved(model, features, labels, ridge, start=None):
    """The exact minimiser of the ridge-penalised loss, by Newton's method."""
    matrix, params = features.astype(np.float64), start if start is not None else np.zeros(features.shape[1])
    penalties = np.append(np.full(features.shape[1] - 1, ridge), 1e-6)
    for _ in range(50):
        scores = matrix @ params
        means = scores if model.regression else 1 / (1 + np.exp(-scores))
        bend = np.ones_like(scores) if model.regression else means * (1 - means)
        gradient = matrix.T @ (means - labels) / len(labels) + penalties * params
        if np.abs(gradient).max() < 1e-7:
            break
        hessian = (matrix * bend[:, None]).T @ matrix / len(labels) + np.diag(penalties)
        params = params - np.linalg.solve(hessian, gradient)
    return params


def held_out(model, sites, seed):
    """Every site's rows without those it holds out, as `Search` does, and these."""
    kept, out = [], []
    for number, (features, labels) in enumerate(sites):
        codes = np.zeros(len(labels)) if model.regression else labels
        held = partition.folds(codes, PARTS, seed=seed + number) == 0
        kept.append((features[~held], labels[~held]))
        out.append((features[held], labels[held]))
    return kept, out


@dataclass(frozen=True)
class Ridged:
    """The loss of one candidate; its ridge comes with the rows, so that all candidates share a program."""

    model: Model

    def __call__(self, params, rows):
        losses = self.model.losses(self.model.scores(params, rows["features"]), rows["labels"])
        square = jnp.sum(params[:-1] ** 2) * rows["ridge"] + UNPENALISED * jnp.sum(params[-1] ** 2)
        return jnp.mean(losses + square / 2)


class FitSearch:
    """The same candidates and rows held out, trained as `fedbilevel fit` trains FedAvg's model: by L-BFGS at the server."""

    def __init__(self, model):
        self.model, self.made = model, {}

    def trained(self, sites, ridge):
        """The model, and the bytes of its training."""
        rows = [
            {
                "features": x.astype(np.float32),
                "labels": y.astype(np.float32),
                "ridge": np.full(len(y), ridge, np.float32),
            }
            for x, y in sites
        ]
        data = ClientData.from_clients(rows)
        data = padded(data, capacity_for(int(data.train_sizes.max())))
        algorithm = lbfgs(Ridged(self.model), np.zeros(self.model.features, np.float32))
        shape = data.train["features"].shape
        if shape not in self.made:
            self.made[shape] = Simulation(algorithm, data, Options("samples", record_every=ENOUGH, diagnostics="cheap"))
        result = execute(self.made[shape].on(data), algorithm.settings, ENOUGH, 0, None)
        last = result.history.iloc[-1]
        return np.asarray(result.outer, np.float64), int(last["bytes_up"] + last["bytes_down"])

    def run(self, sites, seed):
        """The chosen model, the bytes of all trainings, and their mean."""
        kept, out = held_out(self.model, sites, seed)
        x, y = (np.concatenate(part) for part in zip(*out, strict=True))
        tried = [(self.trained(kept, ridge), ridge) for ridge in CANDIDATES]
        ridge = min((held_out_loss(self.model, params, x, y), ridge) for (params, _), ridge in tried)[1]
        params, again = self.trained(sites, ridge)
        costs = [bytes_ for (_, bytes_), _ in tried] + [again]
        return params, sum(costs), sum(costs) / len(costs)


def exact_search(model, sites, seed):
    """The same candidates and the same rows held out, without FedAvg: every candidate's model is the exact one."""
    kept, out = held_out(model, sites, seed)
    (x, y), (x_out, y_out), (x_all, y_all) = (
        tuple(np.concatenate(part) for part in zip(*rows, strict=True)) for rows in (kept, out, sites)
    )
    params, best = None, (np.inf, 0.0)
    for ridge in sorted(CANDIDATES, reverse=True):
        params = solved(model, x, y, ridge, params)
        best = min(best, (held_out_loss(model, params, x_out, y_out), ridge))
    return solved(model, x_all, y_all, best[1])


def split(name, table, labels, sites, seed, parts, runners):
    """One line of the results, or the columns of these parts of it."""
    regression = len(np.unique(labels)) > 2
    codes = sites if regression else sites * 2 + labels.astype(np.int64)
    train, test = partition.train_test_split(pd.Series(codes.astype(str)), test_share=0.3, seed=seed)
    encoder = Encoder.learn(table)
    features, unseen = encoder.transform(table.iloc[train]), encoder.transform(table.iloc[test])
    known, truth = labels[train], labels[test]
    if regression:
        mean, spread = known.mean(), known.std()
        known, truth = (known - mean) / spread, (truth - mean) / spread
    model = (
        Model("linear", features.shape[1], 1, loss="squared") if regression else Model("logistic", features.shape[1])
    )
    rows = [(features[part], known[part]) for part in partition.by_column(sites[train])]
    params, line = {}, {}
    if "ours" in parts:
        reading = reading_of(model, WHAT, minimum=1)
        places = column_places(encoder.columns)
        program = TuneProgram(reading, WHAT, places, len(rows), len(train), fold_seed=1000 * seed)
        ours = runners.setdefault("ours", Tuner()).run(program, rows, seed, record=False)
        params |= {"tuned": ours.params, "folds": ours.folded.mean(axis=0)}
        line["tuned_bytes"] = ours.bytes_up + ours.bytes_down
    if "search" in parts:
        others = runners.setdefault("search", Search(model)).run(rows, seed)
        params["search"] = others.params
        line |= {"search_bytes": others.bytes_all, "run_bytes": others.bytes_one, "ridge": others.ridge}
    if "fit" in parts:
        params["fit"], line["fit_bytes"], line["fit_run_bytes"] = runners.setdefault("fit", FitSearch(model)).run(
            rows, seed
        )
    if "exact" in parts:
        params["exact"] = exact_search(model, rows, seed)
        params["default"] = solved(model, features, known, 1 / len(train))
    for method, found in params.items():
        line[f"{method}_loss"] = held_out_loss(model, found, unseen, truth)
        scores = unseen @ np.asarray(found, np.float64)
        line[f"{method}_right"] = float(
            1 - np.mean((scores - truth) ** 2) / np.mean(truth**2) if regression else np.mean((scores > 0) == truth)
        )
    about = {"table": name, "split": seed, "rows": len(train), "sites": len(rows), "features": features.shape[1]}
    return about | line


def short(value, form=".5f"):
    text = format(value, form)
    return (text if float(text) else text.strip("+-")).replace("0.", ".", 1).replace("-", "−")


def against(table, other):
    """The paired difference of ``other``'s loss to ours, with Student's interval, and its verdict."""
    differences = table[f"{other}_loss"] - table["tuned_loss"]
    margin = stats.t.ppf(0.975, len(differences) - 1) * differences.std(ddof=1) / len(differences) ** 0.5
    low, high = differences.mean() - margin, differences.mean() + margin
    told = f"{short(differences.mean(), '+.5f')} [{short(low, '+.5f')}, {short(high, '+.5f')}]"
    return told, "win" if low > 0 else "loss" if high < 0 else "tie"


def measured(file="benchmarks/results/tune.csv"):
    """The table of the page."""
    lines = [
        "| table | our loss | against the search | | against the exact search | against no tuning "
        "| against the mean of fold models | our bytes, of one FedAvg run | of one training as `fit` trains "
        "| a search as `fit` trains, of ours |",
        "|---|---:|---|---|---|---|---|---:|---:|---:|",
    ]
    for name, table in pd.read_csv(ROOT / file).groupby("table", sort=False):
        searched, verdict = against(table, "search")
        bytes_ = table[["tuned_bytes", "run_bytes", "fit_run_bytes", "fit_bytes"]].mean()
        cells = [
            f"{'*looked at before:* ' if name in LOOKED_AT else ''}`{name}`",
            short(table["tuned_loss"].mean(), ".4f"),
            searched,
            verdict,
            *(against(table, other)[0] for other in ("exact", "default", "folds")),
            short(bytes_["tuned_bytes"] / bytes_["run_bytes"], ".2f"),
            short(bytes_["tuned_bytes"] / bytes_["fit_run_bytes"], ".2f"),
            f"{bytes_['fit_bytes'] / bytes_['tuned_bytes']:.1f} ×",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def summary(results):
    lines = []
    for name, table in results.groupby("table", sort=False):
        line = {
            "table": name,
            "splits": len(table),
            "rows": int(table["rows"].iloc[0]),
            "sites": int(table["sites"].iloc[0]),
        }
        for other in ("search", "fit", "exact", "default", "folds"):
            line[f"vs {other}"] = " ".join(against(table, other))
        line |= {name: table[f"{name}_loss"].mean() for name in ("tuned", "search")}
        line["right"] = (table["tuned_right"] - table["search_right"]).mean()
        line["bytes of search / ours"] = (table["search_bytes"] / table["tuned_bytes"]).mean()
        line["ours / one run"] = (table["tuned_bytes"] / table["run_bytes"]).mean()
        line["bytes of search as fit / ours"] = (table["fit_bytes"] / table["tuned_bytes"]).mean()
        line["ours / one run as fit"] = (table["tuned_bytes"] / table["fit_run_bytes"]).mean()
        lines.append(line)
    return pd.DataFrame(lines)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tables", default=",".join(TABLES))
    parser.add_argument("--splits", type=int, default=20)
    parser.add_argument("--parts", default=",".join(COLUMNS_OF))
    parser.add_argument("--known", type=Path)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    file, parts = options.out / "results.csv", options.parts.split(",")
    done = pd.read_csv(file) if file.exists() else pd.DataFrame(columns=["table", "split"])
    there = set(zip(done["table"], done["split"], strict=True))
    known = {} if options.known is None else by_split(pd.read_csv(options.known))
    for name in options.tables.split(","):
        todo = [seed for seed in range(options.splits) if (name, seed) not in there]
        if not todo:
            continue
        rows, runners = prepared(name), {}
        for seed in todo:
            line = known.get((name, seed), {}) | split(name, *rows, seed, parts, runners)
            new = not file.exists()
            with file.open("a", newline="") as handle:
                writer = csv.DictWriter(handle, line)
                if new:
                    writer.writeheader()
                writer.writerow(line)
            print(
                name,
                seed,
                *(f"{line[part]:.5f}" for part in ("tuned_loss", "tuned_bytes") if part in line),
                file=sys.stderr,
                flush=True,
            )
    print(measured(file))


def by_split(table):
    return {(line["table"], line["split"]): line for line in table.to_dict("records")}


if __name__ == "__main__":
    main()

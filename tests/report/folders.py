"""Run folders with made-up numbers: a whole table, a fit of one seed, a benchmark, the studies with tables of their own."""

from __future__ import annotations

import numpy as np
import pandas as pd

from fedbilevel.runs import RunFolder

METHODS = {  # name: accuracy, gap, learns weights
    "FedAvg": (0.848, 0.118, False),
    "FedReg": (0.8479, 0.060, False),
    "FedMinMax": (0.8465, 0.250, True),
    "FCFL": (0.8455, 0.044, False),
    "FedBiO": (0.8481, 0.112, True),
    "FedBiOAcc": (0.8484, 0.115, True),
    "FedBiO, cells": (0.8478, 0.037, True),
    "FedBiOAcc, cells": (0.8477, 0.034, True),
}
GROUPS = {
    "adult": ["White", "Black", "Asian-Pac-Islander", "Amer-Indian-Eskimo", "Other"],
    "credit": ["A91", "A92", "A93", "A94"],
}
COUNTS = (8000, 900, 300, 93, 70)


def table1(
    path, *, seeds=10, methods=METHODS, datasets=("adult", "credit"), splits=("iid", "noniid"), groups=GROUPS, **options
):
    """Two datasets, two distributions, eight methods: rows, rates, weights and histories."""
    rng = np.random.default_rng(0)
    configuration = {
        "datasets": list(datasets), "splits": list(splits), "methods": list(methods), "seeds": seeds, "steps": 2000,
        "metric": "equal_opportunity", "convention": "between_groups", "encoding": "clean", **options,
    }  # fmt: skip
    line = f"fedbilevel table1 --seeds {seeds} --out runs/table1"
    with RunFolder.open(path, command="table1", configuration=configuration, line=line) as run:
        for dataset in datasets:
            for split in splits:
                tables = {"rows": [], "groups": [], "weights": [], "history": []}
                for method, (accuracy, gap, learns) in methods.items():
                    for seed in range(seeds):
                        cell = {"dataset": dataset, "split": split, "method": method, "seed": seed}
                        one_run(tables, cell, accuracy, gap, learns, groups[dataset], rng)
                run.save(f"{dataset}/{split}", **{name: pd.DataFrame(rows) for name, rows in tables.items() if rows})
        return run.finish()


def one_run(tables, cell, accuracy, gap, learns, groups, rng):
    lower, wider = (0.09, 2.0) if cell["dataset"] == "credit" else (0.0, 1.0)
    accuracy, gap = accuracy - lower + wider * rng.normal(0, 0.0012), abs(gap * wider + wider * rng.normal(0, 0.012))
    stages = ("weights", "model") if learns and cell["method"].startswith("FedBiO") else ("model",)
    rounds = 2000 if cell["method"] == "FedMinMax" else 400 * len(stages)
    size = 430 * 3
    row = {
        "split_seed": 0, "setting": "", "test_accuracy": accuracy, "train_accuracy": accuracy + 0.004,
        "test_balanced_accuracy": accuracy - 0.09, "test_auc": accuracy + 0.05, "train_gap": gap * 0.8, "test_gap": gap,
        "rounds": rounds, "steps": 2000, "bytes_up": rounds * size, "bytes_down": rounds * size, "gradient_calls": 6000,
        "hvp_calls": 60000 if "BiO" in cell["method"] else 0, "seconds": 0.5 + rng.random(),
    }  # fmt: skip
    tables["rows"].append({**cell, **row})
    for number, group in enumerate(groups):
        count = COUNTS[number]
        rate = np.clip(0.62 - gap * number / len(groups) + rng.normal(0, 0.01), 0, 1)
        rates = {"true_positive_rate": rate, "false_positive_rate": rate / 8, "selection_rate": rate / 3}
        rates["accuracy"] = accuracy
        for part in ("train", "test"):
            tables["groups"].append(
                {**cell, "part": part, "group": group, "count": count, "positives": count // 5, **rates}
            )
        if learns:
            for label in ("0", "1") if "cells" in cell["method"] else ("",):
                weight = float(np.exp(rng.normal(0.15 * number - 0.2, 0.05)) * (1.3 if label == "1" else 0.9))
                tables["weights"].append({**cell, "group": group, "label": label, "weight": weight})
    sent = 0
    for stage in stages:
        for done in range(20, 401, 20):
            sent += 20 * size * (1 if stage == "model" else 0.05)
            record = {"stage": stage, "round": done, "step": 5 * done, "bytes_up": int(sent), "bytes_down": int(sent)}
            record |= {"objective": 0.33 + 0.3 * np.exp(-done / 60) + rng.normal(0, 0.003)}
            if stage == "model":
                record["test_accuracy"] = accuracy - 0.08 * np.exp(-done / 80)
                record["test_gap"] = gap * (1 - np.exp(-done / 90))
            tables["history"].append({**cell, **record})


def fit(path, *, name="hospitals", group_names=("f", "m"), methods=("FedBiOAcc, cells",), bootstrap=True):
    """One's own data, one seed, with bootstrap intervals."""
    configuration = {"target": "readmitted", "sensitive": "sex", "metric": "equal_opportunity", "steps": 500}
    tables = {"rows": [], "groups": [], "weights": [], "history": []}
    rng = np.random.default_rng(1)
    for method in methods:
        cell = {"dataset": name, "split": "given", "method": method, "seed": 0}
        one_run(tables, cell, 0.84, 0.05, True, list(group_names), rng)
        if bootstrap:
            row = tables["rows"][-1]
            for column in ("test_accuracy", "test_gap"):
                row |= {f"{column}_low": row[column] - 0.02, f"{column}_high": row[column] + 0.03}
    with RunFolder.open(path, command="fit", configuration=configuration, line="fedbilevel fit a.csv b.csv") as run:
        run.save("fit", **{name: pd.DataFrame(rows) for name, rows in tables.items()})
        return run.finish()


def bench(path):
    """Tasks and algorithms; no groups, no gap."""
    rng = np.random.default_rng(2)
    rows, history = [], []
    for task in ("quadratic", "data cleaning", "ridge tuning"):
        for place, algorithm in enumerate(("FedBiO", "FedBiOAcc", "FedNest", "SimFBO", "AggITD")):
            for seed in range(3):
                cell = {"dataset": task, "split": "local", "method": algorithm, "seed": seed}
                score = 0.9 - 0.02 * place + rng.normal(0, 0.004)
                for done in range(10, 101, 10):
                    sent = done * 1000 * (place + 1)
                    objective = float(10 ** (-done / 25) * (1 + place) * np.exp(rng.normal(0, 0.1)))
                    step = {"stage": "", "round": done, "objective": objective, "bytes_up": sent, "bytes_down": sent}
                    history.append({**cell, **step, "score": score * (1 - np.exp(-done / 30)), "seconds": done / 50})
                total = {"rounds": 100, "bytes_up": sent, "bytes_down": sent, "objective": objective, "score": score}
                tuned = {
                    "inner_factor": 0.1,
                    "outer_factor": 1.0,
                    "tried": 12,
                    "diverged_in_tuning": 0,
                    "diverged": False,
                }
                told = {"score_name": "accuracy", "untuned": 0.5, "solved": score, "seconds": 1.5 + place}
                rows.append({**cell, **total, **tuned, **told})
    with RunFolder.open(path, command="bench", configuration={"seeds": 3}, line="fedbilevel bench") as run:
        run.save("all", rows=pd.DataFrame(rows), history=pd.DataFrame(history))
        return run.finish()


def rates(path):
    """The theorems: errors by horizon, and the tables that only this study has."""
    tuned = ['tuned constants, previous="local"', "paper constants"]
    variants = {"fedbio": ["eta = delta/sqrt(T)"], "fedbioacc": tuned}
    points, bounds, sent, speedup = [], [], [], []
    for algorithm, names in variants.items():
        for variant in names:
            for run in range(2):
                keys = {"algorithm": algorithm, "variant": variant, "problem": run, "run": run}
                for horizon in (50, 500):
                    error = (1 + run) / horizon**0.5
                    points.append({**keys, "horizon": horizon, "mean_square": error, "late_mean_square": error / 2})
                    bounds.append({**keys, "horizon": horizon, "measured": error, "bound": 1e4 * error, "holds": True})
        sent += [{"algorithm": algorithm, "local_steps": steps, "run": 0, "step": place, "bytes": 1000 * place,
                  "mean_square": 1 / (1 + place)} for steps in (1, 5) for place in range(3)]  # fmt: skip
    for estimator in ("unbiased", "truncated"):
        speedup += [{"estimator": estimator, "clients": clients, "run": 0, "mean_square": 1 / clients, "inner_error": 0.1}
                    for clients in (1, 4)]  # fmt: skip
    rows = pd.DataFrame(points).rename(columns={"algorithm": "split", "variant": "method", "run": "seed"})
    fitted = {"range": "last decade", "slope": -0.5, "low": -0.6, "high": -0.4}
    slopes = [
        {"algorithm": algorithm, "variant": variant, "average": average, **fitted}
        for algorithm, names in variants.items() for variant in names for average in ("all t", "second half")
    ]  # fmt: skip
    estimator = [{"clients": clients, "variance": 1 / clients, "bias_square": 0.01} for clients in (1, 4)]
    tables = {"points": points, "slopes": slopes, "bounds": bounds, "communication": sent, "speedup": speedup}
    others = {f"rates-{name}": pd.DataFrame(table) for name, table in {**tables, "estimator": estimator}.items()}
    with RunFolder.open(path, command="rates", configuration={"seed": 0}, line="fedbilevel rates") as run:
        run.save("all", rows=rows.assign(dataset="T = " + rows["horizon"].astype(str)), others=others)
        return run.finish()


def fairness(path):
    """Methods over splits, and a front of settings for two of them, one far below the rest."""
    rng = np.random.default_rng(3)
    names = ("FedAvg", "FedReg", "FedBiO, cells")
    keys = {"dataset": "adult-sex", "split": "iid"}
    rows = [
        {**keys, "method": method, "seed": split, "split_seed": split, "test_accuracy": 0.85 + 0.001 * rng.normal(),
         "test_gap": 0.1 + 0.01 * rng.normal()} for method in names for split in range(3)
    ]  # fmt: skip
    fronts = [
        {"case": "adult-sex", "distribution": "iid", "method": method, "setting": f"s={place}", "splits": 3,
         "test_accuracy": accuracy, "test_gap": 0.1 - 0.02 * place, "test_gap_low": 0.01, "test_gap_high": 0.12,
         "test_accuracy_low": accuracy - 0.002, "test_accuracy_high": accuracy + 0.002}
        for method in names[1:] for place, accuracy in enumerate((0.85, 0.848, 0.76 if method == "FedReg" else 0.847))
    ]  # fmt: skip
    floors = [{"case": "adult-sex", "fair_in_training": 0.03}]
    others = {"fairness-fronts": pd.DataFrame(fronts), "fairness-floors": pd.DataFrame(floors)}
    with RunFolder.open(path, command="fairness", configuration={"splits": 3}, line="fedbilevel fairness") as run:
        run.save("all", rows=pd.DataFrame(rows), others=others)
        return run.finish()

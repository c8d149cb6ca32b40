"""What `fedbilevel table1` runs: the options, every constant they resolve to, and the list of runs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from fedbilevel.fairness.counts import CRITERIA
from fedbilevel.fairness.counts import METHODS as CONVENTIONS
from fedbilevel.fairness.formulation import Formulation
from fedbilevel.fairness.recipe import Recipe
from fedbilevel.problem import whole_number
from fedbilevel.studies.table1.data import CASES, CLIENTS, DISTRIBUTIONS, ENCODINGS, SET_ASIDE, SHARES, TEST_SHARE

PAPER = {
    "fedavg": "FedAvg",
    "fedreg": "FedReg",
    "fedminmax": "FedMinMax",
    "fcfl": "FCFL",
    "fedbio": "FedBiO",
    "fedbioacc": "FedBiOAcc",
}
OURS = {"fedbio-cells": "FedBiO, cells", "fedbioacc-cells": "FedBiOAcc, cells"}
LABELS = {**PAPER, **OURS}
"""Methods by the names the command takes, and how they are shown."""
SHORT = {"paper": tuple(PAPER), "ours": tuple(OURS), "all": tuple(LABELS)}
RATES = (0.001, 0.01, 0.1, 1.0)
"""The paper's search."""
RATE = 0.1
"""Without a search; the paper: "most algorithms get best performance at 0.1 or 1"."""
TERMS = 10
"""Q of the Neumann series: the paper does not say."""
SPLITS = ("one", "many")

# Milliseconds of one run on one core of an ordinary machine: only for guessing the time that is left.
_COST = {
    "adult": {"fedavg": 60, "fedreg": 70, "fedminmax": 1200, "fcfl": 2000, "fedbio": 500, "fedbioacc": 700},
    "credit": {"fedavg": 20, "fedreg": 30, "fedminmax": 70, "fcfl": 60, "fedbio": 120, "fedbioacc": 170},
}


@dataclass(frozen=True)
class Job:
    """Runs that one computation serves: one seed, or all of them where the method draws nothing at random."""

    dataset: str
    distribution: str
    method: str
    rate: float
    split_seed: int
    seeds: tuple[int, ...]

    def key(self, seed: int) -> str:
        return f"{self.dataset} {self.distribution} {self.method} {self.rate:g} {seed}"

    @property
    def keys(self) -> list[str]:
        return [self.key(seed) for seed in self.seeds]

    @property
    def program(self) -> tuple[str, str]:
        """What jobs must share to run the same compiled program."""
        return self.dataset, self.method

    @property
    def cost(self) -> float:
        return _COST[self.dataset][self.method.removesuffix("-cells")] / 1000


@dataclass(frozen=True)
class Design:
    """The options of the command; see `configuration` for all they resolve to."""

    datasets: tuple[str, ...] = tuple(CASES)
    distributions: tuple[str, ...] = DISTRIBUTIONS
    methods: tuple[str, ...] = tuple(PAPER)
    seeds: int = 10
    steps: int = 2000
    splits: str = "one"
    grid: bool = False
    encoding: str = "clean"
    metric: str = "equal_opportunity"
    convention: str = "between_groups"

    def __post_init__(self) -> None:
        several = {"datasets": tuple(CASES), "distributions": DISTRIBUTIONS, "methods": tuple(LABELS)}
        for name, allowed in several.items():
            values = getattr(self, name)
            if not values:
                raise ValueError(f"--{name} is empty: name one or several of {', '.join(allowed)}.")
            for value in values:
                if value not in allowed:
                    raise ValueError(f"--{name} {value}: unknown; choose from {', '.join(allowed)}.")
            object.__setattr__(self, name, tuple(value for value in allowed if value in values))
        single = {"splits": SPLITS, "encoding": ENCODINGS, "metric": tuple(CRITERIA), "convention": CONVENTIONS}
        for name, choices in single.items():
            if getattr(self, name) not in choices:
                raise ValueError(f"--{name} {getattr(self, name)}: unknown; choose {', '.join(choices)}.")
        whole_number("--seeds", self.seeds)
        whole_number("--steps", self.steps)

    @property
    def rates(self) -> tuple[float, ...]:
        return RATES if self.grid else (RATE,)

    def recipe(self, dataset: str, method: str) -> Recipe:
        case = CASES[dataset]
        cells = method in OURS
        basic = Recipe(
            method.removesuffix("-cells"),
            Formulation("cells", self.metric) if cells else Formulation("paper"),
            steps=self.steps,
            weight_steps=None if cells and self.steps == 2000 else self.steps,
            batch_size=case.batch_size,
            step=RATE,
            terms=TERMS,
        )
        # "cells" reads the training rows on both levels, so joining the two would count them twice.
        return replace(basic, train_on="train") if cells else replace(basic, outer_batch_size=case.outer_batch)

    def configuration(self) -> dict[str, Any]:
        """Every resolved option, and the constants that the paper leaves open."""
        recipes = {LABELS[method]: self.recipe(self.datasets[0], method) for method in self.methods}
        return {
            "datasets": self.datasets, "distributions": self.distributions, "methods": self.methods,
            "seeds": self.seeds, "steps": self.steps, "splits": self.splits, "rates": self.rates,
            "encoding": self.encoding, "metric": self.metric, "convention": self.convention,
            "test_share": TEST_SHARE, "set_aside": SET_ASIDE, "clients": CLIENTS, "shares": SHARES,
            "batch_size": {name: CASES[name].batch_size for name in self.datasets},
            "outer_batch_size": {name: CASES[name].outer_batch for name in self.datasets},
            "sensitive": {"adult": "race", "credit": "personal_status"},
            "local_steps": Recipe().local_steps, "ridge": Formulation().ridge, "terms": TERMS,
            "series_step": Recipe().series_step, "penalty": Recipe().penalty, "group_step": Recipe().group_step,
            "epsilon": Recipe().epsilon,
            "rounds": {name: recipe.rounds for name, recipe in recipes.items()},
        }  # fmt: skip

    @cached_property
    def jobs(self) -> list[Job]:
        """All runs, in the order of the table."""
        return list(self._jobs())

    def _jobs(self) -> Iterator[Job]:
        for dataset in self.datasets:
            for distribution in self.distributions:
                for method in self.methods:
                    for rate in self.rates:
                        if self.splits == "one" and method == "fcfl":
                            # Whole local sets from a fixed start: on one split every seed gives the same run.
                            yield Job(dataset, distribution, method, rate, 0, tuple(range(self.seeds)))
                            continue
                        for seed in range(self.seeds):
                            split_seed = 0 if self.splits == "one" else seed
                            yield Job(dataset, distribution, method, rate, split_seed, (seed,))


def listed(text: str, name: str) -> tuple[str, ...]:
    """A list as the command line takes it: names with commas; of methods also "paper", "ours" and "all"."""
    words = [word.strip().lower() for word in text.split(",") if word.strip()]
    if name == "methods":
        words = [method for word in words for method in SHORT.get(word, (word,))]
    return tuple(dict.fromkeys(words))


def from_configuration(kept: dict[str, Any]) -> Design:
    """The design of a run folder."""
    try:
        return Design(
            tuple(kept["datasets"]), tuple(kept["distributions"]), tuple(kept["methods"]), kept["seeds"], kept["steps"],
            kept["splits"], len(kept["rates"]) > 1, kept["encoding"], kept["metric"], kept["convention"],
        )  # fmt: skip
    except KeyError as error:
        raise ValueError(f"run.toml does not say {error}: this is not a folder of `fedbilevel table1`.") from error

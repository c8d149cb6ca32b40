"""The first fit of an estimator with its defaults, in a fresh process: what a newcomer waits for.

"cold": JAX's compilation cache is empty; "warm": it holds what the cold process left. A second fit in the same process, and
which folds of a cross-validation compile, show what is left of that later.
"""

import time
from collections.abc import Callable
from tempfile import TemporaryDirectory
from typing import Any

from harness import Job, Measured, markdown, measure, median, spread, verdict

ROWS, COLUMNS, CLIENTS, FOLDS = 10_000, 20, 3, 10
COLD, WARM, FOLDED = "cold", "warm", "cross-validation"
LIMITS = {COLD: 3.0, WARM: 1.0}


def run(job: Job) -> dict[str, Any]:
    """Fit twice, or on the training rows of every fold."""
    began = time.perf_counter()
    import jax
    import numpy as np
    from sklearn.model_selection import StratifiedKFold

    from fedbilevel.fairness import FairFederatedClassifier

    imported = time.perf_counter() - began
    chance = np.random.default_rng(0)
    features, groups = chance.normal(size=(ROWS, COLUMNS)), chance.integers(0, 2, ROWS)
    labels = (features[:, 0] + 0.5 * groups + chance.normal(size=ROWS) > 0).astype(int)
    sites = chance.integers(0, CLIENTS, ROWS)
    asked = [0]

    def compiled(event: str, _: float, **about: Any) -> None:
        asked[0] += event == "/jax/core/compile/backend_compile_duration"

    jax.monitoring.register_event_duration_secs_listener(compiled)

    def fit(rows: Any) -> dict[str, float]:
        before, clock, processor = asked[0], time.perf_counter(), time.process_time()
        estimator = FairFederatedClassifier(random_state=0)
        estimator.fit(features[rows], labels[rows], sensitive_features=groups[rows], clients=sites[rows])
        spent = {"seconds": time.perf_counter() - clock, "cpu": time.process_time() - processor}
        return {**spent, "programs": asked[0] - before}

    if job["case"] == FOLDED:
        each = [fit(train) for train, _ in StratifiedKFold(FOLDS).split(features, labels)]
    else:
        each = [fit(slice(None)) for _ in range(2)]
    first, others = each[0], each[1:]
    mean = {name: sum(one[name] for one in others) / len(others) for name in first}
    # Of programs the sum: none of the others is to compile any.
    later = {**mean, "programs": sum(one["programs"] for one in others)}
    named = {f"{when} {name}": one[name] for when, one in (("first", first), ("later", later)) for name in one}
    return {"import": imported, **named}


def collect(repeats: int, quick: bool, say: Callable[[str], None]) -> Measured:
    measured: Measured = {COLD: [], WARM: [], FOLDED: []}
    for number in range(repeats):
        with TemporaryDirectory() as folder:
            cache = {
                "JAX_ENABLE_COMPILATION_CACHE": "true",
                "JAX_COMPILATION_CACHE_DIR": folder,
                "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            }
            for case in (COLD, WARM):
                measured[case].append(measure({"kind": "fit", "case": case}, cache))
        measured[FOLDED].append(measure({"kind": "fit", "case": FOLDED}))
        shown = ", ".join(f"{case} {results[-1]['first seconds']:.3g} s" for case, results in measured.items())
        say(f"[{number + 1}/{repeats}] {shown}")
    return measured


def table(measured: Measured) -> str:
    rows = []
    names = {
        COLD: "nothing compiled before",
        WARM: "compilation cache filled",
        FOLDED: f"{FOLDS} folds, nothing compiled before",
    }
    columns = ("import", "first seconds", "first cpu", "later seconds", "later cpu")
    for case, title in names.items():
        results = measured[case]
        numbers = [f"{median(results, name):.3g}" for name in columns]
        programs = [f"{median(results, f'{when} programs'):.0f}" for when in ("first", "later")]
        rows.append([title, *numbers, *programs, spread(results, "first seconds")])
    header = [
        "seconds", "import", "first fit", "processor time", "a later fit", "processor time", "programs of the first",
        "of all later ones", "first fit, least to most",
    ]  # fmt: skip
    note = (
        f"`FairFederatedClassifier` with its defaults on {ROWS:,} rows of {COLUMNS} columns, {CLIENTS} clients; "
        "fresh processes, all cores. Programs are those that JAX asks for: with a filled cache it reads them, and compiles "
        "nothing."
    )
    verdicts = [
        verdict(f"first fit, {names[case]}, seconds", median(measured[case], "first seconds"), limit, at_least=False)
        for case, limit in LIMITS.items()
    ]
    later = max(result["later programs"] for result in measured[FOLDED])
    verdicts.append(verdict("programs that folds after the first compile", later, 0, at_least=False))
    return "\n".join([markdown(header, rows), "", note, "", *verdicts])

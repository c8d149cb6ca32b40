"""Options and arguments that several commands have, each said once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer

METHODS = ("fedpath", "fedbioacc", "fedbio", "fedavg", "fedreg", "fedminmax", "fcfl", "fedfb", "fairfed")
METRICS = ("equal_opportunity", "equalized_odds", "demographic_parity")
"""Names that the shell completes; written out, since what defines them takes seconds to load."""


def one_of(names: Sequence[str]) -> Callable[[str], list[str]]:
    """Completes one of ``names``."""
    return lambda incomplete: [name for name in names if name.startswith(incomplete)]


def columns(ctx: typer.Context, incomplete: str) -> list[str]:
    """Completes a column of the files that were typed before; nothing where they cannot be read."""
    from fedbilevel.tables.reading import open_table

    names: dict[str, None] = {}
    # Before a value that is still to be typed nothing is parsed: the words are all there is.
    for file in [*(ctx.params.get("files") or ()), *ctx.args]:
        with suppress(Exception):  # a shell that waits for a name is no place to complain
            names |= dict.fromkeys(open_table(Path(file)).columns)
    return [name for name in names if name.startswith(incomplete)]


AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, for machines.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print nothing but errors.")]
Seed = Annotated[int, typer.Option(help="Seed of all random numbers.", min=0)]

# Your own tables.
Files = Annotated[
    list[Path], typer.Argument(metavar="FILES", help="Tables, CSV or Parquet: one for each site, or one for all.")
]
Target = Annotated[str | None, typer.Option(help="The column to predict.", autocompletion=columns)]
Sensitive = Annotated[
    list[str] | None,
    typer.Option(
        help="The column that makes the groups; name several to join them ('Black & Female').", autocompletion=columns
    ),
]
Prediction = Annotated[
    str | None,
    typer.Option(
        help="The column with the model's answers; if each class has a column of probabilities, what their names begin with.",
        autocompletion=columns,
    ),
]
SiteColumn = Annotated[
    str | None,
    typer.Option("--site", help="The column that says which site a row belongs to.", autocompletion=columns),
]
Positive = Annotated[str | None, typer.Option(help="The class that counts as 1; all others count as 0.")]
Task = Annotated[
    str | None,
    typer.Option(
        help="classification, or regression: a number is predicted; if not given, the target's values decide."
    ),
]
KeepSensitive = Annotated[bool, typer.Option(help="Use the sensitive columns as features too.")]
Delimiter = Annotated[
    str | None, typer.Option(help="Character between the fields of CSV files; detected if not given.")
]
Encoding = Annotated[str | None, typer.Option(help="utf-8, latin-1 or windows-1252; detected if not given.")]
SchemaFile = Annotated[Path | None, typer.Option("--schema", help="What the columns mean, from the command schema.")]
MappingFile = Annotated[
    Path | None,
    typer.Option("--mapping", help="How each site's table becomes the common one; schema --propose drafts it."),
]

# A fit, simulated or over sites.
Clients = Annotated[int | None, typer.Option(help="Deal the rows of one file to this many clients.", min=1)]
Secure = Annotated[
    bool, typer.Option("--secure", help="Round averages as secure sums over real sites do, to see the effect.")
]
TestShare = Annotated[float, typer.Option(help="Share of every site's rows kept for testing.")]
Method = Annotated[
    str,
    typer.Option(
        help="fedpath, fedbioacc, fedbio, fedavg (no fairness), fedreg, fedminmax, fcfl, fedfb or fairfed.",
        autocompletion=one_of(METHODS),
    ),
]
Formulation = Annotated[
    str,
    typer.Option(help="Of fedbioacc and fedbio: cells (ours) or paper.", autocompletion=one_of(("cells", "paper"))),
]
ClassMetric = Annotated[
    str,
    typer.Option(help="equal_opportunity, equalized_odds or demographic_parity.", autocompletion=one_of(METRICS)),
]
Metric = Annotated[
    str | None,
    typer.Option(
        help="equal_opportunity (default), equalized_odds, demographic_parity or calibration; for numbers mean_error (default) "
        "or mean_prediction.",
        autocompletion=one_of((*METRICS, "calibration", "mean_error", "mean_prediction")),
    ),
]
Loss = Annotated[
    str,
    typer.Option(
        help="For numbers: squared, or huber, which is less sensitive to outliers.",
        autocompletion=one_of(("squared", "huber")),
    ),
]
Gap = Annotated[float | None, typer.Option(help="Aim at this gap, such as 0.02 (fedpath).")]
AccuracyLoss = Annotated[float | None, typer.Option(help="Spend at most this much accuracy, such as 0.005 (fedpath).")]
Steps = Annotated[
    int | None, typer.Option(help="Training steps; the method's own if not given (fedpath sets its own).", min=1)
]
WeightSteps = Annotated[
    int | None, typer.Option(help="Steps of the bilevel stage; the method's own if not given.", min=1)
]
BatchSize = Annotated[int, typer.Option(help="Rows in a minibatch.", min=1)]
Model = Annotated[
    str | None, typer.Option(help="logistic (for numbers: linear) by default, or mlp (one hidden layer).")
]
ClientWeights = Annotated[str, typer.Option(help="Sites count alike (uniform) or by their rows (samples).")]
ClassWeight = Annotated[
    str | None,
    typer.Option(help="balanced: all classes count alike, however rare (fedpath, fedbioacc, fedbio, fedavg)."),
]
Threshold = Annotated[
    str | None,
    typer.Option(
        help="Yes above this probability: a number (0.5), auto (best balanced accuracy), rate=0.1 or recall=0.8; for more than "
        "two classes only auto."
    ),
]
MinimumCell = Annotated[
    int, typer.Option(help="Groups with fewer positives or negatives are not shown by themselves.", min=1)
]
SecureAggregation = Annotated[
    str, typer.Option(help="on: only sums over sites are seen (three or more); off: where policies allow it.")
]
LocalSteps = Annotated[int, typer.Option(help="Steps between two exchanges.", min=1)]

# A federation.
KitFolder = Annotated[Path, typer.Argument(metavar="KIT", help="A kit's folder.")]
KitsFolder = Annotated[Path | None, typer.Option("--kits", help="The federation's folder.", metavar="DIR")]
AdminKit = Annotated[Path | None, typer.Option(help="The coordinator's kit, instead of --kits.")]
ServerKit = Annotated[Path | None, typer.Option(help="The server's kit, with --admin.")]

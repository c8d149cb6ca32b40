"""Table 1 of the paper as printed: mean and standard deviation of ten runs."""

from __future__ import annotations

COLUMNS = ("test_accuracy", "train_gap", "test_gap")
METRIC = "equal_opportunity"

Figure = tuple[float, float]
_PRINTED = {
    ("adult", "iid"): """
        FedAvg     .8239 .0167  .0391 .0061  .0420 .0034
        FedReg     .8240 .0159  .0361 .0047  .0425 .0029
        FedMinMax  .8228 .0163  .0220 .0057  .0366 .0049
        FCFL       .8238 .0159  .0356 .0029  .0452 .0012
        FedBiO     .8228 .0163  .0238 .0058  .0337 .0012
        FedBiOAcc  .8391 .0163  .0222 .0064  .0335 .0006""",
    ("adult", "noniid"): """
        FedAvg     .8283 .0080  .0261 .0022  .0507 .0011
        FedReg     .8271 .0077  .0244 .0013  .0498 .0010
        FedMinMax  .8272 .0077  .0274 .0029  .0363 .0013
        FCFL       .8273 .0074  .0249 .0032  .0501 .0014
        FedBiO     .8331 .0019  .0263 .0010  .0338 .0008
        FedBiOAcc  .8204 .0013  .0289 .0005  .0356 .0055""",
    ("credit", "iid"): """
        FedAvg     .6873 .0314  .0788 .0136  .0599 .0122
        FedReg     .6870 .0374  .0836 .0015  .0575 .0114
        FedMinMax  .6759 .0757  .0857 .0042  .0722 .0013
        FCFL       .6864 .0237  .0727 .0073  .0375 .0028
        FedBiO     .7015 .0169  .0548 .0072  .0513 .0059
        FedBiOAcc  .7067 .0121  .0665 .0034  .0501 .0051""",
    ("credit", "noniid"): """
        FedAvg     .7386 .0011  .0832 .0248  .1354 .0128
        FedReg     .7303 .0097  .0735 .0216  .1341 .0088
        FedMinMax  .6966 .0104  .0477 .0155  .1222 .0024
        FCFL       .7266 .0026  .0777 .0162  .1463 .0014
        FedBiO     .7339 .0033  .0782 .0116  .1260 .0013
        FedBiOAcc  .7312 .0023  .0799 .0152  .1021 .0011""",
}


def _parsed() -> dict[tuple[str, str, str, str], Figure]:
    figures = {}
    for (dataset, split), lines in _PRINTED.items():
        for line in lines.split("\n")[1:]:
            method, *texts = line.split()
            numbers = [float(text) for text in texts]
            for place, column in enumerate(COLUMNS):
                figures[dataset, split, method, column] = (numbers[2 * place], numbers[2 * place + 1])
    return figures


TABLE1: dict[tuple[str, str, str, str], Figure] = _parsed()
"""(dataset, split, method, column) -> (mean, standard deviation)."""


def printed(dataset: str, split: str, method: str, column: str) -> Figure | None:
    """The paper's cell for one of ours; None where the paper has none.

    Our "FedBiO, paper" is the paper's FedBiO; our own formulation "FedBiO, cells" is not in the paper.

    >>> printed("adult", "iid", "FedBiO, paper", "test_gap"), printed("adult", "iid", "FedBiO, cells", "test_gap")
    ((0.0337, 0.0012), None)
    """
    return TABLE1.get((dataset, split, method.removesuffix(", paper"), column))

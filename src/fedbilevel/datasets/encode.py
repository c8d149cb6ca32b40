"""From typed columns to matrices: the clean encoding (fitted on the training part), and the paper's.

Clean: categories one-hot, numbers standardised, every statistic taken from the rows the transformer is fitted on; the numbers
are those of `fedbilevel.tables.encoder.Encoder`, without its constant column.

Paper: the paper preprocesses "with code provided by" Diana et al. (Minimax group fairness, 2021). Two of its steps are
reproduced here, written from their effect: `positional_one_hot` with its index slip, and `power_of_ten`. Both look at
all rows, test rows included: they are for comparison with the paper, not for new work.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from fedbilevel.tables.columns import is_number_column, to_frame
from fedbilevel.tables.encoder import check_features

if TYPE_CHECKING:
    from fedbilevel.datasets.clean import CleanTransformer


def clean_transformer(X: Any) -> CleanTransformer:
    """An unfitted scikit-learn transformer for tables like `X`: one-hot for categories, standardised numbers.

    Fit it on the training part only. A category first seen later becomes all zeros.

    Examples:
        >>> import pandas as pd
        >>> X = pd.DataFrame({"age": [20, 30, 40], "job": ["cook", "judge", "cook"]})
        >>> encoder = clean_transformer(X).fit(X)
        >>> feature_matrix(encoder, X.tail(1)).round(2).tolist()
        [[1.2200000286102295, 1.0, 0.0]]
    """
    # Importing scikit-learn takes longer than loading Adult, and the paper's encoding does without it.
    from fedbilevel.datasets.clean import CleanTransformer

    check_features(to_frame(X))
    return CleanTransformer()


def feature_matrix(transformer: CleanTransformer, X: Any) -> NDArray[np.float32]:
    """Rows as a float32 matrix by a fitted transformer; columns it does not know are ignored, missing ones an error."""
    return np.ascontiguousarray(transformer.transform(X), dtype=np.float32)


def positional_one_hot(frame: pd.DataFrame, *, original: list[str], categorical: set[str]) -> pd.DataFrame:
    """One-hot columns for text, and for numbers that stand where `original` has a categorical column.

    The slip: positions are counted in `frame`, which lacks the dropped sensitive column, but looked up in `original`,
    which has it. On Adult without race, capital_gain stands where sex stood and becomes 119 columns. Categories are
    in sorted order; a text column with two values becomes one column, 1 for the later value.
    """
    pieces: list[NDArray[np.float64]] = []
    names: list[str] = []
    for position, column in enumerate(frame.columns):
        values = frame[column]
        if is_number_column(values) and original[position] not in categorical:
            pieces.append(values.to_numpy(dtype=np.float64)[:, None])
            names.append(column)
            continue
        codes, distinct = pd.factorize(values.to_numpy(), sort=True)
        indicators = (codes[:, None] == np.arange(len(distinct))).astype(np.float64)
        shown = [f"{column}={value}" for value in distinct]
        first = 1 if len(distinct) == 2 else 0
        pieces.append(indicators[:, first:])
        names.extend(shown[first:])
    return pd.DataFrame(np.concatenate(pieces, axis=1), columns=names)


def power_of_ten(frame: pd.DataFrame) -> pd.DataFrame:
    """Every column divided by ten to the order of magnitude of its largest absolute value, so by 1 for 0/1 columns."""
    values = frame.to_numpy(dtype=np.float64)
    largest = np.abs(values).max(axis=0)
    # A column of zeros has no order of magnitude; it stays as it is.
    magnitude = np.floor(np.log10(np.where(largest > 0, largest, 1.0)))
    return pd.DataFrame(values / 10.0**magnitude, columns=frame.columns)

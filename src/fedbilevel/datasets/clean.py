"""The clean encoding as a scikit-learn transformer, for pipelines."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from sklearn.base import BaseEstimator, TransformerMixin
from sklearn.utils.validation import check_is_fitted

from fedbilevel.tables.columns import check_columns, to_frame
from fedbilevel.tables.encoder import Encoder, check_features


class CleanTransformer(TransformerMixin, BaseEstimator):  # type: ignore[misc]
    """One-hot for categories, standardised numbers; see `fedbilevel.datasets.encode.clean_transformer`.

    Attributes:
        encoder_: what was learned in fit.
        feature_names_in_: the columns seen there.
    """

    def fit(self, X: Any, y: Any = None) -> CleanTransformer:
        self.feature_names_in_ = np.asarray(to_frame(X).columns, dtype=object)
        self.n_features_in_ = len(self.feature_names_in_)
        self.encoder_ = Encoder.learn(X, every_value=True)
        return self

    def transform(self, X: Any) -> NDArray[np.float32]:
        check_is_fitted(self)
        frame = to_frame(X)
        check_columns(frame, self.feature_names_in_, "X")
        check_features(frame[[*self.feature_names_in_]])
        return self.encoder_.transform(frame)[:, :-1]

    def get_feature_names_out(self, input_features: Any = None) -> NDArray[np.object_]:
        check_is_fitted(self)
        return np.asarray(self.encoder_.feature_names[:-1], dtype=object)

"""Scikit-learn estimators whose penalties tune themselves over clients: what ``fedbilevel tune`` does, for arrays in
memory."""

from __future__ import annotations

from typing import Any, Self

import numpy as np
import pandas as pd
from sklearn.utils import check_random_state

from fedbilevel.fairness.estimator import Federated, OfClasses, OfNumbers
from fedbilevel.fairness.models import Model
from fedbilevel.hints import whole_number
from fedbilevel.tuning.program import FOLDS, ROUNDS, TuneProgram, column_places, reading_of
from fedbilevel.tuning.simulation import Tuner


class TunedFederated(Federated):
    """What the classifier and the regressor share."""

    what: Any
    folds: int
    rounds: int
    random_state: Any

    def fit(self, X: Any, y: Any, *, clients: Any = None) -> Self:
        """Tune and train on the rows of ``X``.

        Args:
            X: a table or a matrix, as `fedbilevel.fairness.FairFederatedClassifier` takes it.
            y: the class of every row, or its number.
            clients: which site every row belongs to.  None: one client holds all rows.
        """
        features, labels = self._learn(X, y)
        parts = self._clients(clients, features)
        whole_number("rounds", self.rounds)
        what = (self.what,) if isinstance(self.what, str) else tuple(self.what)
        self.model_ = self._model(features.shape[1])
        seed = int(check_random_state(self.random_state).randint(2**31 - 1))
        program = TuneProgram(
            reading_of(self.model_, what, minimum=1),  # nothing leaves this machine
            what,
            column_places(self.encoder_.columns),
            len(parts),
            len(features),
            self.folds,
            self.rounds,
            seed,
        )
        tuned = Tuner().run(program, [(features[part], labels[part].astype(np.float64)) for part in parts], record=True)
        self.params_, self.history_, self.threshold_ = tuned.params, tuned.history, 0.5
        self._remember(program, tuned, features, labels)
        return self

    def _remember(self, program: TuneProgram, tuned: Any, features: np.ndarray, labels: np.ndarray) -> None:
        choices, shrunk = tuned.choices, (self.folds - 1) / self.folds
        each = shrunk * np.asarray(tuned.tuning.penalties(choices, np))[:-1]
        self.penalties_ = pd.Series(each, index=self.encoder_.feature_names[:-1], name="penalty")
        weights = None if choices.sites is None else np.asarray(tuned.tuning.site_weights(choices.sites))
        self.site_weights_ = None if weights is None else pd.Series(weights, index=list(self.clients_), name="weight")
        self.class_weights_ = self.label_smoothing_ = self.label_noise_ = self.doubtful_ = None
        if choices.classes is not None:
            scaled = np.exp(choices.classes - np.mean(choices.classes))
            self.class_weights_ = pd.Series(scaled, index=list(self._labels), name="weight")
            self.label_smoothing_ = float(1 / (1 + np.exp(-choices.smoothing)))
        if choices.trust is not None:
            self.label_noise_ = float(1 / (1 + np.exp(-choices.noise)))
            self.doubtful_ = np.zeros(len(labels), bool)
            self.doubtful_[program.doubtful(choices, features, labels)["row"].to_numpy()] = True
        self.bytes_ = tuned.bytes_up + tuned.bytes_down


class TunedFederatedClassifier(OfClasses, TunedFederated):
    """Logistic regression over clients that keep their rows (simulated here), whose hyper-parameters one bilevel run has
    tuned.

    The penalties are learned on rows that every client holds out in turn, then the model is fitted on all rows.  There is
    no step size, and no grid.

    Args:
        what: One or several of "penalties" (one for each column of a table), "features" (one for each feature), "classes"
            (class weights and label smoothing; all classes then count alike in validation), "sites" (how much each client
            counts in training) and "rows" (labels that are not believed).
        folds: Parts of each client's rows, each held out once.
        rounds: How many choices to try at most; training may end earlier.
        random_state: Decides which rows are in which fold.

    Attributes:
        classes_, n_features_in_, feature_names_in_ (tables with named columns), clients_: what was seen in fit.
        penalties_: of every encoded feature, on the mean loss of a row.
        class_weights_, label_smoothing_, site_weights_: what was learned; None where it was not asked for.
        label_noise_: for "rows", the share of labels that are taken to be drawn at random.
        doubtful_: for "rows", which rows of ``X`` have labels that are not believed.
        coef_, intercept_, history_, encoder_: as in `fedbilevel.fairness.FairFederatedClassifier`.
        bytes_: sent and received by all clients.

    Examples:
        >>> import numpy as np
        >>> rng = np.random.default_rng(1)
        >>> X, hospital = rng.normal(size=(120, 5)), rng.choice(["north", "south"], 120)
        >>> y = X[:, 0] + 0.5 * rng.normal(size=120) > 0
        >>> clf = TunedFederatedClassifier(what="features", random_state=0).fit(X, y, clients=hospital)
        >>> bool(clf.penalties_.iloc[0] < clf.penalties_.iloc[1:].mean()), bool(clf.score(X, y) > 0.85)
        (True, True)
    """

    def __init__(
        self, what: Any = ("penalties",), *, folds: int = FOLDS, rounds: int = ROUNDS, random_state: Any = None
    ) -> None:
        self.what = what
        self.folds = folds
        self.rounds = rounds
        self.random_state = random_state

    def _model(self, features: int) -> Model:
        return Model("logistic", features, len(self.classes_))


class TunedFederatedRegressor(OfNumbers, TunedFederated):
    """Linear regression over clients, tuned likewise: see `TunedFederatedClassifier`.

    Args:
        what: One or several of "penalties", "features" and "sites".
        folds: Parts of each client's rows, each held out once.
        rounds: How many choices to try at most; training may end earlier.
        random_state: Decides which rows are in which fold.
    """

    def __init__(
        self, what: Any = ("penalties",), *, folds: int = FOLDS, rounds: int = ROUNDS, random_state: Any = None
    ) -> None:
        self.what = what
        self.folds = folds
        self.rounds = rounds
        self.random_state = random_state

    def _model(self, features: int) -> Model:
        return Model("linear", features, 1, loss="squared")

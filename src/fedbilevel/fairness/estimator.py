"""A scikit-learn classifier, and a regressor, fair to groups and trained over clients: the door for people with tables."""

from __future__ import annotations

import json
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import numpy as np
import pandas as pd
from scipy.sparse import issparse
from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
from sklearn.utils import assert_all_finite, check_random_state
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, column_or_1d, validate_data

from fedbilevel.datasets import partition
from fedbilevel.fairness.findings import Finding, of_model
from fedbilevel.fairness.formulation import Deviation, Formulation
from fedbilevel.fairness.frontier import explained
from fedbilevel.fairness.methods import Recipe, check_aims
from fedbilevel.fairness.metrics import Counts
from fedbilevel.fairness.models import Model, numbers, probabilities
from fedbilevel.fairness.program import FairProgram, smoothness
from fedbilevel.fairness.saving import FittedModel, named_weights, plain
from fedbilevel.fairness.thresholds import Threshold, decisions
from fedbilevel.fairness.trainer import dealt, fit_alike, tuned_threshold
from fedbilevel.hints import whole_number
from fedbilevel.tables.columns import check_lengths, encode_groups, listed, shown, to_frame
from fedbilevel.tables.encoder import Encoder
from fedbilevel.tables.profile import MOST_GROUPS

MATRIX = {"dtype": np.float64, "accept_sparse": "csr", "ensure_all_finite": "allow-nan"}
PLAIN = ("b", "i", "u", "U")
"""Kinds of arrays that hold classes whatever is in them.  scikit-learn would look through all installed packages for one that
knows of other tables, which takes a tenth of a second."""
MOST_CELLS = 1 << 30
SEVERAL = 10
"""More groups than this are refused where all are fractions: such a column measures, it does not name groups."""


class UselessModel(UserWarning):
    """A classifier selects (almost) nobody or everybody."""


class AimMissed(UserWarning):
    """The gap that was aimed at was not reached, or the model of the strength asked for is of no use."""


class Federated(BaseEstimator):  # type: ignore[misc]
    """What estimators over clients share: tables in, clients, coefficients."""

    encoder_: Encoder

    _regression = False

    def get_feature_names_out(self, input_features: Any = None) -> np.ndarray:
        """Names of the encoded features, to which ``coef_`` belongs."""
        check_is_fitted(self)
        return np.asarray(self.encoder_.feature_names[:-1], dtype=object)

    @property
    def coef_(self) -> np.ndarray:
        """``[1, features]`` (two classes) or ``[classes, features]``, for the encoded features; linear models only."""
        return self._linear[:, :-1]

    @property
    def intercept_(self) -> np.ndarray:
        """``[1]`` or ``[classes]``; the encoded numbers have mean 0."""
        return self._linear[:, -1]

    @property
    def _linear(self) -> np.ndarray:
        check_is_fitted(self)
        if self.model_.kind == "mlp":
            raise AttributeError(f"A model of kind {self.model_.kind!r} has no coefficients.")
        return np.atleast_2d(np.asarray(self.params_, np.float64).T)

    def coefficients(self) -> pd.DataFrame:
        """Coefficients in the units of the columns: of a number, what one more of it adds; ``(intercept)`` is last.

        One column a class, or one for two classes, or for a number, in its own units.  Cut (at 20 spreads) and missing cells
        are not seen here.
        """
        table = np.array(self._linear)
        scales, shifts = self.encoder_.units
        table[:, -1] -= table[:, :-1] @ (shifts / scales)
        table[:, :-1] /= scales
        if self.encoder_.target is not None:
            mean, spread = self.encoder_.target
            table *= spread
            table[:, -1] += mean
        names: Any = self._labels[1:] if len(table) == 1 else self._labels
        names = ["prediction"] if self._regression else names
        return pd.DataFrame(table.T, index=[*self.get_feature_names_out(), "(intercept)"], columns=names)

    def _learn(self, X: Any, y: Any) -> tuple[np.ndarray, np.ndarray]:
        """Encode features and labels, and remember how."""
        if y is None:
            raise ValueError(f"This {type(self).__name__} requires y to be passed, but the target y is None.")
        if hasattr(X, "columns"):
            validate_data(self, X, skip_check_array=True)
            self.encoder_ = Encoder.learn(X)
            _say_what_is_left_out(X, self.encoder_)
        else:
            X = _dense(validate_data(self, X, **MATRIX))
            self.encoder_ = Encoder.learn(X)
        features = self.encoder_.transform(X)
        values = y.to_numpy() if hasattr(y, "to_numpy") else y
        if type(values) is not np.ndarray or values.ndim != 1 or values.dtype.kind not in (*PLAIN, "f", "O"):
            values = column_or_1d(values, warn=True)
        if values.dtype.kind == "f":
            assert_all_finite(values, input_name="y")
        if pd.isna(values).any():
            raise ValueError(f"y has {int(pd.isna(values).sum())} missing value(s) (NaN); leave those rows out.")
        if len(values) != len(features):
            raise ValueError(f"y has {len(values)} rows but X has {len(features)}: inconsistent numbers of samples.")
        return features, self._targets(values)

    def _encoded(self, X: Any) -> np.ndarray:
        by_place = [column.name for column in self.encoder_.columns] == [f"x{i}" for i in range(self.n_features_in_)]
        if not by_place or hasattr(self, "feature_names_in_"):
            if not hasattr(X, "columns"):
                raise TypeError("X must be a table with the columns seen in fit, not a matrix without names.")
            return self.encoder_.transform(X)
        if hasattr(X, "columns"):
            warnings.warn(
                f"X has feature names, but {type(self).__name__} was fitted without feature names", stacklevel=3
            )
            X = to_frame(X).to_numpy()
        return self.encoder_.transform(_dense(validate_data(self, X, **MATRIX, reset=False)))

    def _clients(self, clients: Any, features: np.ndarray) -> list[np.ndarray]:
        if clients is None:
            self.clients_: list[Any] = ["all"]
            return [np.arange(len(features))]
        codes, self.clients_ = encode_groups(clients, name="clients")
        check_lengths(X=features, clients=codes)
        parts = partition.by_column(codes)
        for name, part in zip(self.clients_, parts, strict=True):
            if len(part) < 2:
                raise ValueError(f"Client {shown(name)} has one row; every client needs two at least, so leave it out.")
        return [np.asarray(part) for part in parts]

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.categorical = True
        tags.input_tags.allow_nan = True
        tags.input_tags.sparse = True
        return tags

    # What is predicted.

    def _model(self, features: int) -> Model:
        raise NotImplementedError

    def _targets(self, values: np.ndarray) -> np.ndarray:
        """``y`` as the model is trained on it."""
        raise NotImplementedError


class FairFederated(Federated):
    """What the fair classifier and the fair regressor share: groups, training, and a file."""

    def fit(
        self, X: Any, y: Any, *, sensitive_features: Any = None, clients: Any = None, sample_weight: Any = None
    ) -> Self:
        """Train on the rows of ``X``.

        Args:
            X: a table (pandas, polars) with columns of numbers, text, truth values and dates, or a matrix, also a sparse one of
                SciPy's.  Cells may be missing.  docs/reference/tables.md says what becomes of them: the encoding is that of
                the command ``fit``.
            y: the class of every row, numbers or text; of a regressor, the number.
            sensitive_features: the group of every row: a column, or a table whose columns are joined.  None: everybody is
                one group, and nothing is made fair; a warning says so.
            clients: which site every row belongs to.  None: one client holds all rows.
            sample_weight: a weight of every row ("fedpath", "fedavg", "fedbio", "fedbioacc").
        """
        features, labels = self._learn(X, y)
        codes = self._groups(sensitive_features, features)
        parts = self._clients(clients, features)
        whole_number("history_rows", self.history_rows, least=0)
        rows = {
            "features": features,
            "labels": labels.astype(np.float32),
            "groups": codes,
            **_row_weights(sample_weight, len(labels)),
        }
        self.model_ = self._model(features.shape[1])
        program = FairProgram(
            self._recipe(),
            self.model_,
            len(self.groups_),
            share=self.validation,
            curvature=smoothness(features, self.model_.curvature),
            names=self.groups_,
            row_weights=sample_weight is not None,
            minimum=1,  # nothing leaves this machine
            secure=self.secure,
            **self._decisions(),
        )
        kept, aside = zip(*program.set_aside(codes, labels, parts), strict=True)
        fitted = fit_alike(
            program,
            dealt(program, rows, kept),
            seed=int(check_random_state(self.random_state).randint(2**31 - 1)),
            record_every=program.recipe.record_every(self.history_rows) if self.history_rows else None,
        )
        self.threshold_ = tuned_threshold(program, fitted.params, rows, aside)
        self.params_, self.history_ = fitted.params, fitted.history
        self.frontier_ = None if fitted.frontier is None else fitted.frontier.table
        self._name_weights(fitted.weights)
        self._look(features, labels, codes)
        if fitted.frontier is not None:
            for finding in explained(fitted.frontier, features, codes, self.groups_):
                self.findings_.append(finding)
                warnings.warn(finding.sentence, AimMissed, stacklevel=2)
        return self

    def save(self, path: str | Path) -> Path:
        """Write the fitted model to one ``.npz`` file (the suffix is added if there is none), without pickle."""
        check_is_fitted(self)
        target = Path(path)
        if target.suffix == "":
            target = target.with_suffix(".npz")
        weights, names = self.group_weights_, getattr(self, "feature_names_in_", None)
        remembered = {
            "options": {name: plain(value, name) for name, value in self.get_params(deep=False).items()},
            "clients": [plain(name, "clients_") for name in self.clients_],
            "features": int(self.n_features_in_),
            "names": None if names is None else list(names),
            "findings": self.findings_,
            "frontier": None if self.frontier_ is None else self.frontier_.to_dict("list"),
            "history": json.loads(self.history_.to_json(orient="split", double_precision=15)),
        }
        model = FittedModel(
            self.encoder_, self.model_, self.params_, self._labels, self.groups_,
            None if weights is None else weights.to_numpy(np.float64), self.method, remembered, self.threshold_,
        )  # fmt: skip
        try:
            model.write(target)
        except OSError as error:
            raise OSError(f"Cannot save the model to {target}: {error.strerror or error}.") from error
        return target

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """A model written by `save`, ready to predict."""
        model = FittedModel.read(path)
        remembered = model.estimator
        if remembered is None or model.model.regression != cls._regression:
            raise ValueError(f"{path} was not saved by this class: `fedbilevel predict` reads models of fit.")
        estimator = cls(**remembered["options"])
        estimator.encoder_, estimator.model_, estimator.params_ = model.encoder, model.model, model.params
        estimator._labels, estimator.groups_ = model.classes, list(model.groups)
        estimator.threshold_ = model.threshold
        estimator.findings_ = [Finding(*each) for each in remembered.get("findings", ())]
        estimator.clients_, estimator.n_features_in_ = remembered["clients"], remembered["features"]
        if remembered["names"] is not None:
            estimator.feature_names_in_ = np.asarray(remembered["names"], dtype=object)
        frontier = remembered.get("frontier")
        estimator.frontier_ = None if frontier is None else pd.DataFrame(frontier)
        estimator.history_ = pd.DataFrame(**remembered["history"])
        estimator._name_weights(model.weights)
        return estimator

    def _name_weights(self, weights: np.ndarray | None) -> None:
        self.group_weights_ = None if weights is None else named_weights(weights, self.groups_, self._labels)

    def _recipe(self) -> Recipe:
        check_aims(self.method, self.strength, self.gap, self.accuracy_loss)
        form = Formulation(self.formulation, self.metric, temperature=self.temperature, ridge=self.ridge)
        # One group has no rates to compare: the outer level then draws rows as the inner one does.
        outer_batch = "batch" if len(self.groups_) == 1 else None
        recipe = Recipe(
            self.method, form, self.steps, self.weight_steps, self.local_steps, self.batch_size, outer_batch, self.step,
            client_weights=self.client_weights, gap=self.gap, accuracy_loss=self.accuracy_loss,
        )  # fmt: skip
        return recipe.asked(len(self.groups_), self.strength, self.validation)

    def _groups(self, sensitive_features: Any, features: np.ndarray) -> np.ndarray:
        if sensitive_features is None:
            if self.method != "fedavg":
                warnings.warn(
                    "sensitive_features was not given: all rows count as one group, and nothing is made fair.",
                    stacklevel=3,
                )
            self.groups_: list[Any] = ["all"]
            return np.zeros(len(features), np.int32)
        codes, self.groups_ = encode_groups(sensitive_features)
        check_lengths(X=features, sensitive_features=codes)
        fractions = all(isinstance(group, float) and not group.is_integer() for group in self.groups_[:SEVERAL])
        if len(self.groups_) > MOST_GROUPS or (len(self.groups_) > SEVERAL and fractions):
            raise ValueError(
                f"sensitive_features makes {len(self.groups_)} groups ({listed(self.groups_, 3)}): gather its values into a "
                "few ranges first, as pandas.cut(column, [0, 40, 60, 120]) does, or name another column."
            )
        return codes

    def _decisions(self) -> dict[str, Any]:
        """Further arguments of the program."""
        return {}

    def _look(self, features: np.ndarray, labels: np.ndarray, codes: np.ndarray) -> None:
        """What can be said against the model by what it says of the rows it was trained on."""
        self.findings_: list[Finding] = []


class OfClasses(ClassifierMixin):  # type: ignore[misc]
    """Probabilities and decisions of a fitted `Federated`."""

    def predict_proba(self, X: Any) -> np.ndarray:
        """Probability of every class, columns in the order of ``classes_``."""
        check_is_fitted(self)
        return probabilities(self.model_, self.params_, self._encoded(X))

    def predict(self, X: Any) -> np.ndarray:
        """The most probable class of every row; of two the second where its probability is above ``threshold_``; of more, where
        ``threshold_`` holds one for each, that whose probability is the largest multiple of its own."""
        check_is_fitted(self)
        return np.asarray(self.classes_[decisions(self.predict_proba(X), self.threshold_)])

    @property
    def _labels(self) -> np.ndarray:
        return self.classes_

    @_labels.setter
    def _labels(self, classes: np.ndarray) -> None:
        self.classes_ = classes

    def _targets(self, values: np.ndarray) -> np.ndarray:
        if values.dtype.kind not in PLAIN:
            check_classification_targets(values)
        self.classes_, labels = np.unique(values, return_inverse=True)
        if len(self.classes_) < 2:
            raise ValueError(f"y holds one class only ({shown(self.classes_[0])}): a classifier needs at least two.")
        return labels


class OfNumbers(RegressorMixin):  # type: ignore[misc]
    """Predictions of a fitted `Federated`."""

    _regression = True
    encoder_: Any

    def predict(self, X: Any) -> np.ndarray:
        """The predicted number of every row."""
        check_is_fitted(self)
        assert self.encoder_.target is not None
        mean, spread = self.encoder_.target
        return np.asarray(mean + spread * numbers(self.model_, self.params_, self._encoded(X)))

    @property
    def _labels(self) -> np.ndarray:
        return np.array([])

    @_labels.setter
    def _labels(self, classes: np.ndarray) -> None:
        """Numbers have none."""

    def _targets(self, values: np.ndarray) -> np.ndarray:
        try:
            given = values.astype(np.float64)
        except (TypeError, ValueError):
            raise ValueError("y must hold numbers: a regressor predicts them; for classes use a classifier.") from None
        mean, spread = float(given.mean()), float(given.std())
        self.encoder_ = replace(self.encoder_, target=(mean, spread if spread > 0 else 1.0))
        return np.asarray(self.encoder_.standardised(given))


class FairFederatedClassifier(OfClasses, FairFederated):
    """Classifier with equal rates over sensitive groups, trained over clients that keep their rows (simulated here).

    With the defaults FedPath trains a logistic regression on rows with one weight per (group, label) cell, and learns these
    weights so that the groups' true-positive rates agree: from equal weights on, along a path of growing strength.  Groups
    count by their share: a small one costs others little, and gains little.  docs/fairness.md says which method suits when,
    with measurements.

    Args:
        method: "fedpath", "fedbioacc", "fedbio", "fedavg" (no fairness), "fedreg", "fedminmax", "fcfl", "fedfb" or "fairfed".
        formulation: of the two-stage methods "fedbioacc" and "fedbio": "cells" (ours) or "paper" (one weight per group,
            group-balanced validation set).
        metric: what FedPath and "cells" even out: "equal_opportunity", "equalized_odds", "demographic_parity", "calibration",
            or a function like those in `fedbilevel.fairness.formulation`.
        strength: how much that counts, against the loss; for "fedreg" the weight of its penalty.  None: the method's default
            (5; FedReg: 0.1).  "fedpath" then uses a weaker one where that is as fair for all that rows can tell, and worth it.
        gap: "fedpath": instead of a strength, the gap to aim at, such as 0.02; measured as in ``frontier_``.
        accuracy_loss: "fedpath": instead, how much accuracy to spend at most, such as 0.005.
        temperature: sharpness of the soft decisions in ``metric``.
        model: "logistic" (two or more classes) or "mlp", one hidden layer.
        hidden: units of that layer.
        ridge: weight of the squared parameters in the loss.  None: 1e-3; "fedpath": one over the number of rows.
        steps: training steps of the model; None: to the end of its objective, or 2,000 of them where ``step`` is given.
            Neither this nor ``weight_steps``, ``local_steps``, ``batch_size`` and ``step`` mean anything to "fedpath".
        weight_steps: steps of the bilevel stage; None: 1,000 ("cells") or 2,000 ("paper").
        local_steps: steps between two rounds of communication (FedMinMax and FCFL: always 1).
        batch_size: rows a step draws; cut to the smallest client's rows.
        step: learning rate, 0.1 where only ``steps`` are given; divided automatically where the encoded features make the loss
            steeper than usual.
        validation: the share of each client's rows that the outer level reads and the inner one does not.  None: "cells" reads
            the same rows on both levels (it fits a handful of numbers), "paper" takes a fifth.
        class_weight: "balanced" (classes count alike, whatever their shares), or a dict of numbers by class; they multiply
            ``sample_weight`` ("fedpath", "fedavg", "fedbio", "fedbioacc").
        threshold: two classes: the second is predicted where its probability is above this.  A number; None: 0.5; "auto": the
            best balanced accuracy; "rate=0.1", "recall=0.8": a share selected, a share of positives found.  All but numbers are
            chosen on a fifth of every client's rows (up to half where positives are few), which the model is not trained on.
            More than two classes take "auto" alone: probabilities are weighed by the mean of their class.
        client_weights: clients count "uniform" or by "samples", their rows (FedPath, FedMinMax, FedFB
            and FairFed: always by rows).
        secure: averages are rounded as secure sums over real sites round them, to see what that does (not "fcfl").
        history_rows: about how many rounds of every stage ``history_`` shows; 0 records nothing.
        random_state: seed or generator; None for a new one each time.

    Attributes:
        classes_, n_features_in_, feature_names_in_ (tables with named columns), groups_, clients_: what was seen in fit.
        group_weights_: the learned weights, a Series over groups or over (group, label); None for methods without.
        frontier_: "fedpath": strength, accuracy, gap, floor (the gap of a fair model on this many rows), usable and chosen, for
            every point of the path, on the training rows; 0 is the unweighted model.
        history_: objective, bytes sent and calls of gradients at ``history_rows`` rounds.
        params_, model_, encoder_: the fitted model; threshold_ of its decisions; coef_, intercept_ (logistic):
            for the features get_feature_names_out names; `coefficients` gives them in the units of the table.
        findings_: what a reader must know before believing its numbers, by its decisions on the rows it was trained on.

    Examples:
        >>> import numpy as np
        >>> rng = np.random.default_rng(0)
        >>> X, sex, site = rng.normal(size=(300, 3)), rng.choice(["f", "m"], 300), rng.choice(["A", "B"], 300)
        >>> y = np.where(X[:, 0] + 0.3 * rng.normal(size=300) > 0, "yes", "no")
        >>> clf = FairFederatedClassifier(random_state=0)
        >>> clf = clf.fit(X, y, sensitive_features=sex, clients=site)
        >>> bool(clf.score(X, y) > 0.85), clf.clients_, list(clf.group_weights_.index)
        (True, ['A', 'B'], [('f', 'no'), ('f', 'yes'), ('m', 'no'), ('m', 'yes')])
    """

    def __init__(
        self,
        method: str = "fedpath",
        *,
        formulation: str = "cells",
        metric: str | Deviation = "equal_opportunity",
        strength: float | None = None,
        gap: float | None = None,
        accuracy_loss: float | None = None,
        temperature: float = 2.0,
        model: str = "logistic",
        hidden: int = 16,
        ridge: float | None = None,
        steps: int | None = None,
        weight_steps: int | None = None,
        local_steps: int = 5,
        batch_size: int | None = 128,
        step: float | None = None,
        validation: float | None = None,
        class_weight: str | dict[Any, float] | None = None,
        threshold: float | str | None = None,
        client_weights: str = "uniform",
        secure: bool = False,
        history_rows: int = 20,
        random_state: Any = None,
    ) -> None:
        self.method = method
        self.formulation = formulation
        self.metric = metric
        self.strength = strength
        self.gap = gap
        self.accuracy_loss = accuracy_loss
        self.temperature = temperature
        self.model = model
        self.hidden = hidden
        self.ridge = ridge
        self.steps = steps
        self.weight_steps = weight_steps
        self.local_steps = local_steps
        self.batch_size = batch_size
        self.step = step
        self.validation = validation
        self.class_weight = class_weight
        self.threshold = threshold
        self.client_weights = client_weights
        self.secure = secure
        self.history_rows = history_rows
        self.random_state = random_state

    def _model(self, features: int) -> Model:
        return Model(self.model, features, len(self.classes_), self.hidden)

    def _decisions(self) -> dict[str, Any]:
        return {"class_weight": self._class_weight(), "threshold": Threshold.parse(self.threshold)}

    def _look(self, features: np.ndarray, labels: np.ndarray, codes: np.ndarray) -> None:
        """What can be said against the model by its decisions on the rows it was trained on."""
        self.findings_: list[Finding] = []
        decided = decisions(probabilities(self.model_, self.params_, features), self.threshold_)
        counts = Counts.of(labels, decided, codes, len(self.groups_), classes=len(self.classes_))
        metric = self.metric if isinstance(self.metric, str) else "equal_opportunity"
        self.findings_ = of_model(counts, self.groups_, metric, classes=self.classes_.tolist())
        for finding in self.findings_:
            if finding.code.startswith(("selects", "never")):
                warnings.warn(finding.sentence, UselessModel, stacklevel=3)

    def _class_weight(self) -> str | list[float] | None:
        given = self.class_weight
        if not isinstance(given, dict):
            return given
        strange = [name for name in given if name not in self.classes_]
        if strange:
            raise ValueError(f"class_weight names the class {strange[0]!r}, which y does not hold.")
        return [float(given.get(name, 1.0)) for name in self.classes_.tolist()]


class FairFederatedRegressor(OfNumbers, FairFederated):
    """Regressor with equal mean errors over sensitive groups, trained over clients that keep their rows (simulated here).

    With the defaults FedPath trains a linear regression on rows with a weight for each group below and above the mean of ``y``,
    and learns these weights so that the groups' mean errors come closer.  ``y`` is standardised for training; predictions are
    in its own units.

    Args:
        method: "fedpath", "fedbioacc", "fedbio", "fedavg" (no fairness), "fedreg", "fedminmax", "fcfl" or "fairfed".
            "fedfb" compares rows with the same label, and numbers have none.
        metric: what is evened out between groups: "mean_error" (prediction minus truth) or "mean_prediction"; for "cells" also
            a function like those in `fedbilevel.fairness.formulation`, of standardised predictions.
        loss: "squared", or "huber": errors beyond one standard deviation of ``y`` count by their size, not their square.
        model: "linear" or "mlp", one hidden layer.
        formulation: as in `FairFederatedClassifier`.
        strength: as in `FairFederatedClassifier`.
        gap: as in `FairFederatedClassifier`.
        accuracy_loss: as in `FairFederatedClassifier`.
        hidden: as in `FairFederatedClassifier`.
        ridge: as in `FairFederatedClassifier`.
        steps: as in `FairFederatedClassifier`.
        weight_steps: as in `FairFederatedClassifier`.
        local_steps: as in `FairFederatedClassifier`.
        batch_size: as in `FairFederatedClassifier`.
        step: as in `FairFederatedClassifier`.
        validation: as in `FairFederatedClassifier`.
        client_weights: as in `FairFederatedClassifier`.
        secure: as in `FairFederatedClassifier`.
        history_rows: as in `FairFederatedClassifier`.
        random_state: as in `FairFederatedClassifier`.

    Attributes:
        n_features_in_, feature_names_in_ (tables with named columns), groups_, clients_: what was seen in fit.
        group_weights_: the learned weights, a Series over groups or over (group, side of the mean); None for methods without.
        frontier_, history_, params_, model_, encoder_, coef_, intercept_: as in `FairFederatedClassifier`; the
            last two for standardised ``y``, `coefficients` in its units.

    Examples:
        >>> import numpy as np
        >>> rng = np.random.default_rng(0)
        >>> X, sex = rng.normal(size=(300, 3)), rng.choice(["f", "m"], 300)
        >>> y = 900 + 70 * X[:, 0] - 30 * (sex == "f") + 10 * rng.normal(size=300)
        >>> reg = FairFederatedRegressor(random_state=0)
        >>> reg = reg.fit(X, y, sensitive_features=sex)
        >>> bool(reg.score(X, y) > 0.85), list(reg.group_weights_.index)[:2]
        (True, [('f', 'below the mean'), ('f', 'above the mean')])
    """

    temperature = 2.0

    def __init__(
        self,
        method: str = "fedpath",
        *,
        formulation: str = "cells",
        metric: str | Deviation = "mean_error",
        strength: float | None = None,
        gap: float | None = None,
        accuracy_loss: float | None = None,
        loss: str = "squared",
        model: str = "linear",
        hidden: int = 16,
        ridge: float | None = None,
        steps: int | None = None,
        weight_steps: int | None = None,
        local_steps: int = 5,
        batch_size: int | None = 128,
        step: float | None = None,
        validation: float | None = None,
        client_weights: str = "uniform",
        secure: bool = False,
        history_rows: int = 20,
        random_state: Any = None,
    ) -> None:
        self.method = method
        self.formulation = formulation
        self.metric = metric
        self.strength = strength
        self.gap = gap
        self.accuracy_loss = accuracy_loss
        self.loss = loss
        self.model = model
        self.hidden = hidden
        self.ridge = ridge
        self.steps = steps
        self.weight_steps = weight_steps
        self.local_steps = local_steps
        self.batch_size = batch_size
        self.step = step
        self.validation = validation
        self.client_weights = client_weights
        self.secure = secure
        self.history_rows = history_rows
        self.random_state = random_state

    def _model(self, features: int) -> Model:
        return Model(self.model, features, 1, self.hidden, self.loss)


def _dense(matrix: Any) -> Any:
    """A matrix with all its zeros: standardised features have none."""
    if not issparse(matrix):
        return matrix
    rows, columns = matrix.shape
    if rows * columns > MOST_CELLS:
        raise ValueError(
            f"X has {rows:,} rows and {columns:,} columns: written out they would take {rows * columns * 8 / 1e9:.0f} GB; "
            "choose fewer columns first, for example with scikit-learn's TruncatedSVD."
        )
    return matrix.toarray()


def _say_what_is_left_out(X: Any, encoder: Encoder) -> None:
    used = {column.name for column in encoder.columns}
    gone = [column for column in map(str, X.columns) if column not in used]
    if gone:
        warnings.warn(
            f"X: {listed(gone, 5)} {'is' if len(gone) == 1 else 'are'} left out: an identifier, free text, or one value only.",
            stacklevel=4,
        )


def _row_weights(sample_weight: Any, rows: int) -> dict[str, np.ndarray]:
    if sample_weight is None:
        return {}
    weights = np.asarray(sample_weight, np.float64)
    if weights.shape != (rows,):
        raise ValueError(f"sample_weight must hold one number for each of the {rows} rows, not shape {weights.shape}.")
    if not np.isfinite(weights).all() or (weights < 0).any() or weights.sum() == 0:
        raise ValueError("sample_weight must be finite, not negative, and not all zero.")
    return {"weights": np.asarray(weights / weights.mean(), np.float32)}

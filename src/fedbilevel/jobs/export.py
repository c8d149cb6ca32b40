"""A trained model as an ONNX graph, for programs that know nothing of Python.

With ``inputs="columns"`` the graph takes the table's columns as they are, each ``[rows, 1]``: numbers as doubles (NaN where one
is missing), categories and booleans as texts (any word for missing, or an empty text, where one is missing), dates as days
since 1970.  A model of a matrix without names takes it whole, as ``X``.  Scaling, one-hot columns and the rules for missing and
unknown values are part of the graph.  With ``inputs="features"`` it takes the encoded matrix.

Outputs: ``prediction`` and, of a classifier, ``probabilities`` ``[rows, classes]``.  Everything is computed in double precision
from features rounded to single precision, as `fedbilevel predict` does.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fedbilevel import storage
from fedbilevel._version import __version__
from fedbilevel.fairness.saving import FittedModel
from fedbilevel.jobs.predict import fitted_model
from fedbilevel.tables.columns import MISSING_CODE, UNKNOWN_CODE
from fedbilevel.tables.encoder import Encoder, Parsed
from fedbilevel.tables.schema import Column

if TYPE_CHECKING:
    import onnx

OPSET, ML_OPSET = 17, 3
"""Of ONNX 1.12: old enough for every runtime in use."""
INPUTS = ("columns", "features")


def named_model(path: Path, name: str | None = None) -> FittedModel:
    """The model of a run folder (the fitted one, or the one named), or in a file."""
    if path.is_dir():
        return fitted_model(path, name)
    if name is not None:
        raise ValueError(f"--model {name}: {path} is one model; name a run folder to choose from.")
    return FittedModel.read(path)


def need_onnx() -> None:
    """One sentence where the package is missing, before anything is computed."""
    try:
        import onnx  # noqa: F401
    except ImportError:
        raise ValueError("--onnx needs the package onnx: pip install 'fedbilevel[export]'.") from None


def write_onnx(model: FittedModel, path: Path, inputs: str = "columns") -> float | None:
    """Write the graph to ``path``.  Where onnxruntime is installed, it is run first on made-up rows and must agree with the
    model to 1e-6; the answer is the largest difference of a probability, or None where it is not installed."""
    graph = onnx_graph(model, inputs)
    content = graph.SerializeToString()
    difference = _difference(model, content, inputs)
    if difference is not None and not difference <= 1e-6:
        raise RuntimeError(f"The graph and the model differ by {difference:g} on made-up rows: nothing was written.")
    try:
        storage.write(path, content)
    except OSError as error:
        raise ValueError(f"--onnx {path} cannot be written: {error.strerror or error}.") from error
    return difference


class Graph:
    """Nodes that are added one by one; every answer is the name of a tensor.  Names that end in a slash are the graph's own."""

    def __init__(self) -> None:
        self.nodes: list[Any] = []
        self.constants: list[Any] = []
        self.inputs: list[Any] = []

    def constant(self, value: Any) -> str:
        from onnx import numpy_helper

        name = f"constant {len(self.constants)}/"
        self.constants.append(numpy_helper.from_array(np.asarray(value), name))
        return name

    def input(self, name: str, kind: int, width: int) -> str:
        from onnx import helper

        self.inputs.append(helper.make_tensor_value_info(name, kind, ["rows", width]))
        return name

    def node(self, operator: str, *inputs: str, out: str | None = None, domain: str = "", **attributes: Any) -> str:
        from onnx import helper

        name = out or f"tensor {len(self.nodes)}/"
        self.nodes.append(helper.make_node(operator, inputs, [name], domain=domain, **attributes))
        return name

    def free(self, name: str) -> str:
        """An output's name; with an underline where a column has it."""
        return f"{name}_" if any(one.name == name for one in self.inputs) else name

    def cast(self, tensor: str, kind: int) -> str:
        return self.node("Cast", tensor, to=kind)


def onnx_graph(model: FittedModel, inputs: str = "columns") -> onnx.ModelProto:
    """The model as a checked ONNX graph; see the module's text."""
    import onnx
    from onnx import TensorProto, helper

    if inputs not in INPUTS:
        raise ValueError(f"--inputs must be {' or '.join(INPUTS)}, not {inputs!r}.")
    graph = Graph()
    width = model.model.features
    if inputs == "features":
        features = graph.input("features", TensorProto.FLOAT, width)
    else:
        features = _encoded(graph, model)
    outputs = _answers(graph, model, graph.cast(features, TensorProto.DOUBLE))
    made = helper.make_model(
        helper.make_graph(graph.nodes, "fedbilevel", graph.inputs, outputs, graph.constants),
        opset_imports=[helper.make_opsetid("", OPSET), helper.make_opsetid("ai.onnx.ml", ML_OPSET)],
        producer_name="fedbilevel",
        producer_version=__version__,
        ir_version=8,
    )
    helper.set_model_props(made, {"method": model.label, "groups": ", ".join(map(str, model.groups))})
    onnx.checker.check_model(made, full_check=True)
    return made


def _encoded(graph: Graph, model: FittedModel) -> str:
    """The encoded matrix, float32 with the constant column, from the table's columns."""
    from onnx import TensorProto

    encoder = model.encoder
    matrix = graph.input("X", TensorProto.DOUBLE, len(encoder.columns)) if _by_place(encoder) else None
    scaling = iter(zip(encoder.means, encoder.spreads, strict=True))
    blocks = []
    for number, column in enumerate(encoder.columns):
        if not column.scaled:
            blocks += _category(graph, column, encoder.absent)
            continue
        if matrix is None:
            cells = graph.input(column.name, TensorProto.DOUBLE, 1)
        else:
            cells = graph.node("Slice", matrix, *map(graph.constant, ([number], [number + 1], [1])))
        blocks += _number(graph, cells, column, *next(scaling), encoder.furthest)
    some = graph.node("Mul", graph.node("Slice", blocks[0], *map(graph.constant, ([0], [1], [1]))), graph.constant(0.0))
    ones = graph.node("Add", some, graph.constant(1.0))
    return graph.cast(graph.node("Concat", *blocks, ones, axis=1), TensorProto.FLOAT)


def _by_place(encoder: Encoder) -> bool:
    """Whether the columns are those of a matrix without names."""
    return encoder.source is None and [one.name for one in encoder.columns] == [
        f"x{i}" for i in range(len(encoder.columns))
    ]


def _number(graph: Graph, cells: str, column: Column, mean: float, spread: float, furthest: float) -> list[str]:
    from onnx import TensorProto

    absent = graph.node("IsNaN", cells)
    centred = graph.node("Sub", cells, graph.constant(float(mean)))
    scaled = graph.node("Div", centred, graph.constant(float(spread)))
    if np.isfinite(furthest):
        scaled = graph.node("Clip", scaled, graph.constant(-furthest), graph.constant(furthest))
    blocks = [graph.node("Where", absent, graph.constant(0.0), scaled)]
    return [*blocks, graph.cast(absent, TensorProto.DOUBLE)] if column.missing == "flag" else blocks


def _category(graph: Graph, column: Column, missing: tuple[str, ...]) -> list[str]:
    from onnx import TensorProto

    cells = graph.input(column.name, TensorProto.STRING, 1)
    absent = sorted({"", *missing, *column.also_missing} - set(map(str, column.values)))
    codes = graph.node(
        "LabelEncoder", cells, domain="ai.onnx.ml", keys_strings=[*map(str, column.values), *absent],
        values_int64s=[*range(len(column.values)), *[MISSING_CODE] * len(absent)], default_int64=UNKNOWN_CODE,
    )  # fmt: skip

    def where(*wanted: int) -> str:
        return graph.cast(graph.node("Equal", codes, graph.constant(np.array([wanted], np.int64))), TensorProto.DOUBLE)

    if column.kind == "boolean":
        known = graph.node("GreaterOrEqual", codes, graph.constant(np.int64(0)))
        blocks = [graph.node("Where", known, graph.cast(codes, TensorProto.DOUBLE), graph.constant(0.5))]
    else:
        blocks = [where(*range(len(column.values)))] if column.values else []
        blocks += [where(UNKNOWN_CODE)] if column.pooled else []
    return [*blocks, where(MISSING_CODE)] if column.missing == "flag" else blocks


def _answers(graph: Graph, model: FittedModel, features: str) -> list[Any]:
    """Scores, and what follows from them."""
    from onnx import TensorProto, helper

    def layer(matrix: str, weights: Any, bias: Any = None) -> str:
        weights = np.asarray(weights, np.float64)
        product = graph.node("MatMul", matrix, graph.constant(weights.reshape(weights.shape[0], -1)))
        return product if bias is None else graph.node("Add", product, graph.constant(np.asarray(bias, np.float64)))

    params = model.params
    if isinstance(params, dict):
        hidden = graph.node("Tanh", layer(features, params["hidden"], params["hidden_bias"]))
        scores = layer(hidden, params["output"], params["output_bias"])
    else:
        scores = layer(features, params)
    if model.model.regression:
        mean, spread = model.encoder.target or (0.0, 1.0)
        scaled = graph.node("Mul", graph.node("Squeeze", scores, graph.constant([1])), graph.constant(float(spread)))
        number = graph.node("Add", scaled, graph.constant(float(mean)), out=graph.free("prediction"))
        return [helper.make_tensor_value_info(number, TensorProto.DOUBLE, ["rows"])]
    if model.model.classes == 2:
        chance = graph.node("Sigmoid", scores)
        other = graph.node("Sub", graph.constant(1.0), chance)
        chances = graph.node("Concat", other, chance, axis=1, out=graph.free("probabilities"))
        above = graph.node("Greater", chance, graph.constant(float(getattr(model, "threshold", 0.5))))
        place = graph.node("Squeeze", graph.cast(above, TensorProto.INT64), graph.constant([1]))
    else:
        chances = graph.node("Softmax", scores, axis=1, out=graph.free("probabilities"))
        multiples = graph.node("Div", chances, graph.constant(np.asarray(model.threshold, np.float64)))
        place = graph.node("ArgMax", multiples, axis=1, keepdims=0)
    classes, kind = _class_names(model.classes)
    label = graph.node("Gather", graph.constant(classes), place, out=graph.free("prediction"))
    return [
        helper.make_tensor_value_info(label, kind, ["rows"]),
        helper.make_tensor_value_info(chances, TensorProto.DOUBLE, ["rows", model.model.classes]),
    ]


def _class_names(classes: np.ndarray) -> tuple[np.ndarray, int]:
    """Whole numbers as such, everything else as texts."""
    from onnx import TensorProto

    if classes.dtype.kind in "iu":
        return classes.astype(np.int64), TensorProto.INT64
    return np.array([str(value) for value in classes], dtype=object), TensorProto.STRING


def _difference(model: FittedModel, content: bytes, inputs: str) -> float | None:
    try:
        import onnxruntime
    except ImportError:
        return None
    quiet = onnxruntime.SessionOptions()
    quiet.log_severity_level = 3
    session = onnxruntime.InferenceSession(content, quiet, providers=["CPUExecutionProvider"])
    rng = np.random.default_rng(0)
    features = rng.normal(size=(64, model.model.features)).astype(np.float32)
    features[:, -1] = 1
    given: dict[str, Any] = {"features": features}
    if inputs == "columns":
        given, features = _made_up(model, rng)
    *_, found = session.run(None, given)
    if model.model.regression:  # in spreads of the target: what 1e-6 is to be compared with
        return float(np.abs(found - model.predicted_of(features)).max() / (model.encoder.target or (0.0, 1.0))[1])
    return float(np.abs(found - model.probabilities_of(features)).max())


def _made_up(model: FittedModel, rng: np.random.Generator, rows: int = 64) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Rows with known, missing and unknown cells: as the graph takes them, and as the encoder makes them numbers."""
    encoder = model.encoder
    given: dict[str, np.ndarray] = {}
    cells: dict[str, Any] = {}
    scaling = iter(zip(encoder.means, encoder.spreads, strict=True))
    for column in encoder.columns:
        if not column.scaled:
            known = len(column.values)
            codes = rng.choice([*range(known), MISSING_CODE, UNKNOWN_CODE], rows).astype(np.int32)
            words = np.array([*map(str, column.values), "a word that is not listed", ""], dtype=object)
            # UNKNOWN_CODE is -2 and MISSING_CODE -1: the last but one, and the last.
            given[column.name], cells[column.name] = words[codes][:, None], codes
        else:
            mean, spread = next(scaling)
            values = mean + 3 * spread * rng.standard_t(2, size=rows)
            values[rng.random(rows) < 0.2] = np.nan
            given[column.name], cells[column.name] = values[:, None], values
    if _by_place(encoder):
        given = {"X": np.concatenate(list(given.values()), axis=1)}
    return given, encoder.transform(Parsed(cells, rows, {}))

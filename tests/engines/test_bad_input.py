"""Wrong arguments of `simulate` are answered by one sentence before anything is compiled."""

from importlib import import_module

import jax.numpy as jnp
import numpy as np
import pytest

import fedbilevel as fb
from tests.references.quadratic import inner_loss, outer_loss, quadratic

reference = quadratic()
data = reference.data()


def fedbio(problem=None, **options):
    return fb.fedbio(problem or reference.problem(), fb.exact(), **options)


@pytest.fixture(autouse=True)
def nothing_is_compiled(monkeypatch):
    """The compiled programs are out of reach: an error must come first."""

    def never(*arguments):
        raise AssertionError("the program was started before the input was checked")

    for program in ("begin", "advance"):
        monkeypatch.setattr(import_module("fedbilevel.engines.simulation"), program, never)


@pytest.mark.parametrize(
    ("options", "kind", "sentence"),
    [
        ({"rounds": 0}, ValueError, "rounds must be at least 1, not 0"),
        ({"rounds": 2.5}, TypeError, "rounds must be a whole number, not 2.5"),
        ({"seed": -1}, ValueError, "seed must be at least 0, not -1"),
        ({"seed": 2**32}, ValueError, r"seed must be below 2\*\*32"),
        ({"record_every": 0}, ValueError, "record_every must be at least 1, not 0"),
        ({"record_every": "all"}, TypeError, "record_every must be a whole number"),
        ({"client_chunk": 0}, ValueError, "client_chunk must be at least 1, not 0"),
        ({"checkpoint_every": 0}, ValueError, "checkpoint_every must be at least 1, not 0"),
        ({"checkpoint_every": -3}, ValueError, "checkpoint_every must be at least 1, not -3"),
        ({"diagnostics": "full"}, ValueError, "diagnostics must be 'auto'"),
        ({"devices": []}, ValueError, "devices must name at least one JAX device"),
        ({"weights": "rows"}, ValueError, "weights must be 'uniform', 'samples' or one number per client, not 'rows'"),
        ({"weights": [1.0, 2.0]}, ValueError, r"weights must have one number per client \(3\), not shape \(2,\)"),
        ({"weights": [1.0, -1.0, 1.0]}, ValueError, "weights must be finite, not negative, and not all zero"),
        ({"weights": [0.0, 0.0, 0.0]}, ValueError, "weights must be finite, not negative, and not all zero"),
        ({"weights": [1.0, np.nan, 1.0]}, ValueError, "weights must be finite"),
        (
            {"participation": 0},
            ValueError,
            r"participation as a number must lie in 1\.\.3 \(the clients there are\), not 0",
        ),
        ({"participation": 4}, ValueError, r"participation as a number must lie in 1\.\.3"),
        ({"participation": 1.5}, ValueError, r"participation as a fraction must lie in \(0, 1\], not 1.5"),
        ({"participation": 0.0}, ValueError, "participation as a fraction must lie"),
        ({"participation": True}, TypeError, "participation must be a fraction or a number of clients, not True"),
        ({"participation": "half"}, TypeError, "participation must be a fraction or a number of clients"),
        ({"dropout": 1.0}, ValueError, r"dropout must be a probability in \[0, 1\), not 1.0"),
        ({"dropout": -0.1}, ValueError, "dropout must be a probability"),
        ({"dropout": True}, ValueError, "dropout must be a probability"),
    ],
)
def test_options(options, kind, sentence):
    with pytest.raises(kind, match=sentence):
        fb.simulate(**{"algorithm": fedbio(), "data": data, "rounds": 2, **options})


def test_wrong_kinds_of_arguments():
    with pytest.raises(TypeError, match="data must be a ClientData, not dict"):
        fb.simulate(fedbio(), data.train, 1)
    with pytest.raises(
        TypeError, match=r"algorithm must be an Algorithm such as fb.fedbio\(...\) returns, not BilevelProblem"
    ):
        fb.simulate(reference.problem(), data, 1)


def test_a_batch_larger_than_a_client():
    unequal = quadratic(sizes=((6, 4), (5, 4), (6, 3))).data()
    with pytest.raises(
        ValueError, match=r"batch_size=6 is larger than the train set of client 1 \(5 rows\): choose at most 5"
    ):
        fb.simulate(fedbio(batch_size=6), unequal, 1)
    with pytest.raises(ValueError, match=r"outer_batch_size=4 is larger than the val set of client 2 \(3 rows\)"):
        fb.simulate(fedbio(batch_size=2, outer_batch_size=4), unequal, 1)
    with pytest.raises(ValueError, match="batch_size=7 is larger than the train set of client 0"):
        fb.simulate(fb.fedavg(lambda m, b: jnp.sum(m), init=np.zeros(1), batch_size=7), data, 1)


def zeros(outer=3, inner=4, kinds=(float, float)):
    return lambda key: (jnp.zeros(outer, kinds[0]), jnp.zeros(inner, kinds[1]))


SCALAR = r"must return one real number \(a scalar\), but it returns"


@pytest.mark.parametrize(
    ("change", "kind", "sentence"),
    [
        ({"inner_loss": lambda x, y, b: y}, ValueError, rf"inner_loss {SCALAR} float64\[4\]"),
        (
            {"outer_loss": lambda x, y, b: (jnp.sum(x), jnp.sum(y))},
            ValueError,
            rf"outer_loss {SCALAR} float64\[\], float64\[\]",
        ),
        ({"outer_loss": lambda x, y, b: None}, ValueError, f"outer_loss {SCALAR} nothing"),
        (
            {"inner_loss": lambda x, y, b: jnp.sum(jnp.round(y)).astype(int)},
            ValueError,
            rf"inner_loss {SCALAR} int64\[\]",
        ),
        (
            {"init": zeros(outer=2)},
            ValueError,
            r"inner_loss cannot be evaluated on arguments of shapes float64\[2\], float64\[4\]",
        ),
        (
            {"init": lambda key: ({"x": jnp.zeros(3)}, jnp.zeros(4))},
            ValueError,
            "inner_loss cannot be evaluated on arguments of shapes",
        ),
        (
            {"outer_loss": lambda x, y, b: jnp.sum(b["missing"])},
            ValueError,
            "outer_loss cannot be evaluated .*: the batch has no 'missing'; there are '",
        ),
        (
            {"init": zeros(kinds=(int, float))},
            TypeError,
            "The outer variable has a leaf of type int64: gradients need floating-point leaves",
        ),
        ({"init": zeros(kinds=(float, bool))}, TypeError, "The inner variable has a leaf of type bool"),
        ({"init": lambda key: jnp.zeros(3)}, TypeError, r"init must return a pair \(outer, inner\)"),
        ({"init": lambda key: ((), jnp.zeros(4))}, ValueError, "init gave an empty tree as the outer variable"),
        ({"init": lambda: None}, ValueError, "init cannot be evaluated"),
        (
            {"project": lambda x: x[:2]},
            ValueError,
            r"project must return the outer variable's own shapes float64\[3\], not float64\[2\]",
        ),
    ],
)
def test_problems_that_do_not_fit(change, kind, sentence):
    problem = fb.BilevelProblem(**{"inner_loss": inner_loss, "outer_loss": outer_loss, "init": zeros(), **change})
    with pytest.raises(kind, match=sentence):
        fb.simulate(fedbio(problem), data, 1)


def test_a_bilevel_problem_needs_validation_rows():
    with pytest.raises(
        ValueError, match=r"A bilevel problem needs validation rows for its outer loss: pass val= to ClientData"
    ):
        fb.simulate(fedbio(), fb.ClientData(train=data.train), 1)

"""Wrong arguments of `simulate` are answered by one sentence before anything is compiled."""

from importlib import import_module

import jax.numpy as jnp
import numpy as np
import pytest

import fedbilevel as fb
from tests.references.compare import refusals
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


WEIGHTS = "weights must be finite, not negative, and not all zero"
COHORT = r"participation as a number must lie in 1\.\.3 \(the clients there are\), not"
UNEQUAL = {"data": quadratic(sizes=((6, 4), (5, 4), (6, 3))).data()}
HAS = r"larger than the {} set of client {} \({} rows\): choose at most".format

test_options = refusals(
    lambda options: fb.simulate(**{"algorithm": fedbio(), "data": data, "rounds": 2, **options}),
    ({"rounds": 0}, "rounds must be at least 1, not 0"),
    ({"rounds": 2.5}, "rounds must be a whole number, not 2.5", TypeError),
    ({"seed": -1}, "seed must be at least 0, not -1"),
    ({"seed": 2**32}, r"seed must be below 2\*\*32"),
    ({"record_every": 0}, "record_every must be at least 1, not 0"),
    ({"record_every": "all"}, "record_every must be a whole number", TypeError),
    ({"client_chunk": 0}, "client_chunk must be at least 1, not 0"),
    ({"checkpoint_every": 0}, "checkpoint_every must be at least 1, not 0"),
    ({"checkpoint_every": -3}, "checkpoint_every must be at least 1, not -3"),
    ({"diagnostics": "full"}, "diagnostics must be 'auto'"),
    ({"devices": []}, "devices must name at least one JAX device"),
    ({"weights": "rows"}, "weights must be 'uniform', 'samples' or one number per client, not 'rows'"),
    ({"weights": [1.0, 2.0]}, r"weights must have one number per client \(3\), not shape \(2,\)"),
    *(({"weights": bad}, WEIGHTS) for bad in ([1.0, -1.0, 1.0], [0.0, 0.0, 0.0], [1.0, np.nan, 1.0])),
    *(({"participation": bad}, f"{COHORT} {bad}") for bad in (0, 4)),
    *(({"participation": bad}, rf"participation as a fraction must lie in \(0, 1\], not {bad}") for bad in (1.5, 0.0)),
    ({"participation": True}, "participation must be a fraction or a number of clients, not True", TypeError),
    ({"participation": "half"}, "participation must be a fraction or a number of clients, not 'half'", TypeError),
    *(({"dropout": bad}, rf"dropout must be a probability in \[0, 1\), not {bad}") for bad in (1.0, -0.1, True)),
    ({"data": data.train}, "data must be a ClientData or a ClientStore, not dict", TypeError),
    ({"data": fb.ClientData(train=data.train)}, "needs validation rows for its outer loss: pass val= to ClientData"),
    ({"algorithm": reference.problem()}, r"must be an Algorithm such as fb.fedbio\(...\) returns, not Bil", TypeError),
    ({"algorithm": fedbio(batch_size=6), **UNEQUAL}, f"batch_size=6 is {HAS('train', 1, 5)} 5"),
    ({"algorithm": fedbio(batch_size=2, outer_batch_size=4), **UNEQUAL}, f"outer_batch_size=4 is {HAS('val', 2, 3)} 3"),
    (
        {"algorithm": fb.fedavg(lambda m, b: jnp.sum(m), np.zeros(1), batch_size=7)},
        f"batch_size=7 is {HAS('train', 0, 6)}",
    ),
)


def zeros(outer=3, inner=4, kinds=(float, float)):
    return lambda key: (jnp.zeros(outer, kinds[0]), jnp.zeros(inner, kinds[1]))


SCALAR = r"must return one real number \(a scalar\), but it returns"


UNFIT = "inner_loss cannot be evaluated on arguments of shapes"
PLAIN = {"inner_loss": inner_loss, "outer_loss": outer_loss, "init": zeros()}

test_problems_that_do_not_fit = refusals(
    lambda change: fb.simulate(fedbio(fb.BilevelProblem(**{**PLAIN, **change})), data, 1),
    ({"inner_loss": lambda x, y, b: y}, rf"inner_loss {SCALAR} float64\[4\]"),
    ({"inner_loss": lambda x, y, b: jnp.sum(jnp.round(y)).astype(int)}, rf"inner_loss {SCALAR} int64\[\]"),
    ({"outer_loss": lambda x, y, b: (jnp.sum(x), jnp.sum(y))}, rf"outer_loss {SCALAR} float64\[\], float64\[\]"),
    ({"outer_loss": lambda x, y, b: None}, f"outer_loss {SCALAR} nothing"),
    ({"outer_loss": lambda x, y, b: jnp.sum(b["missing"])}, ": the batch has no 'missing'; there are '"),
    ({"init": zeros(outer=2)}, rf"{UNFIT} float64\[2\], float64\[4\]"),
    ({"init": lambda key: ({"x": jnp.zeros(3)}, jnp.zeros(4))}, UNFIT),
    ({"init": zeros(kinds=(int, float))}, "The outer variable has a leaf of type int64: gradients need", TypeError),
    ({"init": zeros(kinds=(float, bool))}, "The inner variable has a leaf of type bool", TypeError),
    ({"init": lambda key: jnp.zeros(3)}, r"init must return a pair \(outer, inner\)", TypeError),
    ({"init": lambda key: ((), jnp.zeros(4))}, "init gave an empty tree as the outer variable"),
    ({"init": lambda: None}, "init cannot be evaluated"),
    ({"project": lambda x: x[:2]}, r"the outer variable's own shapes float64\[3\], not float64\[2\]"),
)

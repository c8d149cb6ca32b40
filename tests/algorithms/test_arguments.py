"""Every method's arguments: what is refused, what a signature says, and what becomes of the values."""

import inspect
import re
from importlib import import_module

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedbilevel as fb
from tests.contracts.cases import bowl
from tests.references.quadratic import quadratic

LOCAL, GLOBAL = quadratic().problem(), quadratic().problem(None, "global")
DATA = quadratic(sizes=((6, 4),) * 5).data()
FAIR = ("fedreg", "fedminmax", "fcfl", "fedfb", "fairfed")
GROUPS = {
    "fedminmax": {"group_counts": [3, 4]}, "fedfb": {"positive_counts": [3, 4]}, "fairfed": {"groups": 2, "rows": 7},
}  # fmt: skip
SHARED = ("fedbio_global", "fedbioacc_global", "simfbo", "shrofbo", "fedmsa", "fednest", "aggitd", "fedmbo")
METHODS = (*SHARED, "lfednest", "fedbio", "fedbioacc", "fedavg", "qfedavg", "afl", *FAIR)


def method(name):
    return getattr(import_module(f"fedbilevel.fairness.{name}"), name) if name in FAIR else getattr(fb, name)


def needed(name):
    """The arguments without which a method does not start."""
    if name in FAIR:
        return {"scores": lambda p, z: z @ p, "init": np.zeros(4), **GROUPS.get(name, {"groups": 2})}
    if name in ("fedavg", "qfedavg", "afl"):
        return {"loss": bowl, "init": np.zeros(4), **({"clients": 5} if name == "afl" else {})}
    estimator = {} if name in SHARED else {"hypergradient": fb.exact()}
    return {"problem": LOCAL if name in ("fedbio", "fedbioacc") else GLOBAL, **estimator}


def make(name, **change):
    return method(name)(**{**needed(name), **change})


STEPS = [f"{of}_step" for of in ("inner", "outer", "adjoint", "series", "mixture", "group")]
CONSTANTS = ["radius", "rho", "delta", "u", "sigma", "c_inner", "c_outer", "c_adjoint", "temperature"]
SERVER_STEPS = ["server_inner_step", "server_outer_step", "server_adjoint_step"]
POSITIVE = ["step", "rows", *STEPS, *SERVER_STEPS, *CONSTANTS]
NOT_NEGATIVE = ["q", "strength", "ridge", "epsilon", "stage_one", "stage_two", "beta"]
COUNTS = ["local_steps", "batch_size", "outer_batch_size", "terms", "inner_rounds", "rounds", "finish_after"]
AT_LEAST_TWO = ["clients", "groups", "classes"]
OPTIONAL = ["radius", *SERVER_STEPS, "batch_size", "outer_batch_size", "rounds", "finish_after"]
FUNCTIONS = {
    "loss": "(model, batch) -> scalar",
    "scores": "(params, features) -> [n] or [n, classes]",
    "losses": "(scores, labels) -> [n]",
    "compared": "(scores, labels, temperature) -> (values, which rows count)",
}
CHOICES = {
    "previous": "'paper' or 'local'",
    "send": "'both' or 'outer'",
    "series": "'random' or 'sum'",
    "risks": "'averaged' or 'sent'",
}


def refused(argument):
    """Every kind of wrong value of an argument, with the error and its sentence."""
    if argument in POSITIVE:
        yield from ((value, ValueError, f"a positive number, not {value}") for value in (-0.1, 0, np.nan, np.inf))
    if argument in NOT_NEGATIVE:
        yield from ((value, ValueError, f"a number of at least 0, not {value}") for value in (-0.1, np.nan, np.inf))
    if argument in (*POSITIVE, *NOT_NEGATIVE):
        yield from ((value, TypeError, f"a number, not {value!r}") for value in ([0.1], "0.1", True))
    if argument in (*COUNTS, *AT_LEAST_TWO):
        least = 2 if argument in AT_LEAST_TWO else 1
        yield least - 1, ValueError, f"at least {least}, not {least - 1}"
        yield from ((value, TypeError, f"a whole number, not {value!r}") for value in (2.0, True, "all"))
    if argument in (*POSITIVE, *NOT_NEGATIVE, *COUNTS, *AT_LEAST_TWO) and argument not in OPTIONAL:
        yield None, TypeError, "number, not None"
    if argument in FUNCTIONS:
        yield from ((value, TypeError, f"a function {FUNCTIONS[argument]}, not ") for value in (None, 3, "z"))
    if argument in CHOICES:
        yield "mean", ValueError, f"{CHOICES[argument]}, not 'mean'"


@pytest.mark.parametrize("name", METHODS)
def test_every_argument_is_checked(name):
    for argument in inspect.signature(method(name)).parameters:
        for value, kind, sentence in refused(argument):
            with pytest.raises(kind, match=f"^{argument} must be .*{re.escape(sentence)}"):
                make(name, **{argument: value})
    arguments = set().union(*(inspect.signature(method(one)).parameters for one in METHODS))
    without = {argument for argument in arguments if not list(refused(argument))}
    elsewhere = {"problem", "hypergradient", "init", "average_momenta", "group_counts", "positive_counts"}
    assert without == elsewhere | {"inner_optimizer", "outer_optimizer"}


@pytest.mark.parametrize(
    ("name", "change", "kind", "sentence"),
    [
        ("fedavg", {"stride": 3.0}, TypeError, r"fedavg\(\) got an unexpected keyword argument 'stride'"),
        ("fedbio", {"hypergradient": "exact"}, TypeError, r"hypergradient must be an estimator such as fb.exact\(\)"),
        ("fedbio", {"hypergradient": fb.exact}, TypeError, "hypergradient must be an estimator"),
        ("fedbio", {"problem": None}, TypeError, "The first argument must be a BilevelProblem, not NoneType"),
        ("fedbioacc_global", {"average_momenta": 1}, TypeError, "average_momenta must be True or False, not 1"),
        ("simfbo", {"local_steps": []}, ValueError, "local_steps needs one number per client, but it is empty"),
        ("simfbo", {"local_steps": [2, 0]}, ValueError, "local_steps must be at least 1, not 0"),
        ("fedmsa", {"rho": 1.5}, ValueError, r"rho must lie in \(0, 1\], not 1.5"),
        (
            "fedminmax",
            {"group_counts": [3, 0]},
            ValueError,
            r"group_counts\[1\] is 0: every group needs rows; renumber",
        ),
        ("fedminmax", {"group_counts": [3, np.nan]}, ValueError, r"group_counts\[1\] is nan"),
        ("fedminmax", {"group_counts": [3]}, ValueError, "at least two groups"),
        ("fedminmax", {"group_counts": 3}, ValueError, "at least two groups"),
        (
            "fedfb",
            {"positive_counts": [3, 0]},
            ValueError,
            r"positive_counts\[1\] is 0: every group needs positive rows",
        ),
        ("fedfb", {"positive_counts": 3}, ValueError, "at least two groups"),
        ("fcfl", {"rounds": 10, "stage_one": 0, "stage_two": 0}, ValueError, "must not both be 0"),
    ],
)
def test_bad_arguments(name, change, kind, sentence):
    with pytest.raises(kind, match=sentence):
        make(name, **change)


def test_an_argument_left_out():
    with pytest.raises(TypeError, match=r"fedavg\(\) missing a required argument: 'init'"):
        fb.fedavg(bowl)


def test_as_many_numbers_as_clients():
    with pytest.raises(ValueError, match="local_steps has 3 numbers, but there are 5 clients"):
        fb.simfbo(GLOBAL, local_steps=[1, 2, 3]).check(DATA)
    with pytest.raises(ValueError, match="clients=2, but the data hold 5 clients"):
        fb.afl(bowl, np.zeros(4), 2).check(DATA)


def test_every_method_refuses_the_other_lower_level():
    for name in (*SHARED, "lfednest"):
        with pytest.raises(ValueError, match=f"{name} solves problems with a global lower level, but .* is local"):
            make(name, problem=LOCAL)
    for name in ("fedbio", "fedbioacc"):
        with pytest.raises(ValueError, match=f"{name} solves problems with a local .* such as fedbio_global"):
            make(name, problem=GLOBAL)
    with pytest.raises(ValueError, match="lower_level must be 'local' or 'global', not 'both'"):
        quadratic().problem(None, "both")


@pytest.mark.parametrize("name", METHODS)
def test_a_signature_is_the_settings(name):
    """Names, order and defaults as written; the settings hold the same names, and make the same algorithm again."""
    parameters, chosen = inspect.signature(method(name)).parameters, make(name)
    assert list(parameters) == list(chosen.settings.__dataclass_fields__)
    assert inspect.getdoc(method(name))
    assert chosen.name == name
    for argument, parameter in parameters.items():
        if parameter.default is not inspect.Parameter.empty and not (name == "fcfl" and argument == "stage_two"):
            value = getattr(chosen.settings, argument)
            if parameter.default == "auto":  # a step sets itself, whatever else is chosen for it
                assert (value is None) == argument.endswith("_step")
            else:
                assert value == parameter.default
    again = chosen.build(chosen.settings)
    assert (again.name, again.build, again.local_steps) == (name, chosen.build, chosen.local_steps)
    floats = {argument for argument, p in parameters.items() if isinstance(p.default, float)}
    leaves = jax.tree_util.tree_flatten_with_path(chosen.settings)[0]
    assert floats - {"stage_two"} <= {path[0].name for path, _ in leaves}, "float hyper-parameters are traced"


def test_arguments_go_by_position_too():
    algorithm = fb.fedbio(LOCAL, fb.exact(), 0.3, 0.2, 4, 3, "whole")
    settings = algorithm.settings
    assert (settings.inner_step, settings.outer_step, settings.local_steps) == (0.3, 0.2, 4)
    assert (settings.batch_size, settings.outer_batch_size) == (3, None)
    assert fb.fedbio(LOCAL, fb.exact(), batch_size=3).settings.outer_batch_size == 3
    assert fb.simfbo(GLOBAL, local_steps=np.array([1, 2, 3])).local_steps == 3


def test_a_first_model_is_traced_and_a_function_is_not():
    given = fb.fedavg(bowl, jnp.ones(4)).settings
    assert [np.shape(leaf) for leaf in jax.tree.leaves(given)] == [(4,), ()]
    assert len(jax.tree.leaves(fb.fedavg(bowl, lambda key: jnp.ones(4)).settings)) == 1

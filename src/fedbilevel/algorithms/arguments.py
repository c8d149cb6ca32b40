"""A hyper-parameter is spelled once: in the signature of the function that is its algorithm.

    @bilevel("local")
    def fedbio(problem: BilevelProblem, hypergradient: Estimator, inner_step: Positive = 0.1, ...) -> Algorithm:
        ...  # pure functions of the arguments
        return Algorithm(init, enroll, plan)

The annotation of an argument is its *kind*: how a value is checked, and whether its numbers are traced (a new value compiles
nothing, and `sweep` tries many) or part of the program.  The decorators check a call, keep its arguments as the algorithm's
``settings``, and run the function on them: once at the call, and again wherever an engine traces it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import make_dataclass
from functools import partial, wraps
from typing import Annotated, Any, NamedTuple, ParamSpec, Protocol, get_type_hints

import jax
import numpy as np

from fedbilevel.algorithms.answer import shared_inner, with_mean
from fedbilevel.calculus import Tree
from fedbilevel.hints import not_negative, positive, whole_number
from fedbilevel.hypergradients.conjugate_gradient import conjugate_gradient
from fedbilevel.hypergradients.neumann import neumann
from fedbilevel.plan import Algorithm, View, only_calls
from fedbilevel.problem import BilevelProblem, ClientData

Arguments = ParamSpec("Arguments")


class Kind(NamedTuple):
    """``settle(name, value)`` refuses a value in one sentence, or returns what is kept of it."""

    settle: Callable[[str, Any], Any]
    traced: bool = False


def _optional(settle: Callable[[str, Any], Any]) -> Callable[[str, Any], Any]:
    return lambda name, value: value if value is None else settle(name, value)


def _share(name: str, value: Any) -> Any:
    if positive(name, value) > 1:
        raise ValueError(f"{name} must lie in (0, 1], not {value}.")
    return value


def _whole_set_or_count(name: str, value: Any) -> Any:
    return value if value == "whole" else whole_number(name, value, optional=True)


def _count_or_each(name: str, value: Any) -> Any:
    if not isinstance(value, Sequence | np.ndarray) or isinstance(value, str):
        return int(whole_number(name, value))
    if not len(value):
        raise ValueError(f"{name} needs one number per client, but it is empty.")
    return tuple(int(whole_number(name, number)) for number in value)


def _flag(name: str, value: Any) -> Any:
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, not {value!r}.")
    return value


def one_of(*choices: str) -> Kind:
    def settle(name: str, value: Any) -> Any:
        if value not in choices:
            raise ValueError(f"{name} must be {' or '.join(map(repr, choices))}, not {value!r}.")
        return value

    return Kind(settle)


def function_of(arguments: str) -> Kind:
    """A function, with its arguments and result in words."""

    def settle(name: str, value: Any) -> Any:
        if not callable(value):
            raise TypeError(f"{name} must be a function {arguments}, not {type(value).__name__}.")
        return value

    return Kind(settle)


def _estimator(name: str, value: Any) -> Any:
    if isinstance(value, str) and value == "auto":
        return None
    if not (callable(value) and hasattr(value, "train_batches")):
        raise TypeError(
            f"{name} must be an estimator such as fb.exact(), fb.conjugate_gradient() or fb.neumann(terms=10), "
            f'or "auto", not {value!r}.'
        )
    return value


def _step(name: str, value: Any) -> Any:
    if isinstance(value, str) and value == "auto":
        return None
    if value is None or isinstance(value, str):
        raise TypeError(f'{name} must be "auto" or a number, not {value!r}.')
    return positive(name, value)


def _optimizer(name: str, value: Any) -> Any:
    if value is not None and not all(callable(getattr(value, part, None)) for part in ("init", "update")):
        raise TypeError(f"{name} must be an optax transformation such as optax.adam(0.01), not {value!r}.")
    return value


def _start(name: str, value: Any) -> Any:
    """A function of the key is part of the program; arrays are not, and are kept as such."""
    if callable(value):
        return jax.tree_util.Partial(value)
    return jax.tree.map(lambda leaf: leaf if isinstance(leaf, jax.core.Tracer) else np.asarray(leaf), value)


Step = Annotated[Any, Kind(_step, traced=True)]
"""A positive number, or "auto", which the algorithm itself then sees as None."""
Positive = Annotated[float, Kind(positive, traced=True)]
MaybePositive = Annotated[float | None, Kind(_optional(positive), traced=True)]
NotNegative = Annotated[float, Kind(not_negative, traced=True)]
Share = Annotated[float, Kind(_share, traced=True)]
Count = Annotated[int, Kind(whole_number)]
Limit = Annotated[int, Kind(lambda name, value: int(whole_number(name, value)), traced=True)]
"""A count that no shape depends on: another one compiles nothing."""
AtLeastTwo = Annotated[int, Kind(partial(whole_number, least=2))]
CountOrEach = Annotated[int | Sequence[int], Kind(_count_or_each)]
"""One number for all clients, or one for each."""
MaybeCount = Annotated[int | None, Kind(_optional(whole_number))]
Batch = MaybeCount
"""Rows of a minibatch; None is the whole local set."""
OuterBatch = Annotated[Any, Kind(_whole_set_or_count)]
"""Validation rows of a minibatch.  In a call, None follows ``batch_size`` and "whole" is the whole set, which the algorithm
itself then sees as None."""
Flag = Annotated[bool, Kind(_flag)]
Estimator = Annotated[Any, Kind(_estimator, traced=True)]
"""A `Hypergradient`, or "auto": conjugate gradients on whole sets, on minibatches a series that ends by itself."""
Optimizer = Annotated[Any, Kind(_optimizer)]
"""A ``GradientTransformation`` of optax, or None."""
Start = Annotated[Callable[[jax.Array], Tree] | Tree, Kind(_start, traced=True)]
"""The first model, or a function of the key that makes it."""
WHOLE = conjugate_gradient(tolerance=1e-4)
"""The hypergradient "auto" on whole sets."""


def automatic(batch_size: int | None) -> Any:
    """The hypergradient "auto"."""
    return WHOLE if batch_size is None else neumann("auto", "auto")


ANYTHING = Kind(lambda name, value: value)


def _kinds(body: Callable[..., Algorithm]) -> dict[str, Kind]:
    hints = get_type_hints(body, include_extras=True)
    marks = {name: getattr(hints.get(name), "__metadata__", ()) for name in inspect.signature(body).parameters}
    return {name: next((mark for mark in given if isinstance(mark, Kind)), ANYTHING) for name, given in marks.items()}


class Decorator(Protocol):
    def __call__(self, body: Callable[Arguments, Algorithm], /) -> Callable[Arguments, Algorithm]: ...


def algorithm(
    settle: Callable[[str, dict[str, Any]], dict[str, Any]] = lambda name, arguments: arguments,
    complete: Callable[[Algorithm, Any], Algorithm] = lambda made, settings: made,
) -> Decorator:
    """Makes a function of hyper-parameters an algorithm: checks its arguments, and says its name, settings and build.

    Args:
        settle: (name, arguments) -> arguments, for what several arguments decide together, after each was checked.
        complete: (algorithm, settings) -> algorithm, for what algorithms of one sort share.

    Returns:
        A decorator.
    """

    def decorate(body: Callable[Arguments, Algorithm]) -> Callable[Arguments, Algorithm]:
        name, signature, kinds = body.__name__, inspect.signature(body), _kinds(body)
        traced = [argument for argument, kind in kinds.items() if kind.traced]
        fixed = [argument for argument in kinds if argument not in traced]
        settings_type = make_dataclass("Settings", kinds, frozen=True)
        settings_type.kinds = kinds  # type: ignore[attr-defined]  # how `sweep` checks the values it tries
        jax.tree_util.register_dataclass(settings_type, data_fields=traced, meta_fields=fixed)

        def build(settings: Any) -> Algorithm:
            arguments = {argument: getattr(settings, argument) for argument in kinds}
            made = body(**arguments)  # type: ignore[call-arg]
            steps = int(np.max(arguments.get("local_steps", made.local_steps)))
            return complete(made, settings)._replace(name=name, settings=settings, build=build, local_steps=steps)

        @wraps(body)
        def call(*positional: Arguments.args, **named: Arguments.kwargs) -> Algorithm:
            try:
                bound = signature.bind(*positional, **named)
            except TypeError as error:
                raise TypeError(f"{name}() {error}") from None
            bound.apply_defaults()
            arguments = {
                argument: kinds[argument].settle(argument, value) for argument, value in bound.arguments.items()
            }
            return build(settings_type(**settle(name, arguments)))

        return call

    return decorate


def bilevel(
    lower_level: str, constants: Callable[[dict[str, Any]], dict[str, Any]] = lambda arguments: arguments
) -> Decorator:
    """An `algorithm` with the arguments ``problem``, ``batch_size`` and ``outer_batch_size``.

    Unless the algorithm says so itself, the inner variable is the one each client keeps as ``inner`` or, with a global lower
    level, the server (itself or as its ``point``).  There, on minibatches, it is a mean where ``inner_step`` is "auto".

    Args:
        lower_level: "local", "global" or "either".  The algorithm refuses problems of the other kind: their answers differ.
        constants: arguments -> arguments, which fills in those that follow from others.

    Returns:
        A decorator.
    """

    def settle(name: str, arguments: dict[str, Any]) -> dict[str, Any]:
        problem, outer_batch = arguments["problem"], arguments["outer_batch_size"]
        if not isinstance(problem, BilevelProblem):
            raise TypeError(f"The first argument must be a BilevelProblem, not {type(problem).__name__}.")
        if lower_level not in (problem.lower_level, "either"):
            others = "fedbio or fedbioacc" if lower_level == "global" else "fedbio_global, simfbo or fednest"
            raise ValueError(
                f"{name} solves problems with a {lower_level} lower level, but this one's is {problem.lower_level}: make it "
                f"with lower_level={lower_level!r}, or use a method for the other kind such as {others}."
            )
        if outer_batch in (None, "whole"):
            arguments["outer_batch_size"] = arguments["batch_size"] if outer_batch is None else None
        if arguments.get("hypergradient", ()) is None:
            arguments["hypergradient"] = automatic(arguments["batch_size"])
        if arguments.get("inner_optimizer") is not None and arguments["inner_step"] is not None:
            raise ValueError("Give inner_step or inner_optimizer, not both: an optimizer has a step of its own.")
        return constants(arguments)

    def complete(made: Algorithm, settings: Any) -> Algorithm:
        problem: BilevelProblem = settings.problem

        def view(server: Any, local: Any) -> View:
            return View(
                inner=local.inner if problem.lower_level == "local" else shared_inner(server), calls=local.calls
            )

        def check(data: ClientData) -> None:
            problem.check(data, settings.batch_size, settings.outer_batch_size)
            made.check(data)

        if made.view is only_calls:
            made = made._replace(view=view)
            itself = getattr(settings, "inner_step", 0) is None and settings.batch_size is not None
            made = with_mean(made) if itself and problem.lower_level == "global" else made
        return made._replace(
            objective=lambda outer, inner, data: problem.outer_loss(outer, inner, data.whole("val")),
            check=check,
            problem=problem,
            linear=None if problem.linear is None or settings.batch_size is None else problem.linear.leaf,
        )

    make = algorithm(settle, complete)

    def decorate(body: Callable[Arguments, Algorithm]) -> Callable[Arguments, Algorithm]:
        call = make(body)
        call.lower_level = lower_level  # type: ignore[attr-defined]  # where `fedbilevel.plugins` files it
        return call

    return decorate

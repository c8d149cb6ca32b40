"""Is the inner loss strongly convex?  Asked at sampled points, by products with its Hessian."""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedbilevel.calculus import Tree, add, dot, hessian_operator, scale, squared_norm, step_along
from fedbilevel.hints import not_negative, whole_number
from fedbilevel.problem import BilevelProblem, ClientData

PRODUCTS = 60
"""For each end of the spectrum."""


class LowerLevel(NamedTuple):
    """The smallest and the largest curvature that was found, and at which client the smallest (None: of the clients' mean).

    The smallest is an upper bound of the true one: a negative number proves that the loss is not convex, a positive one
    proves nothing.

    Attributes:
        smallest: The smallest curvature.
        largest: The largest one.
        client: Where the smallest was found; None: in the clients' mean.
    """

    smallest: float
    largest: float
    client: int | None

    @property
    def condition(self) -> float:
        return self.largest / self.smallest if self.smallest > 0 else float("inf")


def lower_level(
    problem: BilevelProblem, data: ClientData, points: int = 4, spread: float = 1.0, seed: int = 0
) -> LowerLevel:
    """The curvature of the inner loss at ``points`` points around the start, each number of x and y moved by ``spread`` times a
    normal draw: of each client's loss or, with a global lower level, of their mean.

    Warns where it is not positive.  The loss is then not strongly convex in y, and methods promise less: docs/networks.md.

    Args:
        problem: Whose inner loss is looked at.
        data: Whose training rows it is read on.
        points: How many points are sampled.
        spread: How far they lie around the start.
        seed: Of the points.

    Returns:
        The ends of the spectrum over all points and clients.

    Examples:
        >>> import fedbilevel as fb
        >>> from fedbilevel.tasks import random_quadratic
        >>> drawn = random_quadratic(0, strong_convexity=0.5, smoothness=2.0)
        >>> found = fb.lower_level(drawn.problem(), drawn.data())
        >>> bool(0.5 <= found.smallest <= found.largest <= 2.0)
        True
    """
    whole_number("points", points)
    not_negative("spread", spread)
    problem.check(data, None, None)
    own = [jax.tree.map(lambda leaf: leaf[0], data.only(client).train) for client in range(data.clients)]
    shared = problem.lower_level == "global"
    ends = []
    for number in range(points):
        key = jax.random.fold_in(jax.random.key(seed), number)
        for client, rows in [(None, tuple(own))] if shared else [(m, (one,)) for m, one in enumerate(own)]:
            smallest, largest = _ends(problem, rows, key, jnp.asarray(spread, jnp.float32))
            ends.append((float(smallest), float(largest), client))
    smallest, _, client = min(ends, key=lambda end: end[0])
    found = LowerLevel(smallest, max(end[1] for end in ends), client)
    if not smallest > 0:
        whose = "the clients' mean inner loss" if client is None else f"client {client}'s inner loss"
        warnings.warn(
            f"At a sampled point {whose} has curvature {smallest:.3g} in some direction: it is not strongly convex there, so "
            "methods that solve with its Hessian may fail; fb.meha needs no convexity, and a ridge in the inner loss may help.",
            stacklevel=2,
        )
    return found


@partial(jax.jit, static_argnames=("problem",))
def _ends(problem: BilevelProblem, rows: tuple[Tree, ...], key: jax.Array, spread: jax.Array) -> tuple[Any, Any]:
    """The largest curvature in size, by powers of the Hessian, and the smallest, by powers of it shifted by that."""
    outer, inner = (
        step_along(tree, spread, _normal(tree, jax.random.fold_in(key, number)))
        for number, tree in enumerate(problem.start(key))
    )
    products = [hessian_operator(problem.inner_loss, outer, inner, own) for own in rows]

    def product(vector: Tree) -> Tree:
        total = products[0](vector)
        for one in products[1:]:
            total = add(total, one(vector))
        return scale(1 / len(products), total)

    def dominant(shift: Any) -> Any:
        """The curvature along the dominant direction of H - shift."""

        def once(_: Any, vector: Tree) -> Tree:
            image = step_along(product(vector), -shift, vector)
            return scale(1 / jnp.sqrt(jnp.maximum(squared_norm(image), 1e-30)), image)

        first = _normal(inner, jax.random.fold_in(key, 2))
        vector = jax.lax.fori_loop(0, PRODUCTS, once, first)
        return dot(vector, product(vector)) / jnp.maximum(squared_norm(vector), 1e-30)

    one_end = dominant(0.0)
    other = dominant(one_end)
    return jnp.minimum(one_end, other), jnp.maximum(one_end, other)


def _normal(tree: Tree, key: jax.Array) -> Tree:
    leaves, structure = jax.tree.flatten(tree)
    keys = jax.random.split(key, len(leaves))
    drawn = [jax.random.normal(key, leaf.shape, leaf.dtype) for key, leaf in zip(keys, leaves, strict=True)]
    return jax.tree.unflatten(structure, drawn)

"""Derivatives and tree arithmetic: nothing here knows of clients or rounds.

Letters: x = ``outer``, y = ``inner``, g = inner loss, f = outer loss.  Second derivatives only ever appear as products
with a vector, so an inner variable of a million numbers costs a few times its own size.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.custom_batching import sequential_vmap

Tree = Any
Scalar = jax.Array
Loss = Callable[[Tree, Tree, Tree], Scalar]
"""``(outer, inner, batch) -> scalar``."""
FEW = 100_000
"""Operations of a batch of systems that LAPACK surely solves in one thread: jaxlib 0.10 shares out 200,000 and more."""


class Solves(NamedTuple):
    """Linear systems that a client solved by Hessian-vector products.

    ``count`` of them so far, of which ``missed`` ended short of the tolerance, of which ``bent`` at a direction in which the
    Hessian is not positive.  ``products`` and ``residual`` (relative to the right side) are those of the latest; ``worst`` is
    the largest residual so far.
    """

    count: Any
    missed: Any
    bent: Any
    products: Any
    residual: Any
    worst: Any

    def then(self, later: Solves) -> Solves:
        count, missed, bent = (a + b for a, b in zip(self[:3], later[:3], strict=True))
        return Solves(count, missed, bent, later.products, later.residual, jnp.maximum(self.worst, later.worst))


class Calls(NamedTuple):
    """How often a client asked for derivatives.

    Attributes:
        gradients: of one of the losses.
        hessian_vector: products of the inner loss's Hessian with a vector.
        cross: products of its mixed derivative with a vector.
        solves: how the systems ended that were solved by products; None where nobody asks.
    """

    gradients: Any = 0
    hessian_vector: Any = 0
    cross: Any = 0
    solves: Solves | None = None

    def plus(self, other: Calls) -> Calls:
        solves = self.solves
        if solves is not None and other.solves is not None:
            solves = solves.then(other.solves)
        # What was not asked for adds nothing, also to a program.
        pairs = zip(self[:3], other[:3], strict=True)
        gradients, products, cross = (a if isinstance(b, int) and b == 0 else a + b for a, b in pairs)
        return Calls(gradients, products, cross, solves)


def no_calls(hypergradient: Any = None) -> Calls:
    """Calls before anything was computed.

    Args:
        hypergradient: the estimator, which says whether it solves systems.

    Returns:
        Zeros.
    """
    zero = jnp.zeros((), jnp.int32)
    solves = Solves(zero, zero, zero, zero, jnp.zeros((), jnp.float32), jnp.zeros((), jnp.float32))
    return Calls(zero, zero, zero, solves if getattr(hypergradient, "solves", False) else None)


def counted(local: Any, calls: Calls) -> Any:
    """A client's state with its ``calls`` grown by these."""
    return local._replace(calls=local.calls.plus(calls))


def step_along(tree: Tree, factor: Any, direction: Tree) -> Tree:
    """``tree + factor * direction``, each leaf keeping its own dtype (a traced float64 step must not promote float32)."""
    return jax.tree.map(lambda a, b: a + jnp.asarray(factor, a.dtype) * b, tree, direction)


def subtract(a: Tree, b: Tree) -> Tree:
    """``a - b``, leaf by leaf."""
    return jax.tree.map(operator.sub, a, b)


def add(a: Tree, b: Tree) -> Tree:
    """``a + b``, leaf by leaf."""
    return jax.tree.map(operator.add, a, b)


def scale(factor: Any, tree: Tree) -> Tree:
    """``factor * tree``, each leaf keeping its own dtype."""
    return jax.tree.map(lambda a: jnp.asarray(factor, a.dtype) * a, tree)


def zeros(tree: Tree) -> Tree:
    """A tree of zeros with the same shapes and dtypes."""
    return jax.tree.map(jnp.zeros_like, tree)


def put(rows: jax.Array, value: jax.Array, place: Any) -> jax.Array:
    """``rows`` with ``value`` at ``place``, which is one of them.  ``rows.at[place].set(value)`` is a scatter: XLA takes three
    times as long to compile it."""
    found: jax.Array = jax.lax.dynamic_update_index_in_dim(rows, value, place, 0)
    return found


def select(condition: Any, chosen: Tree, otherwise: Tree) -> Tree:
    return jax.tree.map(lambda a, b: jnp.where(condition, a, b), chosen, otherwise)


def dot(a: Tree, b: Tree) -> Scalar:
    products = jax.tree.leaves(jax.tree.map(lambda p, q: jnp.sum(p * q), a, b))
    return jnp.asarray(sum(products[1:], products[0]))


def squared_norm(tree: Tree) -> Scalar:
    return dot(tree, tree)


def dtype_of(tree: Tree) -> Any:
    """The type of a variable's numbers."""
    return jax.tree.leaves(tree)[0].dtype


def all_finite(tree: Tree) -> Scalar:
    floats = [leaf for leaf in jax.tree.leaves(tree) if jnp.issubdtype(leaf.dtype, jnp.inexact)]
    return jnp.all(jnp.stack([jnp.all(jnp.isfinite(leaf)) for leaf in floats])) if floats else jnp.asarray(True)


def bytes_of(tree: Tree) -> int:
    """Bytes of the arrays in ``tree``: what a message with this content puts on the wire, framing aside."""
    return sum(int(leaf.size) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def inner_gradient(loss: Loss, outer: Tree, inner: Tree, batch: Tree) -> Tree:
    """Gradient of g in y."""
    return jax.grad(loss, argnums=1)(outer, inner, batch)


def both_gradients(loss: Loss, outer: Tree, inner: Tree, batch: Tree) -> tuple[Tree, Tree]:
    """Gradients of f in x and in y, from one backward pass."""
    in_outer, in_inner = jax.grad(loss, argnums=(0, 1))(outer, inner, batch)
    return in_outer, in_inner


def one_by_one(function: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """Under ``vmap`` a loop, not a batch.

    On a CPU, LAPACK shares out a batch of systems over JAX's threads, and waits for them in one of these threads.  Where as
    many batches wait as there are threads (two are enough on two cores), all wait for ever.
    """
    looped: Callable[..., jax.Array] = sequential_vmap(function)
    return looped


@one_by_one
def solve_positive(matrix: jax.Array, right: jax.Array) -> jax.Array:
    """The solution of a positive definite system."""
    solution: jax.Array = jax.scipy.linalg.cho_solve(jax.scipy.linalg.cho_factor(matrix), right)
    return solution


@one_by_one
def solve_each(matrices: jax.Array, rights: jax.Array) -> jax.Array:
    """The solutions of many small systems, ``[n, c, c]``, in pieces that LAPACK does not share out."""
    piece = max(1, FEW // matrices.shape[-1] ** 3)
    solutions: jax.Array = jax.lax.map(lambda pair: jnp.linalg.solve(*pair), (matrices, rights), batch_size=piece)
    return solutions


def hessian_vector(loss: Loss, outer: Tree, inner: Tree, batch: Tree, vector: Tree) -> Tree:
    """(second derivative of g in y) times ``vector``, forward over reverse."""
    return jax.jvp(lambda y: inner_gradient(loss, outer, y, batch), (inner,), (vector,))[1]


def hessian_operator(loss: Loss, outer: Tree, inner: Tree, batch: Tree) -> Callable[[Tree], Tree]:
    """The same product with the linearisation point evaluated once: for many products on one batch."""
    product: Callable[[Tree], Tree] = jax.linearize(lambda y: inner_gradient(loss, outer, y, batch), inner)[1]
    return product


def cross_product(loss: Loss, outer: Tree, inner: Tree, batch: Tree, vector: Tree) -> Tree:
    """(mixed derivative of g in x and y) times an inner-shaped ``vector``: an outer-shaped result."""
    return jax.jvp(lambda y: jax.grad(loss, argnums=0)(outer, y, batch), (inner,), (vector,))[1]


class Remembered:
    """``find`` of an array, which for arrays of JAX's, that nobody can change, is called once and kept while they live."""

    def __init__(self, find: Callable[[Any], Any]) -> None:
        self.find = find
        self.kept: dict[int, tuple[Any, Any]] = {}

    def __call__(self, array: Any) -> Any:
        if not isinstance(array, jax.Array):
            return self.find(array)
        place = id(array)
        if place not in self.kept:
            found = self.find(array)
            self.kept[place] = (weakref.ref(array, lambda _: self.kept.pop(place, None)), found)
        return self.kept[place][1]

"""Functions of a minibatch whose rows are packed, or so long that it leaves the caches: these are read where they lie.

A loss is written for a batch, so its rows are gathered before it is evaluated, and every product with them reads them once
more: a product of the Hessian with a vector takes the rows times y, the rows times the vector, and the transposed rows times
what follows from these.  Where a function of such a batch multiplies it with vectors, these products are found in its trace.
All that can be computed at the same time, of several points too, are one call of a kernel, which reads the rows once.
Everything else of the function stays what it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import DropVar, Jaxpr, JaxprEqn, Literal, Var

from fedbilevel.kernels import build
from fedbilevel.kernels.packed import Packed, multiply
from fedbilevel.kernels.take import take

LEAST_BYTES = 4 << 20
"""Bytes of a minibatch that no longer stays in the caches: the same as in long.h."""


def over_rows(
    function: Callable[[Any], Any], table: Any, indices: jax.Array, packed: Mapping[str, Packed] = MappingProxyType({})
) -> Any:
    """``function`` of the rows ``indices`` [b] of every leaf [N, ...] of ``table``; agrees with gathered rows to rounding.

    ``packed``: leaves of a table by names once more, whose rows the kernels read in this form, long or not.
    """
    places, structure = jax.tree_util.tree_flatten_with_path(table)
    leaves, read = [leaf for _, leaf in places], [_read(path, leaf, indices, packed) for path, leaf in places]
    if all(rows is None for rows in read):
        return function(jax.tree.map(lambda leaf: take(leaf, indices), table))
    shapes = [jax.ShapeDtypeStruct((*indices.shape, *leaf.shape[1:]), leaf.dtype) for leaf in leaves]
    closed, form = jax.make_jaxpr(function, return_shape=True)(jax.tree.unflatten(structure, shapes))
    jaxpr = closed.jaxpr
    long = {var: rows for var, rows in zip(jaxpr.invars, read, strict=True) if rows is not None}
    waiting = [(eqn, _product(eqn, long)) for eqn in _needed(jaxpr)]
    used = {var for eqn, product in waiting for var in _needs(eqn, product)} | _variables(jaxpr.outvars)
    known: dict[Var, Any] = dict(zip(jaxpr.constvars, closed.consts, strict=True))
    known |= {var: take(leaf, indices) for var, leaf in zip(jaxpr.invars, leaves, strict=True) if var in used}
    while waiting:
        later, products = [], []
        for eqn, product in waiting:
            if not known.keys() >= _needs(eqn, product):
                later.append((eqn, product))
            elif product is None:
                known |= _evaluated(jaxpr, eqn, known)
            else:
                products.append((product, eqn))
        for rows, sums in dict.fromkeys(product[:2] for product, _ in products):
            group = [(vector, eqn) for (*kind, vector), eqn in products if kind == [rows, sums]]
            # Derivatives of several orders ask for the same products.
            vectors = list(dict.fromkeys(vector for vector, _ in group))
            made = _multiply(long[rows], indices, [_value(vector, known) for vector in vectors], sums)
            known |= {eqn.outvars[0]: made[vectors.index(vector)] for vector, eqn in group}
        waiting = later
    return jax.tree.unflatten(jax.tree.structure(form), [_value(var, known) for var in jaxpr.outvars])


def _read(path: tuple[Any, ...], leaf: Any, indices: jax.Array, packed: Mapping[str, Packed]) -> Any:
    """What the kernels read in the place of a leaf's rows; None where these are gathered."""
    found = packed.get(getattr(path[0], "key", "")) if len(path) == 1 else None
    if found is not None and indices.ndim == 1 and indices.dtype == np.int32 and leaf.dtype == jnp.float32:
        return found
    return leaf if _suits(leaf, indices) else None


def _suits(leaf: Any, indices: jax.Array) -> bool:
    if leaf.ndim != 2 or leaf.dtype not in (jnp.float32, jnp.float64) or indices.dtype != np.int32:
        return False
    # Where rows are shared out over devices the trace would not know of them.
    shared_out = any(jax.typeof(array).mat.varying for array in (leaf, indices))
    return len(indices) * leaf.shape[1] * leaf.dtype.itemsize >= LEAST_BYTES and not shared_out and build.available()


def _needed(jaxpr: Jaxpr) -> list[JaxprEqn]:
    """The equations that a result follows from: derivatives come with others."""
    wanted, kept = _variables(jaxpr.outvars), []
    for eqn in reversed(jaxpr.eqns):
        if eqn.effects or wanted.intersection(eqn.outvars):
            kept.append(eqn)
            wanted |= _variables(eqn.invars)
    return kept[::-1]


def _product(eqn: JaxprEqn, long: Mapping[Var, Any]) -> tuple[Var, bool, Any] | None:
    """If ``eqn`` multiplies a vector with long rows: these, whether it sums over the rows, and the vector."""
    if eqn.primitive.name != "dot_general" or eqn.params["dimension_numbers"][1] != ((), ()):
        return None
    operands, contracted = list[Any](eqn.invars), eqn.params["dimension_numbers"][0]
    made: Any = eqn.outvars[0].aval
    for (rows, vector), (axes, _) in zip((operands, operands[::-1]), (contracted, contracted[::-1]), strict=True):
        if isinstance(rows, Var) and rows in long and vector.aval.ndim == 1 and len(axes) == 1:
            operand: Any = rows.aval
            return (rows, axes == (0,), vector) if operand.dtype == vector.aval.dtype == made.dtype else None
    return None


def _needs(eqn: JaxprEqn, product: tuple[Var, bool, Any] | None) -> set[Var]:
    """What must be known before: of a product with long rows not the rows."""
    return _variables(eqn.invars if product is None else [product[2]])


def _variables(atoms: Iterable[Any]) -> set[Var]:
    return {atom for atom in atoms if isinstance(atom, Var)}


def _value(var: Any, known: dict[Var, Any]) -> Any:
    return var.val if isinstance(var, Literal) else known[var]


def _evaluated(jaxpr: Jaxpr, eqn: JaxprEqn, known: dict[Var, Any]) -> dict[Var, Any]:
    given = list(dict.fromkeys(var for var in eqn.invars if isinstance(var, Var)))
    made = [var for var in eqn.outvars if not isinstance(var, DropVar)]
    alone = jaxpr.replace(constvars=[], invars=given, outvars=made, eqns=[eqn])
    return dict(zip(made, jax.core.eval_jaxpr(alone, (), *(known[var] for var in given)), strict=True))


def _multiply(table: Any, indices: jax.Array, vectors: list[jax.Array], sums: bool) -> Sequence[jax.Array]:
    if isinstance(table, Packed):
        return multiply(table, indices, vectors, sums)
    operands = build.together(table, indices, *vectors)
    result = jax.typeof(operands[2]).update(shape=table.shape[1:] if sums else indices.shape)
    name = build.target("products", table.dtype == jnp.float64)
    call = jax.ffi.ffi_call(name, [result] * len(vectors), vmap_method="expand_dims")
    return call(*operands, sums=np.int32(sums))

"""Phi(x, y) with dense NumPy matrices: the exact solve and the Neumann series of Eq. 5."""

import numpy as np


def exact(model):
    """Hessian and cross derivative from one training minibatch, f from one validation minibatch."""

    def phi(client, x, y, rows):
        in_outer, in_inner = model.outer_gradients(client, x, y, rows.held_out())
        solution = np.linalg.solve(model.inner_hessian(client, x, y, rows.factor(0)), in_inner)
        return in_outer - model.cross(client, x, y, rows.factor(0)) @ solution

    return phi


def neumann(model, terms, step):
    """Q = ``terms`` factors (I - step H_j) with a minibatch each, Q + 1 summands, the last minibatch for the cross term."""

    def phi(client, x, y, rows):
        in_outer, in_inner = model.outer_gradients(client, x, y, rows.held_out())
        summand = total = in_inner
        for j in range(terms):
            summand = summand - step * model.inner_hessian(client, x, y, rows.factor(j)) @ summand
            total = total + summand
        return in_outer - model.cross(client, x, y, rows.factor(terms)) @ (step * total)

    return phi

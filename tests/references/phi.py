"""Phi(x, y) with dense NumPy matrices: the exact solve, the Neumann series of Eq. 5, and one that sets itself."""

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


def adaptive(model, terms=None, step=np.inf, bias=0.1, most=20):
    """Richardson's iteration; its steps never leave more than there was, and it ends where little is left."""

    def phi(client, x, y, rows):
        in_outer, residual = model.outer_gradients(client, x, y, rows.held_out())
        solution, last, count = np.zeros_like(residual), 0.0, most if terms is None else terms
        for j in range(count):
            image, before = model.inner_hessian(client, x, y, rows.factor(j)) @ residual, np.linalg.norm(residual)
            if residual @ image <= 0:
                last = min(before / np.linalg.norm(image), step)
                break
            last = min(residual @ image / (image @ image), step)
            solution, residual = solution + last * residual, residual - last * image
            ratio = min(np.linalg.norm(residual) / before, 0.999)
            left = last * np.linalg.norm(residual) * ratio / (1 - ratio)
            if terms is None and left <= bias * np.linalg.norm(solution):
                break
        return in_outer - model.cross(client, x, y, rows.factor(count)) @ (solution + last * residual)

    return phi

"""Conjugate gradients and the scales that precondition them, naively: dense NumPy matrices, no JAX."""

import numpy as np


def conjugate_gradient(matrix, right, steps, tolerance, diagonal=None):
    """(solution, products, relative residual, whether the matrix is not positive along some direction)."""
    diagonal = np.ones_like(right) if diagonal is None else diagonal
    solution, residual, steepest, best, least = np.zeros_like(right), right, 0.0, np.zeros_like(right), 1.0
    direction = residual / diagonal
    for products in range(steps + 1):
        left = np.linalg.norm(residual) / np.linalg.norm(right)
        if left**2 < 0.99 * least**2:
            best, least = solution, left
        if left <= tolerance or products == steps:
            return solution, products, left, False
        curvature, extent = direction @ matrix @ direction, direction @ (diagonal * direction)
        steepest = max(steepest, abs(curvature) / extent)
        if curvature <= 10 * np.finfo(right.dtype).eps * steepest * extent:
            return best, products + 1, least, True
        length = residual @ (residual / diagonal) / curvature
        before = residual @ (residual / diagonal)
        solution = solution + length * direction
        residual = residual - length * matrix @ direction
        direction = residual / diagonal + residual @ (residual / diagonal) / before * direction
    raise AssertionError("the loop returns")


def scales(matrix, signs):
    """One row of signs a product."""
    logs = np.zeros(len(matrix))
    for number, sign in enumerate(signs):
        image = matrix @ (sign * np.exp(-logs / 2))
        logs = ((number + 1) * logs + np.log(image**2)) / (number + 2)
    return np.exp(logs)

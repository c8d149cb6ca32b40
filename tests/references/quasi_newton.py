"""`quasi_newton` naively, for penalties of a ridge regression over clients that share one model: lists of moves, no JAX."""

import numpy as np


def times_inverse(moves, vector):
    """The inverse Hessian by its recursion, newest move outermost: B = (1 - r s y') B (1 - r y s') + r s s'."""
    if not moves:
        return vector
    (s, y), size = moves[-1], len(vector)
    matrix = np.eye(size) * (s @ y) / (y @ y)
    for s, y in moves:
        rate = 1 / (s @ y)
        left = np.eye(size) - rate * np.outer(s, y)
        matrix = left @ matrix @ left.T + rate * np.outer(s, s)
    return matrix @ vector


def penalties(train, val, start, rounds, inner_turns, adjoint_turns, memory, waits, lowest, highest):
    """x after every round, and the last y."""
    means = [[np.mean(part, axis=0) for part in zip(*rows, strict=True)] for rows in (moments(train), moments(val))]
    (second, first), (second_val, first_val) = means
    constant = 0.5 * np.mean([np.mean(y**2) for y in train[1]])
    x, y = np.array(start, float), np.zeros_like(start)
    u, steps, last, moves, way, length = (
        np.zeros_like(x),
        np.full_like(x, 0.5),
        np.zeros_like(x),
        [],
        np.zeros_like(x),
        0.0,
    )
    value = gradient = None
    first_length = 1.0
    passed = []
    for number in range(rounds):
        hessian = second + np.diag(np.exp(x))

        def loss(y, hessian=hessian):
            return 0.5 * y @ hessian @ y - first @ y + constant

        fresh = True
        length = 0.0
        for _ in range(inner_turns):
            trial = y + length * way
            there = loss(trial), hessian @ trial - first
            rounding = 8 * np.finfo(float).eps * abs(value or 0)
            if fresh or there[0] <= value + 1e-4 * length * (gradient @ way) + rounding:
                if not fresh:
                    moved, changed = trial - y, there[1] - gradient
                    if moved @ changed > 1e-6 * np.sqrt((moved @ moved) * (changed @ changed)):
                        moves = [*moves, (moved, changed)][-memory:]
                y, (value, gradient) = trial, there
                way, length = -times_inverse(moves, gradient), first_length if fresh else 1.0
            else:
                length *= 0.25
            first_length = length
            fresh = False
        residual = second_val @ y - first_val - hessian @ u
        direction = times_inverse(moves, residual)
        for _ in range(adjoint_turns):
            steep = times_inverse(moves, residual)
            share = (residual @ steep) / (direction @ hessian @ direction)
            u, after = u + share * direction, residual - share * hessian @ direction
            next_steep = times_inverse(moves, after)
            direction = next_steep + (after @ next_steep) / (residual @ steep) * direction
            residual = after
        nu = -np.exp(x) * y * u
        if number >= waits:
            steps = np.where(last * nu > 0, np.minimum(1.5 * steps, 1.5), np.where(last * nu < 0, steps / 2, steps))
            last = np.where(last * nu < 0, 0, nu)
            x = np.clip(x - steps * np.sign(last), lowest, highest)
        passed.append(x)
    return passed, y


def moments(rows):
    """(second, first) moments of every client."""
    return [(a.T @ a / len(b), a.T @ b / len(b)) for a, b in zip(*rows, strict=True)]

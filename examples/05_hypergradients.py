# %% [markdown]
# # Three ways to a hypergradient
# The exact one factorises a Hessian. Conjugate gradients and the Neumann series only multiply with it.

# %%
import matplotlib.pyplot as plt
import numpy as np

import fedbilevel as fb
from fedbilevel.tasks import random_quadratic

clients = random_quadratic(3, clients=1)
problem, data = clients.problem(), clients.data()


def first_direction(estimator):
    """The first outer direction of FedBiO, and how many Hessian-vector products it took."""
    algorithm = fb.fedbio(problem, estimator, inner_step=0.1, outer_step=0.1, local_steps=1)
    calls = fb.simulate(algorithm, data, rounds=1).history["hessian_vector_calls"].iloc[-1]
    return np.ravel(fb.trace(algorithm, data, rounds=1).outer_momentum), calls


exact, _ = first_direction(fb.exact())


def error(estimator):
    direction, calls = first_direction(estimator)
    return calls, np.linalg.norm(direction - exact) / np.linalg.norm(exact)


series = np.array([error(fb.neumann(terms=terms, step=0.5)) for terms in (1, 5, 20, 40)])
solver = np.array([error(fb.conjugate_gradient(tolerance=accuracy)) for accuracy in (0.5, 1e-2, 1e-6)])
print(f"Neumann, {series[-1][0]:.0f} products: relative error {series[-1][1]:.1e}")
print(f"conjugate gradients, {solver[-1][0]:.0f} products: relative error {solver[-1][1]:.1e}")

# %% [markdown]
# The series loses a fixed factor with every term. Conjugate gradients are faster, but they need one fixed Hessian: each term of
# the series may use a fresh minibatch, and that is why FedBiO on minibatches uses it.

# %%
figure, axis = plt.subplots(figsize=(6, 3.4))
axis.semilogy(*series.T, "o-", label="Neumann series")
axis.semilogy(*np.maximum(solver, 1e-9).T, "s-", label="conjugate gradients")
axis.set(xlabel="Hessian-vector products", ylabel="relative error of the hypergradient")
axis.legend()

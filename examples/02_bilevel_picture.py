# %% [markdown]
# # A bilevel problem as a picture
# One number above, one below. The inner solution y(x) is a curve, and the outer loss is minimised along it.

# %%
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

import fedbilevel as fb


def inner(x, y, batch):  # its minimum over y lies at y(x) = sin(2x)
    return 0.5 * (y - jnp.sin(2 * x)) ** 2 + 0 * jnp.sum(batch)


def outer(x, y, batch):
    return 0.5 * (y - 0.4) ** 2 + 0.15 * (x - 1.6) ** 2 + 0 * jnp.sum(batch)


problem = fb.BilevelProblem(inner, outer, init=lambda key: (jnp.array(-0.4), jnp.array(1.2)))
data = fb.ClientData(train=np.zeros((1, 1)), val=np.zeros((1, 1)))
steps = fb.trace(fb.fedbio(problem, fb.exact(), inner_step=0.3, outer_step=0.15, local_steps=1), data, rounds=80)
path = np.stack([np.ravel(steps.outer), np.ravel(steps.inner)])

# %% [markdown]
# Left: contours of the outer loss f(x, y). The answer has to lie on the black curve y(x). FedBiO (red) moves y towards the
# curve and x along the hypergradient at the same time. Right: the same problem as a function of x alone, h(x) = f(x, y(x)).
# Its slope, the *hypergradient*, has two parts: how f changes with x, and how f changes because y(x) moves.

# %%
x, y = np.meshgrid(np.linspace(-0.8, 2.2, 200), np.linspace(-1.2, 1.4, 200))
line = np.linspace(-0.8, 2.2, 200)
figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.8))
left.contour(x, y, 0.5 * (y - 0.4) ** 2 + 0.15 * (x - 1.6) ** 2, levels=14, cmap="Blues_r", alpha=0.7)
left.plot(line, np.sin(2 * line), "k", label="y(x), where training ends")
left.plot(*path, "r.-", markersize=4, label="FedBiO")
left.set(xlabel="x, what is tuned", ylabel="y, what is trained", title="f(x, y)")
left.legend(loc="lower left")
h = jax.vmap(lambda x: outer(x, jnp.sin(2 * x), jnp.zeros(1)))(line)
slope = jax.grad(lambda x: outer(x, jnp.sin(2 * x), jnp.zeros(1)))
right.plot(line, h, "k", label="h(x) = f(x, y(x))")
for place in (-0.4, 0.2, 1.0):
    near, value = place + np.array([-0.25, 0.25]), outer(place, np.sin(2 * place), jnp.zeros(1))
    right.plot(near, value + slope(place) * (near - place), "r", linewidth=2)
right.plot(path[0], [outer(x, np.sin(2 * x), jnp.zeros(1)) for x in path[0]], "r.", markersize=4)
right.set(xlabel="x", title="h(x), and its slope: the hypergradient")
right.legend()
figure.tight_layout()

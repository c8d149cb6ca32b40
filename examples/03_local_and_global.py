# %% [markdown]
# # Local and global lower levels
# The same two clients give two different answers. With *local* lower levels each client trains a model of its own.
# With a *global* one they train one model together.

# %%
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

import fedbilevel as fb

curvature = np.array([0.5, 4.0], np.float32)  # client 0 is flat, client 1 is steep
target = np.array([3.0, -1.0], np.float32)
rows = {"c": curvature[:, None], "t": target[:, None]}


def inner(x, y, batch):
    return jnp.mean(0.5 * batch["c"] * (y - x * batch["t"]) ** 2)


def outer(x, y, batch):
    return jnp.mean(0.5 * (y - 1) ** 2) + 0.05 * x**2


def solved(lower_level, method):
    problem = fb.BilevelProblem(inner, outer, lambda key: (jnp.array(0.0), jnp.array(0.0)), lower_level=lower_level)
    return fb.simulate(method(problem), fb.ClientData(train=rows, val=rows), rounds=300, record_every=None)


local, common = solved("local", fb.fedbio), solved("global", fb.fedmsa)
print(f"local:  x = {local.outer:.3f}, models {np.round(local.inner, 2)}")
print(f"global: x = {common.outer:.3f}, models {np.round(common.inner, 2)}")

# %% [markdown]
# Both are right, about different questions. Local: tune x for models that stay different. Global: tune x for one model. The
# mean of the clients' own solutions is not the solution of the mean problem, because the steep client counts more there.

# %%
x = np.linspace(-1.5, 2.5, 300)
own = np.mean([0.5 * (x * t - 1) ** 2 for t in target], axis=0) + 0.05 * x**2
shared = 0.5 * (x * (curvature @ target) / curvature.sum() - 1) ** 2 + 0.05 * x**2
figure, axis = plt.subplots(figsize=(6, 3.4))
axis.plot(x, own, label="h(x), local")
axis.plot(x, shared, label="h(x), global")
for found, curve in ((local.outer, own), (common.outer, shared)):
    axis.plot(found, np.interp(found, x, curve), "ko")
axis.set(xlabel="x", ylim=(0, 4), title="two problems; dots: what FedBiO and FedMSA found")
axis.legend()

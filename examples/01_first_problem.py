# %% [markdown]
# # Your first bilevel problem
# Three hospitals tune ridge penalties together. Rows and models stay at home; only the penalties travel.

# %%
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

import fedbilevel as fb

rng = np.random.default_rng(0)
truth = np.array([2.0, -1.0, 0.0, 0.0, 0.0])  # two features matter, three do not


def hospital(rows, shift):
    features = rng.normal(size=(rows, 5)).astype(np.float32)
    return {"a": features, "b": (features @ (truth * (1 + shift)) + rng.normal(size=rows)).astype(np.float32)}


data = fb.ClientData.from_clients([(hospital(30 + 10 * m, 0.1 * m), hospital(20, 0.1 * m)) for m in range(3)])

# %% [markdown]
# The *inner* loss trains a model with the penalties `exp(x)`. The *outer* loss asks how well that model predicts new rows.


# %%
def error(x, y, batch):
    return jnp.mean((batch["a"] @ y - batch["b"]) ** 2)


def penalised(x, y, batch):
    return error(x, y, batch) + jnp.sum(jnp.exp(x) * y**2)


problem = fb.BilevelProblem(
    inner_loss=penalised,
    outer_loss=error,
    init=lambda key: (jnp.zeros(5), jnp.zeros(5)),
    project=lambda x: jnp.clip(x, -6, 1),  # keeps the penalties between exp(-6) and exp(1)
)
result = fb.simulate(fb.fedbio(problem), data, rounds=200)
print("log penalties:", result.outer.round(1))

# %% [markdown]
# Small penalties for the two features that matter, large ones for the rest. No step size was chosen.

# %%
figure, axes = plt.subplots(1, 2, figsize=(9, 3.2))
result.plot("true_objective", ax=axes[0])
axes[1].bar(range(5), np.exp(result.outer), color=["C0", "C0", "C7", "C7", "C7"])
axes[1].set(xlabel="feature", ylabel="penalty", title="what the hospitals agreed on")
figure.tight_layout()

# %% [markdown]
# # Client drift, and what momentum does about it
# Twenty local steps a round save messages. Clients that differ then pull x in different directions between two rounds.

# %%
import matplotlib.pyplot as plt

import fedbilevel as fb
from fedbilevel.tasks import random_quadratic

clients = random_quadratic(0, clients=4)
problem, data = clients.problem(), clients.data()
runs = {
    "FedBiO, 1 local step": fb.fedbio(problem, fb.exact(), inner_step=0.5, outer_step=0.1, local_steps=1),
    "FedBiO, 20 local steps": fb.fedbio(problem, fb.exact(), inner_step=0.5, outer_step=0.1, local_steps=20),
    "FedBiOAcc, 20 local steps": fb.fedbioacc(
        problem, fb.exact(), local_steps=20, previous="local", **{**fb.TUNED, "outer_step": 1.0}
    ),
}
results = {name: fb.simulate(algorithm, data, rounds=400) for name, algorithm in runs.items()}
for name, result in results.items():
    print(f"{name:26} distance to the minimum {abs(result.outer - clients.minimiser()).max():.2g}")

# %% [markdown]
# With a constant step and twenty local steps FedBiO stops at a distance. FedBiOAcc averages the momentum as well as x, so the
# clients walk in a common direction and get past that point. It sends two vectors instead of one.

# %%
figure, axis = plt.subplots(figsize=(7, 3.6))
fb.plot(*results.values(), labels=[*results], column="hypergradient_squared_norm", against="bytes_up", ax=axis)
axis.set(xscale="log", yscale="log", xlabel="bytes sent", ylabel="squared hypergradient", ylim=(1e-9, None))

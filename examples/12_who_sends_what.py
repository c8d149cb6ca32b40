# %% [markdown]
# # What leaves a client, and how much
# Every method counts the bytes of the arrays it sends. An operator can see the traffic before anything runs over a network.

# %%
import matplotlib.pyplot as plt
import pandas as pd

import fedbilevel as fb
from fedbilevel.tasks import known_quadratic

task = known_quadratic(0, lower_level="global")
step = 0.5 / task.curvature
methods = {
    "FedBiO": fb.fedbio_global(task.problem, inner_step=step, adjoint_step=step, outer_step=task.outer_step),
    "FedBiOAcc": fb.fedbioacc_global(task.problem, inner_step=step, adjoint_step=step, outer_step=task.outer_step),
    "FedMSA": fb.fedmsa(task.problem),
    "FedNest": fb.fednest(task.problem, inner_step=step, series_step=step, outer_step=task.outer_step),
}
last = {
    name: fb.simulate(method, task.data, rounds=20, diagnostics="cheap").history.iloc[-1]
    for name, method in methods.items()
}
table = pd.DataFrame(last).T[["bytes_up", "bytes_down", "gradient_calls", "hessian_vector_calls"]]
print(table.astype(int).to_string())

# %% [markdown]
# `secure=True` rounds averages as secure sums over real sites do. The answer hardly changes.

# %%
plain = fb.simulate(methods["FedBiO"], task.data, rounds=20, record_every=None).outer
rounded = fb.simulate(methods["FedBiO"], task.data, rounds=20, record_every=None, secure=True).outer
print(f"largest difference: {abs(plain - rounded).max():.1e}")

# %%
axis = (table[["bytes_up", "bytes_down"]] / 20e3).plot.barh(figsize=(6.5, 3.2))
axis.set(xlabel="kB a round, all clients together")
plt.tight_layout()

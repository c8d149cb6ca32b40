# %% [markdown]
# # Many seeds and step sizes in one program
# `fb.sweep` compiles once and runs every combination on all cores. A combination that diverges does not stop the others.

# %%
import matplotlib.pyplot as plt

import fedbilevel as fb
from fedbilevel.tasks import random_penalties

task = random_penalties(0)
step = 0.5 / task.curvature
algorithm = fb.fedbio(
    task.problem, fb.neumann(terms=10, step=step), inner_step=step, outer_step=task.outer_step, batch_size=16
)
found = fb.sweep(
    algorithm,
    task.data,
    rounds=60,
    seeds=range(4),
    record_every=5,
    diagnostics="cheap",
    outer_step=[factor * task.outer_step for factor in (0.1, 1, 10)],
)
print(found)
print(found.table.groupby("outer_step")["objective"].agg(["mean", "std"]).round(3))

# %%
figure, axis = plt.subplots(figsize=(6.5, 3.4))
found.plot("objective", ax=axis)
axis.set(ylabel="outer loss", title="three outer steps, four seeds each")

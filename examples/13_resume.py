# %% [markdown]
# # Stop a run, and go on
# A checkpoint is one file. The resumed run gives the same numbers, to the last bit.

# %%
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np

import fedbilevel as fb
from fedbilevel.tasks import random_penalties

task = random_penalties(1)
algorithm = fb.fedbio(task.problem, batch_size=16)
file = Path("run.npz")
first = fb.simulate(algorithm, task.data, rounds=20, checkpoint=file)
print(f"stopped after round {first.rounds}; {file} holds {file.stat().st_size / 1e3:.0f} kB")

# %% [markdown]
# The same call with more rounds goes on from the file. It also would after Ctrl-C, a crash or a power cut.

# %%
resumed = fb.simulate(algorithm, task.data, rounds=50, checkpoint=file)
whole = fb.simulate(algorithm, task.data, rounds=50)
assert np.array_equal(resumed.outer, whole.outer)
print("bit for bit the same:", np.array_equal(resumed.outer, whole.outer))

# %%
figure, axis = plt.subplots(figsize=(6.5, 3.2))
whole.plot("objective", ax=axis)
axis.axvline(20, color="C7", linestyle="--")
axis.annotate(" stopped here", (20, axis.get_ylim()[1]), va="top")

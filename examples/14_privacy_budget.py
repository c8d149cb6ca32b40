# %% [markdown]
# # What a privacy budget buys
# A site that adds noise pays epsilon for every reply. More replies or less noise cost more.

# %%
import matplotlib.pyplot as plt
import numpy as np
from dp_accounting import GaussianDpEvent, SelfComposedDpEvent
from dp_accounting.pld import PLDAccountant

replies = np.array([1, 2, 5, 10, 20, 50, 100, 200])


def epsilon(noise, count, delta=1e-5):
    account = PLDAccountant(value_discretization_interval=1e-2)
    return account.compose(SelfComposedDpEvent(GaussianDpEvent(noise), int(count))).get_epsilon(delta)


curves = {noise: [epsilon(noise, count) for count in replies] for noise in (2, 5, 10, 20)}
for noise, values in curves.items():
    print(f"noise {noise:2}: 20 replies cost epsilon {values[4]:.2f}, 100 replies {values[6]:.2f}")

# %% [markdown]
# A default run of FedBiOAcc has up to 300 replies, so runs with noise should be short: few rounds, more local steps.

# %%
figure, axis = plt.subplots(figsize=(6.5, 3.4))
for noise, values in curves.items():
    axis.loglog(replies, values, "o-", label=f"noise {noise}")
axis.axhline(8, color="C7", linestyle="--")
axis.set(xlabel="replies of a site", ylabel="epsilon at delta = 1e-5")
axis.legend(title="in units of the clipping norm", loc="upper left", bbox_to_anchor=(1, 1))

# %% [markdown]
# # Audit a model you already have
# Nothing is trained: rates by group, with intervals, from labels and decisions alone.

# %%
import matplotlib.pyplot as plt
import numpy as np
from sklearn.linear_model import LogisticRegression

from fedbilevel.datasets import load
from fedbilevel.fairness import equal_opportunity_difference, group_table
from fedbilevel.fairness.metrics import Counts

credit = load("credit", sensitive="sex")
numbers = credit.X.select_dtypes("number").to_numpy(float)
model = LogisticRegression(max_iter=2000).fit(numbers[::2], credit.y[::2])
labels, groups = credit.y[1::2], np.asarray(credit.groups)[1::2]
decisions = model.predict(numbers[1::2])
print(group_table(labels, decisions, sensitive_features=groups).round(3).T.to_string())
print(f"gap: {equal_opportunity_difference(labels, decisions, sensitive_features=groups):.3f}")

# %% [markdown]
# `Counts` are whole numbers by group, label and decision. They add up over sites, and every rate and interval follows from
# them, so they are all that a site has to send.

# %%
names, codes = np.unique(groups, return_inverse=True)
half = np.arange(len(labels)) % 2 == 0
north, south = (Counts.of(labels[part], decisions[part], codes[part], len(names)) for part in (half, ~half))
together = north + south
low, high = together.wilson("true_positive_rate")

# %%
rates = together.rates("true_positive_rate")
figure, axis = plt.subplots(figsize=(5.5, 2.4))
axis.errorbar(rates, names, xerr=[rates - low, high - rates], fmt="o", capsize=4)
axis.set(xlim=(0, 1), xlabel="true-positive rate, with a 95 % interval")
axis.margins(y=0.4)

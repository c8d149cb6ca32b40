# %% [markdown]
# # A fair classifier in ten lines
# Who gets a positive decision, of those who merit one? FedAvg, FedReg and FedPath, the default, on the census table Adult.

# %%
import matplotlib.pyplot as plt
import numpy as np
from sklearn.model_selection import train_test_split

from fedbilevel.datasets import load
from fedbilevel.fairness import FairFederatedClassifier, accuracy, equal_opportunity_difference, group_table

adult = load("adult", sensitive="sex")
rows = np.random.default_rng(0).permutation(len(adult.y))[:12_000]
train, test = train_test_split(rows, test_size=0.5, random_state=0)
plane = {}
for method in ("fedavg", "fedreg", "fedpath"):
    model = FairFederatedClassifier(method, random_state=0)
    model.fit(adult.X.iloc[train], adult.y[train], sensitive_features=adult.groups[train], clients=train % 3)
    decisions = model.predict(adult.X.iloc[test])
    gap = equal_opportunity_difference(adult.y[test], decisions, sensitive_features=adult.groups[test])
    plane[method] = gap, accuracy(adult.y[test], decisions)
    print(f"{method:10} accuracy {plane[method][1]:.3f}  gap {gap:.3f}")

# %% [markdown]
# The table behind the last gap: how often each group is decided positively, of all and of those who merit it.

# %%
shown = group_table(adult.y[test], decisions, sensitive_features=adult.groups[test])
print(shown.round(3).T.to_string())

# %%
figure, axis = plt.subplots(figsize=(5.5, 3.4))
for method, (gap, right) in plane.items():
    axis.plot(gap, right, "o", markersize=9)
    axis.annotate(method, (gap, right), xytext=(6, 6), textcoords="offset points")
axis.set(xlabel="gap between the groups' true-positive rates", ylabel="accuracy")
axis.margins(0.25)
axis.set_xlim(0, 1.2 * max(gap for gap, _ in plane.values()))

# %% [markdown]
# # Four hospitals, one model
# Heart disease at four real hospitals. Each keeps its rows; the classifier is trained over all of them.

# %%
import matplotlib.pyplot as plt
import numpy as np

from fedbilevel.datasets import load
from fedbilevel.fairness import FairFederatedClassifier, auc

heart = load("heart")
sites, rows = np.unique(heart.sites, return_counts=True)
print(dict(zip(sites.tolist(), rows.tolist(), strict=True)))
table = heart.X.drop(columns="chol")  # not measured in Switzerland
test = np.random.default_rng(0).random(len(heart.y)) < 0.3

# %% [markdown]
# Alone, with the rows of one hospital only, or together?


# %%
def trained(chosen):
    model = FairFederatedClassifier(steps=500, weight_steps=200, batch_size=32, random_state=0)
    model.fit(table[chosen], heart.y[chosen], sensitive_features=heart.groups[chosen], clients=heart.sites[chosen])
    return model.predict_proba(table[test])[:, 1]


together = auc(heart.y[test], trained(~test))
alone = {site: auc(heart.y[test], trained(~test & (heart.sites == site))) for site in sites}
print(f"together: AUC {together:.3f} on the test rows of all hospitals")

# %%
figure, axis = plt.subplots(figsize=(6.5, 3.2))
axis.barh(list(alone), list(alone.values()), color="C7", label="trained at one hospital")
axis.axvline(together, color="C0", linewidth=3, label="trained together")
axis.set(xlim=(0.5, 1), xlabel="AUC on the test rows of all four")
axis.legend(loc="lower center", bbox_to_anchor=(0.5, 1), ncols=2)

# %% [markdown]
# # A fair model still shows a gap
# A rate over few people is noisy. So a model that treats two groups exactly alike shows a gap above zero on a test set.

# %%
import matplotlib.pyplot as plt
import numpy as np

rng = np.random.default_rng(0)


def floor(positives, rate=0.6, draws=4000):
    """Gaps that a perfectly fair model shows, where the groups have so many positives in the test set."""
    rates = np.stack([rng.binomial(count, rate, draws) / count for count in positives])
    return rates.max(axis=0) - rates.min(axis=0)


cases = {
    "two groups, 531 and 2,983 positives": (531, 2983),
    "two groups, 60 and 300": (60, 300),
    "five groups, 14 to 3,206": (14, 30, 80, 300, 3206),
}
for name, positives in cases.items():
    print(f"{name}: a fair model shows a gap of {floor(positives).mean():.3f} on average")

# %% [markdown]
# Compare a measured gap with its floor before you call a model unfair, or a method better. Below a floor there is nothing left
# to see, whatever the method.

# %%
figure, axis = plt.subplots(figsize=(6.5, 3.4))
for name, positives in cases.items():
    axis.hist(floor(positives), bins=60, density=True, histtype="step", linewidth=2, label=name)
axis.set(xlabel="gap that a perfectly fair model shows", yticks=[], xlim=(0, 0.6))
axis.legend()

# %% [markdown]
# # Find wrong labels without looking at them
# Six of ten training labels are wrong. A bilevel problem learns which rows to trust, from a few clean validation rows.

# %%
import matplotlib.pyplot as plt

import fedbilevel as fb
from fedbilevel.tasks import data_cleaning, digits

task = data_cleaning(digits(), seed=0, noise=0.6, concentration=1.0)
step = 0.5 / task.curvature
algorithm = fb.fedbio(
    task.problem, fb.neumann(terms=5, step=step), inner_step=step, outer_step=5 * task.outer_step, batch_size=16
)
scores = {}
for rounds in (1, 10, 40, 100):
    result = fb.simulate(algorithm, task.data, rounds=rounds, record_every=None)
    scores[rounds] = task.evaluate(result.outer, result.inner)
    print(f"{rounds:4} rounds: test accuracy {scores[rounds]['accuracy']:.2f}, AUC {scores[rounds]['auc']:.2f}")

# %% [markdown]
# The outer variable is a model of trust: a weight for each row, computed from its features and its label. The AUC says how well
# the weights tell wrong labels from right ones. Nobody told the clients which labels are wrong.

# %%
figure, axis = plt.subplots(figsize=(6, 3.2))
axis.plot(scores.keys(), [one["accuracy"] for one in scores.values()], "o-", label="test accuracy")
axis.plot(scores.keys(), [one["auc"] for one in scores.values()], "s-", label="AUC of the weights")
axis.set(xlabel="rounds", ylim=(0.4, 1))
axis.legend()

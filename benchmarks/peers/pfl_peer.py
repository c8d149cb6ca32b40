"""pfl-research: FederatedAveraging on its simulated backend."""

import torch
from common import ROUNDS, STEP, STEPS, clients, finish, round_ended
from pfl.aggregate.simulate import SimulatedBackend
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data.dataset import Dataset
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.sampling import get_user_sampler
from pfl.hyperparam import NNEvalHyperParams, NNTrainHyperParams
from pfl.metrics import Metrics, Weighted
from pfl.model.pytorch import PyTorchModel

rows, labels = (torch.from_numpy(array) for array in clients())


class Logistic(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(rows.shape[2], 1, bias=False)
        torch.nn.init.zeros_(self.linear.weight)

    def forward(self, features):
        return self.linear(features).squeeze(1)

    def loss(self, features, targets, eval=False):
        return torch.nn.functional.binary_cross_entropy_with_logits(self(features), targets)

    @torch.no_grad()
    def metrics(self, features, targets, eval=False):
        return {"loss": Weighted(self.loss(features, targets).item() * len(features), len(features))}


class Ended(TrainingProcessCallback):
    def after_central_iteration(self, aggregate_metrics, model, *, central_iteration):
        round_ended()
        return False, Metrics()


net = Logistic()
model = PyTorchModel(net, torch.optim.SGD, torch.optim.SGD(net.parameters(), lr=1.0))
users = FederatedDataset(
    lambda number: Dataset(raw_data=[rows[number], labels[number]]),
    get_user_sampler("minimize_reuse", range(len(rows))),
)
FederatedAveraging().run(
    NNAlgorithmParams(
        central_num_iterations=ROUNDS, evaluation_frequency=ROUNDS + 1, train_cohort_size=len(rows), val_cohort_size=0
    ),
    SimulatedBackend(training_data=users, val_data=None),
    model,
    NNTrainHyperParams(local_num_epochs=STEPS, local_learning_rate=STEP, local_batch_size=None),
    NNEvalHyperParams(local_batch_size=None),
    [Ended()],
)
finish(net.linear.weight.detach())

"""pfl-research's simulated backend: all users take part in every iteration."""

import torch
from common import ROUNDS, STEP, STEPS, finish, round_ended
from pfl.aggregate.simulate import SimulatedBackend
from pfl.algorithm.base import NNAlgorithmParams
from pfl.callback.base import TrainingProcessCallback
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.sampling import get_user_sampler
from pfl.hyperparam import NNEvalHyperParams, NNTrainHyperParams
from pfl.metrics import Metrics
from pfl.model.pytorch import PyTorchModel


class Ended(TrainingProcessCallback):
    def after_central_iteration(self, aggregate_metrics, model, *, central_iteration):
        round_ended()
        return False, Metrics()


def simulate(algorithm, net, count, user_dataset):
    users = FederatedDataset(user_dataset, get_user_sampler("minimize_reuse", range(count)))
    algorithm.run(
        NNAlgorithmParams(
            central_num_iterations=ROUNDS, evaluation_frequency=ROUNDS + 1, train_cohort_size=count, val_cohort_size=0
        ),
        SimulatedBackend(training_data=users, val_data=None),
        PyTorchModel(net, torch.optim.SGD, torch.optim.SGD(net.parameters(), lr=1.0)),
        NNTrainHyperParams(local_num_epochs=STEPS, local_learning_rate=STEP, local_batch_size=None),
        NNEvalHyperParams(local_batch_size=None),
        [Ended()],
    )
    (weight,) = net.parameters()
    finish(weight.detach())

"""Bilevel problems to measure on: some with known answers, some of the kind the field compares on."""

from fedbilevel.tasks.classification import data_cleaning, hyper_representation, loss_tuning
from fedbilevel.tasks.images import Images, digits, read_mnist
from fedbilevel.tasks.networks import Convolutional, source_weighting
from fedbilevel.tasks.penalties import Ridge, penalty_tuning, random_penalties
from fedbilevel.tasks.quadratic import InnerSample, OuterSample, QuadraticClients, known_quadratic, random_quadratic
from fedbilevel.tasks.task import ClientRows, Task

__all__ = [
    "ClientRows", "Convolutional", "Images", "InnerSample", "OuterSample", "QuadraticClients", "Ridge", "Task",
    "data_cleaning", "digits", "hyper_representation", "known_quadratic", "loss_tuning", "penalty_tuning", "random_penalties",
    "random_quadratic", "read_mnist", "source_weighting",
]  # fmt: skip

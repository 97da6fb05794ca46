"""pfl: its FederatedAveraging on its simulated backend, the samples on the device from the start."""

import os
from types import MethodType

import torch
from peers.child import Serve, Spec
from pfl.aggregate.simulate import SimulatedBackend
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.data.dataset import Dataset
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.sampling import get_user_sampler
from pfl.hyperparam import NNTrainHyperParams
from pfl.model.pytorch import PyTorchModel
from torch.nn.functional import cross_entropy


def enter(spec: Spec, serve: Serve) -> None:
    os.environ["PFL_PYTORCH_DEVICE"] = spec.device
    shape = spec.shape
    x, y = (part.to(spec.device) for part in shape.data(spec.seed))
    module = shape.model().to(spec.device).train()
    module.loss = MethodType(lambda self, a, b: cross_entropy(self(a), b), module)
    module.metrics = MethodType(lambda self, a, b: {}, module)
    model = PyTorchModel(module, torch.optim.SGD, torch.optim.SGD(module.parameters(), lr=1.0))
    users = get_user_sampler("minimize_reuse", list(range(shape.clients)))
    data = FederatedDataset(lambda i: Dataset((x[i], y[i]), user_id=i), users)
    backend, algorithm = SimulatedBackend(data, data), FederatedAveraging()
    training = NNTrainHyperParams(
        local_num_epochs=shape.epochs, local_learning_rate=shape.lr, local_batch_size=shape.batch
    )
    algorithm._current_central_iteration = done = 1  # it evaluates in round 0, and here in no other

    def rounds(n: int) -> None:
        nonlocal done
        done += n
        often = NNAlgorithmParams(
            central_num_iterations=done, evaluation_frequency=10**9, train_cohort_size=shape.cohort, val_cohort_size=0
        )
        algorithm.run(often, backend, model, training, send_metrics_to_platform=False)

    serve(rounds, lambda: dict(module.named_parameters()))

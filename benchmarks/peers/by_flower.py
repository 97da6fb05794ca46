"""Flower: its FedAvg strategy on its simulation with Ray, a client at a time on every core. CPU only.

The simulation is started once and waits between the rounds that are asked for, so starting it is not counted.
"""

import logging
import os
from functools import cache

os.environ["FLWR_TELEMETRY_ENABLED"] = "0"

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from peers.child import Serve, Spec
from peers.shapes import Shape
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

logging.getLogger("flwr").setLevel(logging.ERROR)


@cache
def held(shape: Shape, seed: int) -> tuple[Tensor, Tensor, nn.Module]:
    """What a worker process keeps: the samples and a model."""
    return *shape.data(seed), shape.model().train()


def enter(spec: Spec, serve: Serve) -> None:
    shape, seed = spec.shape, spec.seed
    client, server = ClientApp(), ServerApp()

    @client.train()
    def train(message: Message, context: Context) -> Message:
        x, y, model = held(shape, seed)
        i = int(context.node_config["partition-id"])
        model.load_state_dict(message.content["arrays"].to_torch_state_dict())
        optimiser = torch.optim.SGD(model.parameters(), lr=shape.lr, foreach=True)
        for _ in range(shape.epochs):
            for some in torch.randperm(shape.samples).split(shape.batch):
                optimiser.zero_grad()
                cross_entropy(model(x[i][some]), y[i][some]).backward()
                optimiser.step()
        content = {"arrays": ArrayRecord(model.state_dict()), "metrics": MetricRecord({"num-examples": shape.samples})}
        return Message(content=RecordDict(content), reply_to=message)

    @server.main()
    def main(grid: Grid, context: Context) -> None:
        strategy = FedAvg(
            fraction_train=shape.cohort / shape.clients,
            fraction_evaluate=0.0,
            min_train_nodes=shape.cohort,
            min_available_nodes=shape.clients,
        )
        arrays = ArrayRecord(shape.model().state_dict())

        def rounds(n: int) -> None:
            nonlocal arrays
            result = strategy.start(grid, arrays, num_rounds=n)
            if len(result.train_metrics_clientapp) != n:
                raise RuntimeError("Flower's clients failed")
            arrays = result.arrays

        serve(rounds, lambda: arrays.to_torch_state_dict())

    resources = {"client_resources": {"num_cpus": 1}, "init_args": {"num_cpus": spec.threads}}
    run_simulation(server, client, shape.clients, backend_config=resources)

"""What one upload tells of the picture behind it: gradient inversion on the embedded digits.

Each client holds one picture (or one batch) and takes one SGD step on it. An honest but curious server knows the model
it sent, the labels, and what arrived. It looks for the picture whose gradient points the way the upload does, over what
was shared: 1 - cosine, minimised by L-BFGS from a few random starts, the best kept. Uploads are those that the library
makes, and what is read from them is what its server decodes.

    python benchmarks/leak.py [--pictures 6] [--starts 3] [--draw docs/pictures/leak.png]
"""

import argparse
import math
from collections import Counter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import sparing
from sparing.core.compose import uplink
from sparing.core.round import client, first_client, first_server, outgoing
from sparing.core.tree import expand_rows
from sparing.engines.engine import cohort_context
from sparing.models import build_network
from sparing.runs.privacy.accountant import epsilon_of_cohorts
from sparing.runs.start import settle_study
from sparing.runs.study import study_from
from sparing.tasks.build import build_task

CLIP, DELTA = 0.5, 1e-5
BEST = 60.0  # dB: beyond it a picture is the same to the eye and to most numbers
FOUND = 1e-13  # a mismatch so small that no other start can do better


class Case(NamedTuple):
    method: list[Any]
    batch: int = 1
    keyed: bool = True  # the server has the key of a rotation
    noise: float = 0.0  # of local differential privacy


def local(noise: float) -> Case:
    return Case([{"dp": {"mode": "local", "noise": noise, "clip": CLIP}}], noise=noise)


def cases(pictures: int) -> dict[str, Case]:
    return {
        "the whole update": Case(["fedavg"]),
        f"the whole update, of {pictures} pictures at once": Case(["fedavg"], batch=pictures),
        "psfed 0.5": Case([{"psfed": {"fraction": 0.5}}]),
        "psfed 0.1": Case([{"psfed": {"fraction": 0.1}}]),
        "psfed 0.01": Case([{"psfed": {"fraction": 0.01}}]),
        "last layer personal": Case([{"personal": {"layers": ["head"]}}]),
        "first layer personal": Case([{"personal": {"layers": ["dense1"]}}]),
        "all but the last personal": Case([{"personal": {"shared": ["head"]}}]),
        "obfuscate noise 0.1": Case([{"obfuscate": {"noise": 0.1}}]),
        "obfuscate noise 1": Case([{"obfuscate": {"noise": 1.0}}]),
        "obfuscate rotate, without the key": Case([{"obfuscate": {"rotate": True}}], keyed=False),
        "obfuscate rotate, with the key": Case([{"obfuscate": {"rotate": True}}]),
        "dp central, noise 1": Case([{"dp": {"noise": 1.0, "clip": CLIP}}]),
        "dp local, noise 0.001": local(0.001),
        "dp local, noise 0.01": local(0.01),
        "dp local, noise 0.1": local(0.1),
        "dp local, noise 1": local(1.0),
    }


class Seen(NamedTuple):
    """What the server has of one client: the network it sent, the values that came, and where there are some."""

    model: nn.Module
    values: dict[str, Tensor]
    scope: dict[str, Tensor]


def uploads(case: Case, x: Tensor, y: Tensor) -> list[Seen]:
    """Of one client for every batch, in its first round."""
    batches = list(zip(x.split(case.batch), y.split(case.batch), strict=True))
    task = sparing.Task(lambda: build_network({"mlp": {"hidden": [64, 64]}}, tuple(x.shape[1:]), 10), batches)
    local = {"steps": 1, "batch": case.batch, "lr": 0.1}
    job, _ = settle_study(study_from({"method": case.method, "local": local, "sample": 1.0}), task)
    server, n = first_server(job.method, job.initial, len(task)), len(task)
    ctx = cohort_context(job, server, torch.arange(n), 1)
    with torch.no_grad():
        state = expand_rows(first_client(job.method, job.initial), n)
        up, _ = client(job.method, state, outgoing(job.method, server, ctx), job.train, ctx)
    got = uplink(job.method).decode(up, ctx) if case.keyed else up
    everywhere = torch.ones(1, dtype=torch.bool)
    scopes = {name: everywhere if leaf.scope is None else leaf.scope[0] for name, leaf in got.leaves.items()}
    return [Seen(job.model, {name: leaf.value[k] for name, leaf in got.leaves.items()}, scopes) for k in range(n)]


def inverted(seen: Seen, y: Tensor, shape: torch.Size, starts: int) -> Tensor:
    """The batch of pictures whose gradient is most like what was seen."""
    model = seen.model.double()
    weights = {name: p for name, p in model.named_parameters() if name in seen.values}

    def shared(tensors: list[Tensor]) -> Tensor:
        return torch.cat([(x * seen.scope[name]).flatten() for name, x in zip(weights, tensors, strict=True)])

    wanted = shared([-seen.values[name].double() for name in weights])

    def mismatch(x: Tensor) -> Tensor:
        loss = nn.functional.cross_entropy(model(x), y)
        found = shared(list(torch.autograd.grad(loss, list(weights.values()), create_graph=True)))
        return 1 - (found * wanted).sum() / (found.norm() * wanted.norm() + 1e-30)

    best, least = torch.full(shape, 0.5, dtype=torch.float64), math.inf
    for start in range(starts):
        drawn = torch.rand(shape, generator=torch.Generator().manual_seed(start), dtype=torch.float64)
        reached, x = descended(mismatch, drawn)
        if reached < least:
            best, least = x, reached
        if least < FOUND:
            break
    return best.clamp(0, 1)


def descended(mismatch: Any, start: Tensor) -> tuple[float, Tensor]:
    x = start.clone().requires_grad_()
    search = torch.optim.LBFGS(
        [x], max_iter=500, tolerance_grad=1e-12, tolerance_change=1e-15, line_search_fn="strong_wolfe"
    )

    def closure() -> Tensor:
        search.zero_grad()
        loss = mismatch(x)
        loss.backward()
        return loss

    search.step(closure)
    return float(mismatch(x).detach()), x.detach()


def psnr(x: Tensor, found: Tensor) -> float:
    """Peak signal to noise ratio of one picture, in dB."""
    error = float((x.double() - found).square().mean())
    return min(BEST, -10 * math.log10(max(error, 1e-30)))


def in_order(x: Tensor, found: Tensor) -> Tensor:
    """For every picture of a batch the one found that is nearest to it: their order does not show in a gradient."""
    return torch.stack([max(found, key=lambda other: psnr(one, other)) for one in x])


def attacked(case: Case, x: Tensor, y: Tensor, starts: int) -> Tensor:
    parts = []
    for seen, xs, ys in zip(uploads(case, x, y), x.split(case.batch), y.split(case.batch), strict=True):
        parts.append(in_order(xs, inverted(seen, ys, xs.shape, starts)))
    return torch.cat(parts)


def draw(path: str, rows: dict[str, Tensor]) -> None:
    from matplotlib.figure import Figure

    across, down, label = len(next(iter(rows.values()))), len(rows), 2.7
    width = 0.42 * across + label
    figure = Figure(figsize=(width, 0.42 * down))
    axes = figure.subplots(down, across, squeeze=False)
    for line, (name, pictures) in zip(axes, rows.items(), strict=True):
        for spot, picture in zip(line, pictures, strict=True):
            spot.imshow(picture[0].numpy(), cmap="gray_r", vmin=0, vmax=1)
            spot.axis("off")
        line[0].text(-0.3, 0.5, name, transform=line[0].transAxes, ha="right", va="center", fontsize=8)
    figure.subplots_adjust(left=label / width, right=0.995, top=0.995, bottom=0.005, wspace=0.1, hspace=0.1)
    figure.savefig(path, dpi=110)


def line(name: str, x: Tensor, found: Tensor, noise: float = 0.0) -> str:
    marks = [psnr(one, other) for one, other in zip(x, found, strict=True)]
    spent = f"{epsilon_of_cohorts(noise, Counter({(1, 1): 1}), DELTA):.3g}" if noise else ""
    return f"| {name} | {sum(marks) / len(marks):.1f} | {min(marks):.1f} | {max(marks):.1f} | {spent} |"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--pictures", type=int, default=6)
    parser.add_argument("--starts", type=int, default=3)
    parser.add_argument("--draw")
    options = parser.parse_args()
    task = build_task("digits", clients=1, split="iid", model="mlp", test=0.0)
    x, y = task.train.x[: options.pictures], task.train.y[: options.pictures]
    rows = {"the pictures": x, "nothing: the mean of all digits": task.train.x.mean(dim=0).expand_as(x)}
    print("| what the server gets | PSNR, dB: mean | worst | best | epsilon of one upload |\n|---|---|---|---|---|")
    print(line("nothing: the mean of all digits", x, rows["nothing: the mean of all digits"]))
    for name, case in cases(options.pictures).items():
        rows[name] = attacked(case, x, y, options.starts)
        print(line(name, x, rows[name], case.noise), flush=True)
    if options.draw:
        draw(options.draw, rows)


if __name__ == "__main__":
    main()

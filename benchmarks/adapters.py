"""Adapters on a decoder of 1.1 billion parameters: sparing against a plain loop with peft, time and memory.

    python benchmarks/adapters.py [--only CASE ...] [--out FILE] [--seconds 500]
    python benchmarks/adapters.py --tiny          the same on a CPU, in a minute

20 clients, sequences of 256 tokens, adapters on q and v; client batches of (a) 1 and (b) 16; the base in bfloat16,
drawn at random, adapters in float32 on both sides, the same attention. A case is measured once and kept in FILE, so
that a call that was cut short goes on where it ended; no case is begun after so many seconds. What is said of each:

seconds     a round of all clients, after one to warm up. The plain loop trains one client after the other: layers of
            peft where it is installed, else the same by hand (`plain` says which), cross entropy in float32.
share       floating-point operations of the model a second, 4 P a token (2 P forward, 2 P back through a frozen base;
            P: weights of dense layers) and 8 T d a layer for attention, by those of a product of two matrices
            8192 x 8192 in bfloat16, measured in the same call. What is computed again counts for nothing.
beyond      torch.cuda.max_memory_allocated of the round and the memory of recorded graphs, less the base's bytes, less
            what autograd saves for as many samples as are in flight (`sample_activations`, logits included): adapters,
            optimiser, server, all else
server      a round less the training of its clients
up, down    bytes of a client and round
"""

import argparse
import copy
import gc
import json
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from decoder import Decoder, DecoderShape
from torch import Tensor, nn

import sparing
from sparing.engines.engine import Job
from sparing.train.activations import SampleActivations, sample_activations
from sparing.train.losses import cross_entropy

TARGETS = ["q_proj", "v_proj"]
TINY = DecoderShape(2, 64, 4, 2, 128, 512, 32)
ALPHA = 16.0
COUNTED = 2  # rounds, after one to warm up


class Case(NamedTuple):
    by: str  # plain, or a path of ours
    batch: int
    ranks: tuple[int, ...]
    recompute: bool = False

    @property
    def name(self) -> str:
        ranks = f"{self.ranks[0]}" if len(self.ranks) == 1 else f"{min(self.ranks)}-{max(self.ranks)}"
        return f"{self.by}, batch {self.batch}, rank {ranks}" + ", recomputed" * self.recompute


class Setting(NamedTuple):
    shape: DecoderShape
    clients: int
    steps: dict[int, int]  # batch -> steps of a client
    ranks: tuple[int, ...]
    device: torch.device
    beside: int  # clients of a rank whose steps are in flight together, on paths stacked and compiled


def main() -> None:
    args = options().parse_args()
    began, setting = time.perf_counter(), setting_of(args)
    held = json.loads(args.out.read_text()) if args.out.exists() else {}
    if "peak" not in held:
        held["peak"] = matrix_speed(setting.device, 512 if args.tiny else 8192)
        held["on"] = device_in_words(setting.device)
    for case in cases(setting):
        if (args.only and not any(word in case.name for word in args.only)) or case.name in held:
            continue
        if time.perf_counter() - began > args.seconds:
            print(f"left for another call: {case.name}", flush=True)
            continue
        held[case.name] = measured(case, setting, held["peak"])
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(held, indent=1) + "\n")
        print(f"{case.name}: {json.dumps(held[case.name])}", flush=True)
    say_ratios(held, setting)


def options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--only", nargs="*", default=[], help="cases whose names hold one of these")
    parser.add_argument("--out", type=Path, default=Path("runs/adapters.json"))
    parser.add_argument("--seconds", type=float, default=480.0)
    parser.add_argument("--kernel", choices=("written", "sdpa"), default="written")
    parser.add_argument(
        "--beside", type=int, default=1, help="clients of a rank in flight together, on paths stacked and compiled"
    )
    return parser


def setting_of(args: argparse.Namespace) -> Setting:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if args.tiny:
        return Setting(TINY._replace(kernel=args.kernel), 4, {1: 2, 4: 2}, (2, 4), device, args.beside)
    return Setting(DecoderShape(kernel=args.kernel), 20, {1: 8, 16: 4}, (4, 8, 16, 32, 64), device, args.beside)


def cases(setting: Setting) -> list[Case]:
    """Ours beside the plain loop, for equal and unequal ranks."""
    middle = setting.ranks[len(setting.ranks) // 2]
    ranks = [setting.ranks, (middle,)]
    ways = ["plain", "stacked", "loop-fast"]
    plain = [Case(by, batch, rank) for batch in setting.steps for rank in ranks for by in ways]
    plain += [Case("compiled", batch, (middle,)) for batch in setting.steps]
    return plain + [Case(by, max(setting.steps), setting.ranks, True) for by in ("plain", "loop-fast")]


def measured(case: Case, setting: Setting, peak: float) -> dict[str, Any]:
    """What a case came to, or why it did not."""
    gc.collect()
    if setting.device.type == "cuda":
        torch.cuda.empty_cache()
    try:
        found = (plain_loop if case.by == "plain" else ours)(case, setting)
    except Exception as error:
        return {"failed": f"{type(error).__name__}: {error}".splitlines()[0][:300]}
    tokens = setting.clients * setting.steps[case.batch] * case.batch * setting.shape.length
    found["tokens/s"] = round(tokens / found["seconds"])
    found["share"] = round(tokens * flops_of_token(setting.shape) / found["seconds"] / peak, 4)
    return found


def flops_of_token(shape: DecoderShape) -> float:
    width = shape.hidden // shape.heads
    layer = 2 * shape.hidden**2 + 2 * shape.hidden * shape.shared * width + 3 * shape.hidden * shape.inner
    weights = shape.layers * layer + shape.hidden * shape.vocabulary
    return 4.0 * weights + 2 * shape.layers * 4.0 * shape.length * shape.hidden


def matrix_speed(device: torch.device, side: int) -> float:
    """Floating-point operations a second of a product in bfloat16, the best of ten."""
    a = torch.randn(side, side, device=device, dtype=torch.bfloat16)
    best = float("inf")
    for _ in range(10):
        synchronize(device)
        begun = time.perf_counter()
        a @ a
        synchronize(device)
        best = min(best, time.perf_counter() - begun)
    return 2.0 * side**3 / best


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def device_in_words(device: torch.device) -> str:
    return torch.cuda.get_device_name() if device.type == "cuda" else f"{torch.get_num_threads()} threads of a CPU"


@cache
def drawn_base(shape: DecoderShape) -> Decoder:
    torch.manual_seed(0)
    return Decoder(shape, torch.bfloat16)


def base(setting: Setting) -> Decoder:
    return copy.deepcopy(drawn_base(setting.shape))


def sentences(case: Case, setting: Setting) -> list[tuple[Tensor, Tensor]]:
    """Random tokens, a client's in a row each."""
    g = torch.Generator().manual_seed(1)
    rows, shape = setting.steps[case.batch] * case.batch, setting.shape
    made = [torch.randint(shape.vocabulary, (rows, shape.length + 1), generator=g) for _ in range(setting.clients)]
    return [(one[:, :-1].contiguous(), one[:, 1:].contiguous()) for one in made]


def base_bytes(setting: Setting) -> int:
    with torch.device("meta"):
        return sum(2 * p.numel() for p in Decoder(setting.shape).parameters())


class Clock:
    """Seconds at the end of each round, and of the training in it."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.trained = device, 0.0
        self.rounds: list[tuple[float, float]] = []
        self.peaks: list[int] = []

    def tick(self, *_: Any) -> None:
        synchronize(self.device)
        self.rounds.append((time.perf_counter(), self.trained))
        self.trained = 0.0
        if self.device.type == "cuda":
            self.peaks.append(torch.cuda.max_memory_allocated() + graph_memory())
            torch.cuda.reset_peak_memory_stats()

    def timed(self, train: Callable[..., Any]) -> Callable[..., Any]:
        def run(*given: Any) -> Any:
            synchronize(self.device)
            begun = time.perf_counter()
            out = train(*given)
            synchronize(self.device)
            self.trained += time.perf_counter() - begun
            return out

        return run

    @property
    def seconds(self) -> float:
        return (self.rounds[COUNTED][0] - self.rounds[0][0]) / COUNTED

    @property
    def training(self) -> float:
        return sum(trained for _, trained in self.rounds[1 : COUNTED + 1]) / COUNTED


def ours(case: Case, setting: Setting) -> dict[str, Any]:
    """The last round, which is evaluated, does not count."""
    pairs, clock, train = sentences(case, setting), Clock(setting.device), Job.train
    task = sparing.Task(base(setting), pairs, (pairs[0][0][:1], pairs[0][1][:1]), metric="perplexity")
    each, rounds = {"ranks": list(case.ranks)} if len(case.ranks) > 1 else {"rank": case.ranks[0]}, COUNTED + 2
    inside = side_by_side(case, setting)
    Job.train = clock.timed(train)  # type: ignore[method-assign]
    try:
        result = sparing.run(
            task, [{"lora": {"targets": TARGETS, "alpha": ALPHA, **each}}], rounds=rounds, sample=setting.clients,
            local={"steps": setting.steps[case.batch], "batch": case.batch, "lr": 1e-3}, evaluate={"every": rounds},
            plan={"path": case.by, "chunk": inside, "threads": 1, **({"recompute": True} if case.recompute else {})},
            device=setting.device.type, loggers=[clock.tick], seed=1,
        )  # fmt: skip
    finally:
        Job.train = train
    found = {"seconds": round(clock.seconds, 4), "server": round(clock.seconds - clock.training, 4), "chunk": inside}
    found |= {
        "up": result.up_bytes // rounds // setting.clients,
        "down": result.down_bytes // rounds // setting.clients,
    }
    return found | memory_of(case, setting, clock, inside)


def side_by_side(case: Case, setting: Setting) -> int:
    """Clients whose steps are in flight together."""
    return min(setting.beside, setting.clients // len(case.ranks)) if case.by in ("stacked", "compiled") else 1


def activations(setting: Setting) -> SampleActivations:
    tokens = torch.zeros(1, setting.shape.length, dtype=torch.int64)
    model = base(setting).to(setting.device).requires_grad_(False)
    for layer in model.layers:
        layer.self_attn.q_proj.weight.requires_grad_(True)  # so that what adapters need is saved
    return sample_activations(model, cross_entropy, tokens, tokens, setting.device)


def memory_of(case: Case, setting: Setting, clock: Clock, inside: int) -> dict[str, Any]:
    """`inside`: clients whose steps are in flight."""
    held = inside * case.batch * activations(setting).held(case.recompute, False)
    found = {"base": base_bytes(setting), "activations": held}
    if clock.peaks:
        peak = max(clock.peaks[1 : COUNTED + 1])
        found |= {"peak": peak, "beyond": peak - found["base"] - held}
    return found


def graph_memory() -> int:
    """Bytes that recorded graphs hold for what comes and goes within them."""
    parts = torch.cuda.memory_snapshot()
    return sum(part["total_size"] - part["allocated_size"] for part in parts if part["segment_pool_id"] != (0, 0))


class PlainAdapter(nn.Module):
    """What peft's layer computes, where peft is not installed."""

    def __init__(self, layer: nn.Linear, rank: int):
        super().__init__()
        self.base, self.scale = layer, ALPHA / rank
        self.a = nn.Linear(layer.in_features, rank, bias=False, dtype=torch.float32)
        self.b = nn.Linear(rank, layer.out_features, bias=False, dtype=torch.float32)
        nn.init.zeros_(self.b.weight)

    def forward(self, x: Tensor) -> Tensor:
        out = self.base(x)
        return out + (self.b(self.a(x.float())) * self.scale).to(out.dtype)


def adapted(model: nn.Module, rank: int) -> tuple[nn.Module, str]:
    """A model with adapters, and who made them."""
    try:
        import peft
    except ImportError:
        model.requires_grad_(False)
        for path, layer in list(model.named_modules()):
            if path.rpartition(".")[2] in TARGETS and isinstance(layer, nn.Linear):
                owner, _, leaf = path.rpartition(".")
                setattr(model.get_submodule(owner), leaf, PlainAdapter(layer, rank))
        return model, "by hand"
    config = peft.LoraConfig(r=rank, lora_alpha=ALPHA, target_modules=TARGETS, lora_dropout=0.0)
    return peft.get_peft_model(model, config), f"peft {peft.__version__}"


def plain_loop(case: Case, setting: Setting) -> dict[str, Any]:
    """One client after the other, each from the global adapters of its rank; the mean of theirs is the next."""
    device, pairs, clock = setting.device, sentences(case, setting), Clock(setting.device)
    model, who = base(setting).to(device), ""
    wrapped: dict[int, nn.Module] = {}
    for rank in case.ranks:
        net = share_base(model)
        made, who = adapted(net, rank)
        wrapped[rank] = made.to(device).train()
    first = {rank: trained_state(net) for rank, net in wrapped.items()}
    one = clock.timed(lambda net, x, y: train_client(net, x.to(device), y.to(device), case))
    for _ in range(COUNTED + 1):
        sums: dict[int, list[dict[str, Tensor]]] = {rank: [] for rank in wrapped}
        for client, (x, y) in enumerate(pairs):
            rank = case.ranks[client % len(case.ranks)]
            load_state(wrapped[rank], first[rank])
            one(wrapped[rank], x, y)
            sums[rank].append(trained_state(wrapped[rank]))
        for rank, states in sums.items():
            first[rank] = {name: torch.stack([s[name] for s in states]).mean(0) for name in first[rank]}
        clock.tick()
    each = sum(4 * x.numel() for x in first[max(case.ranks)].values())
    found = {"seconds": round(clock.seconds, 4), "server": round(clock.seconds - clock.training, 4), "plain": who}
    return found | {"largest adapter": each} | memory_of(case, setting, clock, 1)


def share_base(model: Decoder) -> Decoder:
    """Another module around the same weights."""
    return copy.deepcopy(model, {id(x): x for x in (*model.parameters(), *model.buffers())})


def trained_state(net: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in net.named_parameters() if p.requires_grad}


def load_state(net: nn.Module, state: dict[str, Tensor]) -> None:
    with torch.no_grad():
        for name, p in net.named_parameters():
            if name in state:
                p.copy_(state[name])


def train_client(net: nn.Module, x: Tensor, y: Tensor, case: Case) -> None:
    params = [p for p in net.parameters() if p.requires_grad]
    optimiser = torch.optim.SGD(params, lr=1e-3)
    run = recomputed(net) if case.recompute else net
    for tokens, target in zip(x.split(case.batch), y.split(case.batch), strict=True):
        optimiser.zero_grad(set_to_none=True)
        logits = run(tokens)
        F.cross_entropy(logits.float().flatten(0, 1), target.flatten()).backward()
        optimiser.step()


def recomputed(net: nn.Module) -> nn.Module:
    """Blocks under torch's checkpoints, once."""
    from torch.utils.checkpoint import checkpoint

    for block in (one for one in net.modules() if type(one).__name__ == "DecoderBlock"):
        if "forward" not in vars(block):
            whole = block.forward
            block.forward = lambda *given, whole=whole: checkpoint(whole, *given, use_reentrant=False)  # type: ignore[method-assign]
    return net


def say_ratios(held: dict[str, Any], setting: Setting) -> None:
    print(f"\n{held['on']}: {held['peak'] / 1e12:.1f} TFLOP/s in one product")
    print(f"{'case':44} {'seconds':>9} {'times plain':>12} {'share':>7} {'beyond / base':>14}")
    for case in cases(setting):
        mine = held.get(case.name)
        if mine is None or "failed" in mine:
            print(f"{case.name:44} {'not measured' if mine is None else mine['failed']}")
            continue
        plain = held.get(case._replace(by="plain").name, {})
        times = f"{plain['seconds'] / mine['seconds']:.2f}" if "seconds" in plain else ""
        beyond = f"{mine['beyond'] / mine['base']:.3f}" if "beyond" in mine else ""
        print(f"{case.name:44} {mine['seconds']:9.3f} {times:>12} {mine['share']:7.1%} {beyond:>14}")


if __name__ == "__main__":
    main()

"""The methods of golden.py: every recipe, its options, and the combinations that the tests try."""

from typing import Any

RECIPES: tuple[Any, ...] = (
    "bf16", "broadcast", {"budget": "3kB"}, "dgc", "ditto", "dp", "drop", "ecsq", "eden", "ef21", "fedadagrad",
    "fedadam", "fedavg", "fedavgm", "fedbabu", "fedhm", "fedper", "fedprox", "fedrep", "fedscr", "fedsim", "fedyogi",
    "finetune", "fp16", "geomed", "heterofl", "int4", "int8", "krum", "lg-fedavg", "local", "lowrank", "median",
    "memory", {"norm-bound": {"bound": 0.5}}, {"obfuscate": {"noise": 0.1}}, "personal", "pfedsim", "powersgd",
    "prune", "psfed", "qsgd", "randk", "scaffold", "sign", "split-mix", "sr-fedavg", "stc", "stein", "ternary",
    "tight", "topk", "trimmed-mean",
)  # fmt: skip
"""Every recipe, with options where it needs some."""

PER_CLIENT = {"psfed": {"per_client": True, "fraction": 0.3}}
PUBLISHED = {"pfedsim": {"mode": "published", "warmup": 0.4}}
STEIN = {"stein": {"warmup": 1}}
HM = {"fedhm": {"ratios": [1, 0.5, 0.25]}}
PRODUCTS, PARTITIONED = ({"fedhm": {"blend": blend}} for blend in ("products", "partitioned"))
BOUND = {"norm-bound": {"bound": 0.5}}
QUARTERS = {"split-mix": {"ratio": 0.25}}
BY_SAMPLES = {"scaffold": {"weights": "samples"}}
LOCAL_DP = {"dp": {"mode": "local", "noise": 0.1}}

OPTIONS: tuple[Any, ...] = (
    [{"topk": {"over": "model", "memory": True}}],
    [{"topk": {"mode": "quantile"}}],
    [{"randk": {"unbiased": True}}],
    [{"int8": {"stochastic": True}}],
    [{"int4": {"stochastic": True}}],
    [{"qsgd": {"levels": 7, "bucket": 64}}],
    [{"eden": {"bits": 3}}],
    [{"eden": {"bits": 2, "unbiased": False}}],
    [{"ecsq": {"step": 0.3, "over": "layer", "memory": True}}],
    [{"lowrank": {"energy": 1.0, "rank": 8}}],
    [{"powersgd": {"rank": 1, "memory": False}}],
    [{"dgc": {"warmup": 2, "clip": 1.0}}],
    [{"drop": {"over": "model", "ratio": 0.05}}],
    [{"budget": {"bytes": 900, "by": "values"}}, "fedavgm"],
    ["personal", {"budget": {"bytes": "900B", "by": "components", "memory": False}}],
    [{"stc": {"ratio": 0.2, "down": False}}],
    [{"prune": {"keep": 0.3, "over": "model"}}],
    [{"stein": {"warmup": 1, "target": "zero"}}],
    [{"stein": {"warmup": 0, "target": "uniform", "population": "infinite"}}],
    [{"stein": {"warmup": 1, "estimator": "literal"}}],
    [{"stein": {"warmup": 1, "learn_beta": True, "only": 0.5}}],
    [{"sr-fedavg": {"warmup": 1, "topk": 0.2, "beta_role": "coefficient"}}],
    [{"fedsim": {"q": 2.0, "on": "updates"}}],
    [{"fedsim": {"softmax": 0.5, "at": "client"}}],
    [{"fedscr": {"adaptive": True}}],
    [{"fedscr": {"threshold_mode": "relative", "adaptive": True, "aggregation": "unbiased", "dense": True}}, "fp16"],
    [{"fedscr": {"threshold_mode": "budget"}}],
    [{"krum": {"m": "most"}}],
    [{"geomed": {"steps": 2}}],
    [{"dp": {"adaptive": True}}, "int8"],
    [LOCAL_DP],
    [{"dp": {"source": "seed", "noise": 0.5}}],
    [{"obfuscate": {"rotate": True, "source": "seed"}}],
    [PRODUCTS],
    [PARTITIONED],
    [{"fedhm": {"weighting": "factor", "keep": ["conv2"], "decay": 0.0, "step": None}}],
    [{"fedrep": {"head": 2, "body": 2}}],
    [{"fedbabu": {"tune": "head"}}],
    [{"ditto": {"lam": 0.5, "lr": 0.05}}],
    [{"finetune": {"epochs": 2}}],
    [{"broadcast": {"by": "lowrank", "seeded": True}}],
    [{"broadcast": {"by": "fp16", "memory": False}}],
    [{"broadcast": {"by": [{"topk": {"ratio": 0.02}}, "int8", "tight"]}}],
    [{"broadcast": {"by": [{"budget": "2kB"}]}}],
    *(
        [{"psfed": options}]
        for options in (
            {"per_client": True, "fraction": 0.3},
            {"selector": "magnitude"},
            {"selector": "gradient", "explore": 0.3},
            {"selector": "layers", "sync": 2},
            {"selector": "fixed", "first": "seed"},
            {"selector": {"union": ["random", "magnitude"]}, "first": "seed"},
            {"selector": {"intersection": ["random", "magnitude"]}},
            {"start": 1.0, "fraction": 0.25, "warmup": 3, "schedule": "cosine"},
            {"fraction": 0.0},
        )
    ),
)  # fmt: skip

COMBINATIONS: tuple[Any, ...] = (
    ["psfed", "pfedsim", "int8"],
    ["psfed", "pfedsim", "fedscr", "int8", STEIN],
    [{"psfed": {"selector": "magnitude"}}, "topk", "fp16", "memory"],
    [{"psfed": {"selector": "gradient", "per_client": False}}, "personal", "int8"],
    [PER_CLIENT, "fedsim", "fedavgm"],
    [{"psfed": {"fraction": 0.3}}, "fedsim", STEIN],
    [{"psfed": {"selector": "layers", "sync": 2}}, "fedscr", "bf16"],
    [HM, "topk", STEIN],
    ["personal", HM, "int8", "fedavgm"],
    [PUBLISHED, "topk", "int8"],
    [PUBLISHED, {"fedscr": {"adaptive": True}}, STEIN],
    [{"pfedsim": {"at": "client"}}, "randk", "int8"],
    ["pfedsim", {"fedscr": {"adaptive": True, "threshold_mode": "relative"}}, "int8", STEIN],
    ["fedsim", {"topk": {"over": "model", "memory": True}}, "fedavgm"],
    [{"sr-fedavg": {"topk": 0.2, "warmup": 1}}, "psfed", "memory"],
    ["local", "topk", "int8"],
    ["fedsim", {"lowrank": {"energy": 0.8}}, "fedavgm"],
    ["psfed", "pfedsim", "topk", {"ecsq": {"step": 0.5}}, "memory"],
    ["split-mix", "topk", "int8"],
    ["personal", QUARTERS, "randk", "fedavgm"],
    "topk+memory",
    "randk+memory",
    "psfed+int8",
    "topk+int8+memory",
    "int8+topk",
    ["personal", {"psfed": {"per_client": True}}, {"topk": {"ratio": 0.2}}, "int8", "memory", "fedavgm"],
    ["psfed", {"randk": {"ratio": 0.5}}, "fp16"],
    ["lowrank", {"broadcast": {"by": "lowrank"}}],
    ["broadcast", "personal", "scaffold"],
    [{"fedscr": {"adaptive": True}}, "median", "broadcast"],
    ["psfed", "broadcast"],
    ["heterofl", "broadcast"],
    ["pfedsim", {"broadcast": {"by": "randk"}}],
    # tests/recipes: compressors
    "psfed+qsgd",
    [PER_CLIENT, "eden"],
    [{"psfed": {"selector": "magnitude"}}, "stc"],
    ["psfed", {"dgc": {"warmup": 2, "clip": 1.0}}, "fp16"],
    "personal+powersgd",
    "topk+sign+memory",
    "personal+sign+ef21+fedavgm",
    "prune+eden+memory",
    ["prune", {"eden": {"unbiased": False}}, "memory"],
    "personal+prune+topk+int4+memory",
    "fedscr+int4+stein",
    "topk+ecsq+memory",
    "personal+lowrank+fedavgm",
    [PER_CLIENT, {"ecsq": {"over": "layer", "memory": True}}],
    [{"lowrank": {"memory": False}}, "ef21"],
    "topk+int8+tight",
    "psfed+topk+int4+tight+memory",
    "qsgd+tight",
    "randk+sign+tight",
    # privacy
    ["personal", "psfed", "dp", "topk", "int8", "memory", "fedavgm"],
    [{"psfed": {"per_client": True}}, {"dp": {"mode": "local"}}, "topk", "qsgd"],
    ["dp", "eden"],
    ["fedscr", "dp", "int4"],
    [{"dp": {"mode": "local", "noise": 0.01}}, "median"],
    [{"psfed": {"per_client": True}}, {"obfuscate": {"rotate": True}}, "topk", "int8", "memory"],
    ["personal", "dp", {"obfuscate": {"noise": 0.1, "rotate": True}}, "sign"],
    # sizes
    "fedhm+int8",
    [PARTITIONED, "int8"],
    "personal+fedhm+topk",
    ["personal", {"fedhm": {"weighting": "samples", "ratios": [0.5, 0.25]}}, {"randk": {"ratio": 0.5}}, "fedavgm"],
    [{"fedhm": {"weighting": "samples"}}, "fedsim", "topk", "int8", "stein"],
    "heterofl+int8",
    "personal+heterofl+topk",
    [{"heterofl": {"ratios": [0.3, 1], "scaler": False}}, {"personal": {"layers": ["conv1", "head"]}}, "fedavgm"],
    ["heterofl", "fedsim", {"randk": {"ratio": 0.5}}, "fedadam"],
    "heterofl+median",
    "heterofl+local",
    "ditto+heterofl",
    [QUARTERS, {"personal": {"layers": ["conv1", "head"]}}, "fedavgm"],
    [QUARTERS, "fedsim", "fedadam"],
    [QUARTERS, "median"],
    ["ditto", QUARTERS],
    ["fedrep", QUARTERS, "int8"],
    # optimisers, FedSCR
    "psfed+topk+memory+fedyogi",
    "personal+fedprox+int8+fedadam",
    [{"fedscr": {"dense": True}}, "fedadagrad"],
    "psfed+fedscr+int8",
    [{"psfed": {"per_client": True}}, {"fedscr": {"threshold_mode": "budget", "dense": True}}, "topk", "fedavgm"],
    # personal models
    "psfed+fedrep+int8",
    "fedbabu+topk+memory+fedadam",
    "psfed+ditto+topk+int8+memory",
    "prune+ditto",
    "ditto+prune",
    "fedper+ditto",
    "lg-fedavg+fedprox+finetune",
    [{"pfedsim": {"at": "client"}}, "topk"],
    [{"pfedsim": {"on": "updates"}}],
    [PUBLISHED],
    [PUBLISHED, "topk+int8+memory"],
    # control variates
    [BY_SAMPLES],
    "personal+scaffold+int8",
    "psfed+scaffold",
    [BY_SAMPLES, "psfed+topk+memory+fedavgm"],
    "fedrep+scaffold+fedadam",
    "ditto+scaffold",
    "scaffold+ditto",
    "scaffold+local",
)  # fmt: skip

ROBUST: tuple[Any, ...] = (
    [PER_CLIENT, "median", "int8"],
    ["personal", PER_CLIENT, {"krum": {"m": "most"}}, "fedavgm"],
    ["personal", "geomed", "topk", "memory"],
    ["trimmed-mean", "sign", "memory"],
    ["psfed", BOUND, "stein"],
    [BOUND, "median", {"fedscr": {"adaptive": True, "threshold": 0.3, "dense": True}}],
    [{"fedhm": {"full": 0}}, "geomed", "int8"],
    ["pfedsim", "median"],
    ["local", "krum"],
    ["local", BOUND],
    ["krum"],
)
PLAIN: tuple[Any, ...] = (
    "fedavg", "psfed", "personal", [PER_CLIENT, "randk"], "psfed+topk+int8+memory", "int8", "fedavgm", "stein",
    "scaffold", "fedprox", "ditto", "fedhm", "heterofl", "split-mix", "lowrank", "median", "pfedsim", "dp",
)  # fmt: skip
"""Methods that are also trained by the other paths."""


def title(method: Any) -> str:
    """
    >>> title(["psfed", {"topk": {"ratio": 0.2}}])
    'psfed+topk(ratio=0.2)'
    """
    if isinstance(method, str):
        return method
    if isinstance(method, dict):
        ((name, options),) = method.items()
        said = ",".join(f"{key}={value}" for key, value in options.items()) if isinstance(options, dict) else options
        return f"{name}({said})"
    return "+".join(title(part) for part in method)

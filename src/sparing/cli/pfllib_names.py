"""PFLlib's names: what its models and methods are called here, what comes nearest to those that are not here, and the
flags of its main.py that mean nothing here."""

from typing import Any

DATA_NAMES = {"fashionmnist": "fashion-mnist", "fmnist": "fashion-mnist"}
_FEATURE_DIM = 512


def model_of_name(name: str, feature_dim: int | None) -> Any:
    """A network of ours as a study names it; a name that is none of PFLlib's stays as it is."""
    width = feature_dim or _FEATURE_DIM
    models: dict[str, Any] = {
        "cnn": {"fedavg-cnn": {"padding": 0}},
        "dnn": {"mlp": {"hidden": [100]}},
        "mlr": {"mlp": {"hidden": []}},
        "amazonmlp": {"mlp": {"hidden": [1000, 500, 100]}},
        "resnet": "resnet18",
        "harcnn": "har-cnn",
        "lstm": {"lstm": {"embedding": width, "hidden": width, "layers": 1, "last": True}},
        "transformer": {"transformer": {"width": width, "layers": 2, "heads": 8, "last": True}},
    }
    return models.get(name.lower(), name.lower())


NEAREST_MODELS = {
    "resnet10": "resnet18",
    "alexnet": "vgg11",
    "googlenet": "resnet18",
    "mobilenet": "resnet18",
    "bilstm": "lstm",
    "fasttext": "lstm",
    "textcnn": "transformer",
}

_CORRECTS = "which also keeps local training from drifting away from the global model"
_SECOND = "where each client also trains a second model that is drawn to the global one"
_HEADS = "which also shares the features and keeps the heads at home"
_FEATURES = "where clients also keep features of their own"
_SIMILAR = "which also gives every client a mixture of the models of clients like it"
NEAREST_METHODS = {
    "pfedme": ("ditto", _SECOND),
    "peravg": ("finetune", "whose global model is also adapted by a few local steps"),
    "fedfomo": ("pfedsim", _SIMILAR),
    "fedamp": ("pfedsim", _SIMILAR),
    "apple": ("pfedsim", _SIMILAR),
    "fedmtl": ("ditto", _SECOND),
    "apfl": ("ditto", _SECOND),
    "fedphp": ("ditto", _SECOND),
    "fml": ("ditto", _SECOND),
    "fedala": ("ditto", _SECOND),
    "fedbn": ("personal", "which keeps norm layers at home too, named by personalization.personalized_layers"),
    "fedrod": ("fedrep", _HEADS),
    "fedpac": ("fedrep", _HEADS),
    "fedcp": ("fedrep", _HEADS),
    "gpfl": ("fedrep", _HEADS),
    "fedas": ("fedrep", _HEADS),
    "feddbe": ("fedper", _HEADS),
    "pfl-da": ("fedper", _HEADS),
    "fedcac": ("psfed", "which also shares a part of the parameters and keeps the rest"),
    "feddyn": ("scaffold", _CORRECTS),
    "moon": ("fedprox", _CORRECTS),
    "fedntd": ("fedprox", _CORRECTS),
    "fedgen": ("fedprox", _CORRECTS),
    "fedproto": ("lg-fedavg", _FEATURES),
    "fedpcl": ("lg-fedavg", _FEATURES),
    "fedgh": ("lg-fedavg", _FEATURES),
    "fd": ("lg-fedavg", _FEATURES),
    "fedkd": ("lowrank", "which also sends updates as their strongest components"),
    "fedgc": ("fedavg", "without its loss for faces"),
    "fedlc": ("fedavg", "without its loss for unequal classes"),
    "fedcross": ("fedavg", "without its several global models that cross over"),
}
"""What comes nearest to PFLlib's other methods, and what they have in common."""

_ANOTHER = "it belongs to a method that sparing does not have"
_LAST_ROUND = "every run goes to its last round"
_NO_GRADIENTS = "sparing does not reconstruct samples from gradients"
_SPEEDS = "how fast clients are is said by fleet.links, see docs/fleet.md"
WITHOUT_MEANING = {
    "-ncl --num_classes -nb": "the data says how many classes there are",
    "-ab --auto_break": _LAST_ROUND,
    "-tc --top_cnt": _LAST_ROUND,
    "-rjr --random_join_ratio": "-jr is the share of clients in every round",
    "-pv --prev": "the same command again goes on where it was stopped",
    "-eg --eval_gap": "the files have a number for every round",
    "-sfn --save_folder_name": "runs are in runs/ and result files in results/",
    "-dlg --dlg_eval": _NO_GRADIENTS,
    "-dlgg --dlg_gap": _NO_GRADIENTS,
    "-bnpc --batch_num_per_client": _NO_GRADIENTS,
    "-ften --fine_tuning_epoch_new": "new clients train for evaluate.steps steps",
    "-vs --vocab_size": "the data says which words there are",
    "-ml --max_len": "the data says how long its texts are",
    "-fs --few_shot": "clients have all their samples",
    "-tsr --train_slow_rate": _SPEEDS,
    "-ssr --send_slow_rate": _SPEEDS,
    "-ts --time_select": _SPEEDS,
    "-tth --time_threthold": "fleet.deadline is the time after which a round takes no more uploads",
    "-slr --server_learning_rate": "the server takes the mean of the updates as it is",
    **dict.fromkeys(
        (
            "-bt --beta", "-lam --lamda", "-K --K", "-lrp --p_learning_rate", "-M --M", "-itk --itk", "-alk --alphaK",
            "-sg --sigma", "-al --alpha", "-tau --tau", "-dlr --dr_learning_rate", "-L --L", "-nd --noise_dim",
            "-glr --generator_learning_rate", "-hd --hidden_dim", "-se --server_epochs",
            "-lf --localize_feature_extractor", "-et --eta", "-s --rand_percent", "-p --layer_idx",
            "-mlr --mentee_learning_rate", "-Ts --T_start", "-Te --T_end", "-mo --momentum", "-klw --kl_weight",
            "-fsb --first_stage_bound", "-ca --fedcross_alpha", "-cmss --collaberative_model_select_strategy",
        ),
        _ANOTHER,
    ),
}  # fmt: skip
"""Flags of PFLlib's main.py that are taken and left aside, each with a line that says why."""

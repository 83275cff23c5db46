"""Every option: name, default, unit and meaning. The other configs change values, not names.

The defaults are those of the RetMask paper (arXiv 2601.11020) where it gives them: the grid of
trials, sampling, and the whole section `train`.
"""

from typing import Any, NamedTuple

from ml_collections import ConfigDict, config_dict


class Option(NamedTuple):
    """One option.

    Attributes:
        default: its value; a type where it is not set and may be set to that type.
        help: unit and meaning, for `--help`.
        low, high: smallest and largest value allowed (of each item, in a tuple).
        choices: the only values allowed, if there are any.
    """

    default: Any
    help: str
    low: float | None = None
    high: float | None = None
    choices: tuple[str, ...] = ()


DTYPES = ("float32", "bfloat16")

OPTIONS: dict[str, Option] = {
    "seed": Option(0, "seed of every random choice", 0, 2**32 - 1),
    "model.path": Option(
        "",
        "weights: HF folder, .safetensors, .gguf, or package:NAME (the GGUF file inside an "
        "installed package)",
    ),
    "model.dtype": Option("bfloat16", "dtype of the computations of every stage", choices=DTYPES),
    "chat.date": Option("26 Jul 2024", "date that chat templates print which print one"),
    "chat.thinking_detect": Option(False, "think before answering in detect (models that can)"),
    "chat.thinking_generate": Option(True, "the same in generate"),
    "chat.thinking_evaluate": Option(True, "the same in evaluate"),
    "mesh.data": Option(1, "devices that hold copies of the weights; -1: all that are left", -1),
    "mesh.fsdp": Option(-1, "devices that weights and batch are split over; -1: as above", -1),
    "mesh.sequence": Option(1, "devices that a sequence is split over; -1: as above", -1),
    "mesh.tensor": Option(1, "devices that heads and MLP width are split over; -1: as above", -1),
    "haystack.path": Option(
        "", "folder of .txt files, read in sorted order; empty: the built-in text"
    ),
    "haystack.needles": Option(
        "", "JSONL of needle, question, answer; empty: the built-in needles"
    ),
    "detect.min_length": Option(1024, "tokens: shortest prompt", 1),
    "detect.max_length": Option(50_000, "tokens: longest prompt", 1),
    "detect.lengths": Option(20, "number of lengths, evenly spaced between the two", 1),
    "detect.depths": Option(10, "number of needle depths, evenly spaced from 0 to 100%", 1),
    "detect.max_new_tokens": Option(50, "tokens: longest answer", 1),
    "detect.slots": Option(1, "rows decoded at once, by each process", 1),
    "detect.prefill_chunk": Option(2048, "tokens of a prompt read at once", 1),
    "detect.pass_recall": Option(
        0.5, "a trial counts if its answer's ROUGE-1 recall is above this", 0, 1
    ),
    "heads.rule": Option(
        "threshold",
        "heads to mask: score >= tau, the k best, any k, any k below tau, or heads.list",
        choices=("threshold", "top", "random", "nonretrieval", "list"),
    ),
    "heads.tau": Option(0.1, "score from which a head is a retrieval head", 0),
    "heads.k": Option(
        int, "number of heads for 'top'; for the random rules None means as many as reach tau", 1
    ),
    "heads.list": Option((), "heads for the rule 'list', e.g. \"('18-6', '3-0')\" (layer-head)"),
    "prompts.path": Option(
        "", 'JSONL of chat rows or {"prompt": text}; empty: the built-in prompts'
    ),
    "prompts.limit": Option(int, "use only this many prompts, from the first", 1),
    "generate.temperature": Option(0.6, "sampling temperature; 0: the most likely token", 0),
    "generate.top_p": Option(1.0, "probability mass that is sampled from", 0, 1),
    "generate.samples": Option(1, "responses of each kind to a prompt", 1),
    "generate.max_prompt_tokens": Option(2048, "tokens: longer prompts are skipped and counted", 1),
    "generate.max_new_tokens": Option(2048, "tokens: longest response", 1),
    "generate.slots": Option(64, "rows decoded at once, by each process", 1),
    "generate.prompts_per_part": Option(256, "prompts in one output file", 1),
    "preferences.path": Option(
        "",
        "JSONL of conversations `chosen` and `rejected` to train on; empty: the responses that "
        "generate made",
    ),
    "preferences.max_tokens": Option(4096, "tokens: longest prompt with response", 2),
    "train.beta": Option(0.1, "weight of the distance to the reference in the DPO loss", 0),
    "train.epochs": Option(2, "times that every pair is seen", 1),
    "train.pairs_per_step": Option(512, "pairs in one optimiser step", 1),
    "train.micro_pairs": Option(32, "pairs computed at once; a divisor of train.pairs_per_step", 1),
    "train.learning_rate": Option(5e-7, "peak learning rate", 0),
    "train.final_learning_rate_ratio": Option(0.1, "last learning rate over the peak", 0, 1),
    "train.warmup_ratio": Option(0.1, "share of the steps that warm up", 0, 1),
    "train.weight_decay": Option(0.1, "decay of matrices (norms have none)", 0),
    "train.clip_norm": Option(1.0, "largest gradient norm", 0),
    "train.b1": Option(0.9, "AdamW's first decay", 0, 1),
    "train.b2": Option(0.95, "AdamW's second decay", 0, 1),
    "train.eps": Option(1e-8, "AdamW's epsilon", 0),
    "train.buckets": Option(
        (256, 512, 1024, 2048, 4096), "tokens: row lengths that pairs are padded to, ascending", 2
    ),
    "train.head_chunk": Option(1024, "positions whose logits exist at one time", 1),
    "train.remat": Option(True, "recompute activations in the backward pass, to save memory"),
    "train.checkpoint_every": Option(50, "steps between two checkpoints", 1),
    "train.keep_checkpoints": Option(2, "checkpoints kept, the newest", 1),
    "train.max_bad_steps": Option(
        5, "skipped steps in a row (gradient not finite) after which training stops", 1
    ),
    "export.dtype": Option(
        str,
        "dtype of the exported weights; None: the source's",
        choices=DTYPES,
    ),
    "export.max_shard_bytes": Option(5_000_000_000, "bytes: largest weights file", 1),
    "evaluate.min_length": Option(1024, "tokens: shortest prompt", 1),
    "evaluate.max_length": Option(50_000, "tokens: longest prompt", 1),
    "evaluate.lengths": Option(10, "number of lengths, evenly spaced between the two", 1),
    "evaluate.depths": Option(10, "number of needle depths, evenly spaced from 0 to 100%", 1),
    "evaluate.max_new_tokens": Option(50, "tokens: longest answer", 1),
    "evaluate.slots": Option(4, "rows decoded at once, by each process", 1),
    "evaluate.random_seeds": Option(1, "random masks to compare with", 0),
}


def get_config(arg: str = "") -> ConfigDict:
    """Returns all options at their defaults. `arg` must be empty."""
    if arg:
        raise ValueError(f"this config takes no argument, not {arg!r}")
    config = ConfigDict()
    for name, option in OPTIONS.items():
        *sections, field = name.split(".")
        node = config
        for section in sections:
            if section not in node:
                node[section] = ConfigDict()
            node = node[section]
        default = option.default
        is_type = isinstance(default, type)
        node[field] = config_dict.placeholder(default) if is_type else default
    return config.lock()


def thinking() -> ConfigDict:
    """Returns the defaults with room for reasoning before each answer.

    As in the paper heads are detected without reasoning, where the model leaves a choice.
    """
    config = get_config()
    config.chat.thinking_detect = False
    config.chat.thinking_generate = config.chat.thinking_evaluate = True
    config.generate.max_new_tokens = 4096
    config.preferences.max_tokens = 6144
    config.train.buckets = (512, 1024, 2048, 4096, 6144)
    config.evaluate.max_new_tokens = 2048
    return config

"""The real vocabularies of Llama 3 and Qwen, with the compact templates of `chat_families`.

They lie in two packages on PyPI, llama-models and dashscope, of which nothing is imported:
`pip install --no-deps llama-models dashscope` is enough.
"""

import base64
import functools
import importlib.util
from pathlib import Path

import chat_families
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import TikTokenConverter

# Both cut text at the same places, but for numbers: up to three digits together, or one by one.
PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{DIGITS}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA_PATTERN = PATTERN.replace("{DIGITS}", "{1,3}")
QWEN_PATTERN = PATTERN.replace("{DIGITS}", "")

# In the order of their ids, which follow those of the vocabulary.
LLAMA_SPECIAL = (
    "<|begin_of_text|>",
    "<|end_of_text|>",
    "<|reserved_special_token_0|>",
    "<|reserved_special_token_1|>",
    "<|finetune_right_pad_id|>",
    "<|reserved_special_token_2|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eom_id|>",
    "<|eot_id|>",
    "<|python_tag|>",
    *(f"<|reserved_special_token_{i}|>" for i in range(3, 248)),
)
QWEN_SPECIAL = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|object_ref_start|>",
    "<|object_ref_end|>",
    "<|box_start|>",
    "<|box_end|>",
    "<|quad_start|>",
    "<|quad_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
# Added tokens that are not flagged special.
QWEN_PLAIN = (
    "<tool_call>",
    "</tool_call>",
    "<|fim_prefix|>",
    "<|fim_middle|>",
    "<|fim_suffix|>",
    "<|fim_pad|>",
    "<|repo_name|>",
    "<|file_sep|>",
    "<tool_response>",
    "</tool_response>",
    "<think>",
    "</think>",
)


def ranks(package: str, file: str) -> dict[bytes, int]:
    """The vocabulary in a file of an installed package: bytes of a token -> its id and rank."""
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        name = package.replace("_", "-")
        raise ModuleNotFoundError(f"needs {name}: pip install --no-deps {name}")
    lines = (Path(spec.submodule_search_locations[0]) / file).read_bytes().splitlines()
    return {base64.b64decode(token): int(rank) for token, rank in map(bytes.split, lines)}


def llama_ranks() -> dict[bytes, int]:
    return ranks("llama_models", "llama3/tokenizer.model")


def qwen_ranks() -> dict[bytes, int]:
    return ranks("dashscope", "resources/qwen.tiktoken")


def llama() -> PreTrainedTokenizerFast:
    """Llama 3.1's tokenizer."""
    tokenizer = _byte_level(llama_ranks(), LLAMA_PATTERN, LLAMA_SPECIAL)
    bos, eos = "<|begin_of_text|>", "<|eot_id|>"
    tokenizer.post_processor = TemplateProcessing(
        single=f"{bos} $A", special_tokens=[(bos, tokenizer.token_to_id(bos))]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=bos, eos_token=eos, chat_template=chat_families.LLAMA
    )


def qwen3(template: str = chat_families.QWEN3) -> PreTrainedTokenizerFast:
    """Qwen3's tokenizer."""
    return PreTrainedTokenizerFast(
        tokenizer_object=_qwen(), eos_token="<|im_end|>", chat_template=template
    )


@functools.cache
def _qwen() -> Tokenizer:
    tokenizer = _byte_level(qwen_ranks(), QWEN_PATTERN, QWEN_SPECIAL, QWEN_PLAIN)
    tokenizer.normalizer = normalizers.NFC()
    return tokenizer


def _byte_level(
    ranks: dict[bytes, int], pattern: str, special: tuple[str, ...], plain: tuple[str, ...] = ()
) -> Tokenizer:
    class Converter(TikTokenConverter):
        def load_tiktoken_bpe(self, _: str) -> dict[bytes, int]:
            return ranks

    vocabulary, merges = Converter("").extract_vocab_merges_from_model("")
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name, normalized=False) for name in special])
    tokenizer.add_tokens([AddedToken(name, normalized=False) for name in plain])
    return tokenizer

"""Small tokenizers with the templates' semantics of each family, in a few lines each.

Each vocabulary is the 256 bytes, a few merges and the family's control tokens. As in some real
tokenizers the control tokens are words of the model's vocabulary too.
"""

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

DATE = "26 Jul 2024"

LLAMA = """{{ bos_token }}
{%- if messages[0].role == 'system' -%}
{%- set system = messages[0].content | trim -%}{%- set messages = messages[1:] -%}
{%- else -%}{%- set system = '' -%}{%- endif -%}
{{- '<|start_header_id|>system<|end_header_id|>\n\n' -}}
{%- if date_string is not defined -%}{%- set date_string = strftime_now('%d %b %Y') -%}{%- endif -%}
{{- 'Today Date: ' + date_string + '\n\n' + system + '<|eot_id|>' -}}
{%- for m in messages -%}
{{- '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' + m.content | trim + '<|eot_id|>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' -}}
{%- endif -%}"""

QWEN3 = """
{%- set asked = namespace(last=0) -%}
{%- for m in messages -%}{%- if m.role == 'user' -%}{%- set asked.last = loop.index0 -%}
{%- endif -%}{%- endfor -%}
{%- for m in messages -%}
{{- '<|im_start|>' + m.role + '\n' -}}
{%- if m.role == 'assistant' -%}
{%- set content, thought = m.content, m.reasoning_content or '' -%}
{%- if not thought and '</think>' in content -%}
{%- set thought = content.split('</think>')[0].split('<think>')[-1].strip('\n') -%}
{%- set content = content.split('</think>')[-1].lstrip('\n') -%}
{%- endif -%}
{%- if loop.index0 > asked.last -%}{{- '<think>\n' + thought + '\n</think>\n\n' -}}{%- endif -%}
{{- content -}}
{%- else -%}{{- m.content -}}{%- endif -%}
{{- '<|im_end|>\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|im_start|>assistant\n' -}}
{%- if enable_thinking is false -%}{{- '<think>\n\n</think>\n\n' -}}{%- endif -%}
{%- endif -%}"""

OLMO3 = """
{%- if messages[0].role != 'system' -%}{{- '<|im_start|>system\nYou are Olmo.<|im_end|>\n' -}}
{%- endif -%}
{%- for m in messages -%}
{{- '<|im_start|>' + m.role + '\n' + m.content -}}
{%- if m.role == 'assistant' and loop.last -%}{{- eos_token -}}
{%- else -%}{{- '<|im_end|>\n' -}}{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n<think>' -}}{%- endif -%}"""

MERGES = [
    ("t", "h"),
    ("th", "e"),
    ("Ġ", "the"),
    ("i", "n"),
    ("a", "n"),
    ("th", "in"),
    ("thin", "k"),
    ("Ġ", "a"),
    ("e", "n"),
    ("en", "d"),
    ("i", "m"),
]


def tokenizer(
    template: str | None,
    special: tuple[str, ...],
    plain: tuple[str, ...] = (),
    *,
    bos: str | None = None,
    eos: str | None,
    adds_bos: bool = False,
    normalizer: normalizers.Normalizer | None = None,
    split: bool = True,
    merges: tuple[tuple[str, str], ...] = (),
) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer; `special` and `plain` are its added tokens, flagged or not."""
    merges = [*MERGES, *merges]
    words = sorted(pre_tokenizers.ByteLevel.alphabet())
    words += [word for word in map("".join, merges) if word not in (*special, *plain)]
    words += [*special, *plain]
    ids = {word: i for i, word in enumerate(words)}
    backend = Tokenizer(models.BPE(ids, merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split)
    backend.decoder = decoders.ByteLevel()
    if normalizer:
        backend.normalizer = normalizer
    if adds_bos:
        backend.post_processor = TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, ids[bos])]
        )
    backend.add_special_tokens([AddedToken(name, normalized=False) for name in special])
    backend.add_tokens([AddedToken(name, normalized=False) for name in plain])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token=bos, eos_token=eos, chat_template=template
    )


def llama() -> PreTrainedTokenizerFast:
    headers = ("<|start_header_id|>", "<|end_header_id|>")
    special = ("<|begin_of_text|>", "<|end_of_text|>", *headers, "<|eom_id|>", "<|eot_id|>")
    return tokenizer(LLAMA, special, bos=special[0], eos="<|eot_id|>", adds_bos=True)


def qwen3() -> PreTrainedTokenizerFast:
    special = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
    plain = ("<think>", "</think>", "<tool_call>")
    normalizer = normalizers.NFC()
    return tokenizer(QWEN3, special, plain, eos="<|im_end|>", normalizer=normalizer)


def olmo3() -> PreTrainedTokenizerFast:
    special = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
    return tokenizer(OLMO3, special, ("<functions>",), eos="<|endoftext|>")


FAMILIES = {"llama": llama, "qwen3": qwen3, "olmo3": olmo3}

"""Makes a small tokenizer for a template, which has the model's special tokens."""

from __future__ import annotations

import contextlib
import json
import re
from pathlib import Path
from typing import Any

from tests.chat_templates.conversations import ROWS

_BAR = "\uff5c"  # the full-width bar of DeepSeek's special tokens
# Tokens at which servers of the published models stop: generation_config.json of each, or its
# tokenizer's eos_token.
STOPS = (
    *("</s>", "<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|eot|>", "<|end|>", "<|return|>"),
    *("<|call|>", "<|calls|>", "<|endoftext|>", "<|end_of_text|>", "<|eos|>", "<eos>"),
    *("<end_of_turn>", "<turn|>", "<|tool_response>", "<start_function_response>"),
    *("<end_of_utterance>", "<|END_OF_TURN_TOKEN|>", f"<{_BAR}end▁of▁sentence{_BAR}>"),
    *("<end_of_sentence>", "<|end_of_msg|>", "<|message_sep|>", "<seed:eos>", "[e~["),
    *("<SPECIAL_12>", "<|role_end|>", "</assistant>", f"<{_BAR}hy_eos:opensource{_BAR}>", "<sep>"),
    *("<|assistant_end|>", "<|tools_suffix|>", "<|user|>", "<|observation|>", "<_user>"),
)
# Texts that a model's tokenizer has as one token each.
SPECIAL = re.compile(
    r"<\|[^|<>\s'\"{}]+\|?>|<[a-z_]+\|>|<\uff5c[^\uff5c<>\s'\"{}]+\uff5c>|\[/?[A-Z_]{3,}\]|</?s>|<SPECIAL_\d+>"
    r"|<(?:start|end)_[a-z_]+>|<(?:beginning|end)_of_sentence>|<(?:bos|eos|pad|unk|sep)>|<_[a-z]+>"
    r"|<seed:[a-z]+>|\[e~\[|\]~b\]|</?assistant>|</?user>"
)
# Tags that real tokenizers have as one token each, which are not special.
_TAG = re.compile(r"</?[a-z:]*(?:think|tool_call|tool_calls|tool_response)[a-z:]*>")


def special_tokens_in(texts: list[str]) -> list[str]:
    """Return the texts that are one token of a tokenizer, in these texts."""
    found = {match for text in texts for match in SPECIAL.findall(text)}
    return sorted(found - {"<s>", "</s>"})


def make_tokenizer(folder: Path, template: str) -> Path:
    """Write a tokenizer for a template, with the stop tokens in generation_config.json."""
    texts = _renderings(template)
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=700,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    special = special_tokens_in([template, *texts])
    tokenizer.add_special_tokens([AddedToken(each, normalized=False) for each in special])
    tags = sorted({tag for text in (template, *texts) for tag in _TAG.findall(text)})
    tokenizer.add_tokens([AddedToken(each, normalized=False) for each in tags])
    folder.mkdir(parents=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **{"bos_token": "<s>", "eos_token": "</s>", "pad_token": "</s>"},
        "model_max_length": 2**20,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    stops = [tokenizer.token_to_id(each) for each in stops_of(special)]
    generation = {"eos_token_id": stops}
    (folder / "generation_config.json").write_text(json.dumps(generation), encoding="utf-8")
    return folder


def stops_of(special: list[str]) -> list[str]:
    """Return the stop tokens of the model that has these special tokens."""
    found = [each for each in STOPS if each in {"</s>", *special}]
    # Harmony's <|end|> ends a message of a channel, after which the model continues.
    return [each for each in found if each != "<|end|>" or "<|return|>" not in found]


def _renderings(template: str) -> list[str]:
    """Return what the template makes of the rows and of their beginnings."""
    from transformers.utils.chat_template_utils import render_jinja_template

    found: list[str] = []
    for row in ROWS.values():
        for count in range(1, len(row["messages"]) + 1):
            for is_prompt in (False, True):
                # A template may refuse a beginning, with any error.
                with contextlib.suppress(Exception):
                    rendered: Any = render_jinja_template(
                        [row["messages"][:count]],
                        tools=row.get("tools"),
                        chat_template=template,
                        add_generation_prompt=is_prompt,
                        bos_token="<s>",
                        eos_token="</s>",
                    )
                    found += rendered[0]
    return found

"""The model, the tokenizer and the texts of the recorded runs, generated deterministically."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

_WORDS = (
    *("the", "a", "of", "to", "and", "one", "two", "three", "red", "blue", "add", "word"),
    *("list", "file", "open", "what", "is", "b"),
)
_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def make_model(folder: Path) -> None:
    """Write a small Llama with random weights, and a tokenizer with a chat template."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(7)
    config = LlamaConfig(
        vocab_size=304,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=64,
        bos_token_id=1,
        eos_token_id=1,
        tie_word_embeddings=True,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([" ".join(_WORDS)] * 4, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    special = {"eos_token": "<|im_end|>", "pad_token": "<|im_end|>", "model_max_length": 4096}
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", **special}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    (folder / "chat_template.jinja").write_text(_TEMPLATE, encoding="utf-8")


def copy_to_hub(model: Path, *, cache: Path, name: str) -> None:
    """Copy the model to a cache of the hub, where a moved run finds it by name."""
    commit = "0123456789abcdef" * 2 + "01234567"
    cached = cache / f"models--{name.replace('/', '--')}"
    shutil.copytree(model, cached / "snapshots" / commit)
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text(commit, encoding="ascii")


def write_texts(folder: Path) -> None:
    """Write text.txt, and chat.jsonl, preference.jsonl and classify.jsonl of random words."""
    draw = random.Random(7)

    def words(most: int) -> str:
        return " ".join(draw.choices(_WORDS, k=draw.randint(3, most)))

    def phrases() -> str:
        starts = [draw.randrange(len(_WORDS) - 4) for _ in range(draw.randint(3, 6))]
        return " ".join(" ".join(_WORDS[start : start + 4]) for start in starts)

    folder.mkdir()
    text = "\n\n".join(phrases() for _ in range(250)) + "\n"
    (folder / "text.txt").write_text(text, encoding="utf-8")
    chats = []
    for _ in range(60):
        asked = words(6)
        answer = " ".join(reversed(asked.split()))
        turns = ({"role": "user", "content": asked}, {"role": "assistant", "content": answer})
        chats.append({"messages": turns})
    pairs = [
        {"prompt": words(6), "chosen": phrases()[:20], "rejected": words(6)} for _ in range(60)
    ]
    labelled = []
    for label in ("blue", "red", "three") * 20:
        labelled.append({"text": f"{words(8)} {label} {label}", "label": label})
    _write_rows(folder / "chat.jsonl", chats)
    _write_rows(folder / "preference.jsonl", pairs)
    _write_rows(folder / "classify.jsonl", labelled)


def _write_rows(path: Path, rows: Sequence[Mapping[str, object]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")

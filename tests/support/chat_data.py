"""Small conversations, a tokenizer with a chat template, and models for them."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from payload.core.errors import ExitCode
from payload.data.__main__ import main as data

START, END = "<|im_start|>", "<|im_end|>"
PLAIN_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
MARKED_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}"
    "{% else %}{{ message['content'] + '<|im_end|>' + '\n' }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_TEXT = "the a of to and one two three red blue add word list file open what is b"
_WORDS = _TEXT.split()


def make_tokenizer(folder: Path, *, template: str | None = PLAIN_TEMPLATE) -> Path:
    """Write a byte-level tokenizer with a few merges; `template` None writes no template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=[START, END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([" ".join(_WORDS)] * 4, trainer)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **{"eos_token": END, "pad_token": END},
        "model_max_length": 4096,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    if template is not None:
        (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    return folder


def make_model(folder: Path, case: str = "llama", **template: Any) -> Path:
    """Write a small model with random weights whose vocabulary fits the tokenizer."""
    from benchmarks.architecture_cases import CASES, make_folder  # imports torch

    raw = {**CASES[case], "vocab_size": 304, "pad_token_id": None}
    make_folder(raw, folder)
    return make_tokenizer(folder, **template)


def turn(user: str, assistant: str) -> list[dict[str, str]]:
    """Return a question and its answer."""
    return [{"role": "user", "content": user}, {"role": "assistant", "content": assistant}]


def conversations(count: int, *, turns: int = 1, seed: int = 0) -> list[list[dict[str, str]]]:
    """Return conversations of random words; each answer is a function of its question."""
    draw = random.Random(seed)

    def words() -> list[str]:
        return draw.choices(_WORDS, k=draw.randint(1, 9))

    made = []
    for _ in range(count):
        messages = []
        for _ in range(turns):
            asked = words()
            messages += turn(" ".join(asked), " ".join(reversed(asked)))
        made.append(messages)
    return made


def write_rows(path: Path, rows: Sequence[Mapping[str, Any]]) -> Path:
    """Write one JSON object per line."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def prepare_words(
    tokenizer: Path, source: Path, out: Path, *flags: object, task: str = "chat"
) -> list[str]:
    """Return the arguments that prepare a file, or a folder with one, by its suffix."""
    kind = source.suffix.removeprefix(".") or "hf"
    words = ["prepare", "--task", task, "--source", kind, "--input", source, "--quiet"]
    return [str(each) for each in (*words, "--tokenizer", tokenizer, "--out", out, *flags)]


def prepare(tokenizer: Path, source: Path, out: Path, *flags: object, task: str = "chat") -> Path:
    """Make the data folder of a file, and require success."""
    assert data(prepare_words(tokenizer, source, out, *flags, task=task)) == ExitCode.OK
    return out

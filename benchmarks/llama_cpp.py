"""Compares greedy tokens of exported GGUF files in llama.cpp with transformers on the same weights.

    python -m benchmarks.llama_cpp --llama-python ENV/bin/python [--model FOLDER]

ENV is an environment with llama.cpp in xllamacpp, which has wheels:

    ENV/bin/pip install xllamacpp==2026.10.11549

Exports small random models of each family in fp32 and also compares the log-probabilities of all
tokens. `--model` is exported in f16 and q8_0 and compared with transformers on the rounded
(dequantised) weights. In q8_0 llama.cpp also rounds activations to 8 bits, which would reorder a
random model's nearly equal logits. A table goes to stderr, one JSON object to stdout; the exit
status is 1 if tokens differ.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness import REPO, Benchmark

TOKENS = 16
LOG_PROBS_BOUND = 1e-3
"""Limit on the difference of a log-probability in fp32; llama.cpp's GELU is in fp16."""
NUM_MERGES = 744
EOS = 256 + NUM_MERGES
_PROMPT = [464, 206, 758, 218]
_TEXT = "The capital of France is"
_DEFAULT_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
_FAMILIES: Mapping[str, Mapping[str, Any]] = {
    "gpt2": {},
    "llama": {},
    "llama, llama3 rope": {},
    "llama, linear rope": {},
    "smollm3": {"pad_token_id": None},
    "qwen2": {},
    "qwen3": {},
    "mistral, window": {"sliding_window": None},
    "gemma3_text": {"query_pre_attn_scalar": 32},
    "qwen3_moe": {},
    "phi3": {"sliding_window": None},
    # llama.cpp chooses the factors by its context of 256 tokens.
    "phi3, partial longrope": {
        "original_max_position_embeddings": 256,
        "max_position_embeddings": 1024,
    },
    "llama, yarn rope": {},
    "olmo2": {},
    "olmo3": {"tie_word_embeddings": False, "rope_scaling": _DEFAULT_YARN, "pad_token_id": None},
    "granite": {},
    "granite 4, dense": {},
}
"""Cases of `architecture_cases`, with the changes that a GGUF file needs."""
_IN_LLAMA_CPP = """
import json, sys
from xllamacpp import CommonParams, Server, ggml_type, llama_flash_attn_type

file, tokens, start, most = sys.argv[1], *map(json.loads, sys.argv[2:])
options = CommonParams()
options.model.path = file
options.n_ctx, options.n_gpu_layers, options.warmup, options.fit_params = 256, 0, False, False
options.cpuparams.n_threads = options.cpuparams_batch.n_threads = 1
# A cache in fp32 as in transformers; flash attention has one in f16.
options.cache_type_k = options.cache_type_v = ggml_type.GGML_TYPE_F32
options.flash_attn_type = llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
server = Server(options)
# The answer lacks a token whose text ends within a character, so another token is chosen. The
# log-probabilities are those before the choice.
request = {"n_predict": 1, "n_probs": most, "logit_bias": [[tokens[0], 1e6]], "temperature": 0}
for end in range(start, len(tokens)):
    answer = server.handle_completions({**request, "prompt": tokens[:end]})
    found = answer["choices"][0]["logprobs"]["content"][0]["top_logprobs"]
    print(json.dumps([[each["id"], each["logprob"]] for each in found]))
"""


def add_tokenizer(folder: Path) -> None:
    """Write the first part of GPT-2's tokenizer, which loads quickly."""
    from payload.data.tokenizer_files import gpt2_files

    files = gpt2_files(context=128)
    raw = json.loads(files["tokenizer.json"])
    model = raw["model"]
    model["merges"] = model["merges"][:NUM_MERGES]
    kept = {token: number for token, number in model["vocab"].items() if number < EOS}
    model["vocab"] = kept | {"<|endoftext|>": EOS}
    raw["added_tokens"][0]["id"] = EOS
    (folder / "tokenizer.json").write_text(json.dumps(raw), encoding="utf-8")
    (folder / "tokenizer_config.json").write_bytes(files["tokenizer_config.json"])


def make_family(name: str, folder: Path) -> None:
    """Write the random model of a case, with a small tokenizer."""
    from benchmarks.architecture_cases import CASES, make_folder

    own = {"vocab_size": EOS + 1, "bos_token_id": None, "eos_token_id": EOS}
    make_folder({**CASES[name], **own, **_FAMILIES[name]}, folder)
    add_tokenizer(folder)


def rounded_weights(model: Any, dtype: str) -> dict[str, Any]:
    """Return a Llama's weights with the matrices rounded as in the format."""
    import gguf
    import torch

    found = {}
    for name, value in model.state_dict().items():
        if dtype == "fp32" or value.dim() < 2:
            found[name] = value
        elif dtype == "q8_0":
            kind = gguf.GGMLQuantizationType.Q8_0
            back = gguf.dequantize(gguf.quantize(value.contiguous().numpy(), kind), kind)
            found[name] = torch.from_numpy(back.copy())
        else:
            found[name] = value.half().float()
    return found


def compare(folder: Path, file: Path, *, dtype: str, python: Path, prompt: list[int]) -> Any:
    """Export a model, continue the prompt with both programs, and return the number of equal
    tokens and the largest difference of a log-probability."""
    import torch
    from transformers import AutoModelForCausalLM

    options = [
        "--model",
        str(folder),
        "--format",
        "gguf",
        "--out",
        str(file),
        "--dtype",
        dtype,
    ]
    # This program's stdout is for JSON.
    command = [sys.executable, "-m", "payload.export", *options]
    subprocess.run(command, stdout=subprocess.DEVNULL, check=True, cwd=REPO)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.load_state_dict(rounded_weights(model, dtype))
    model.eval()
    tokens, rows = list(prompt), []
    with torch.no_grad():
        for _ in range(TOKENS):
            rows.append(model(input_ids=torch.tensor([tokens])).logits[0, -1].log_softmax(-1))
            tokens.append(int(rows[-1].argmax()))
    most = len(rows[0]) if dtype == "fp32" else 1
    arguments = [json.dumps(each) for each in (tokens, len(prompt), most)]
    command = [str(python), "-c", _IN_LLAMA_CPP, str(file), *arguments]
    answer = subprocess.run(command, capture_output=True, text=True, check=False)
    if answer.returncode:
        raise SystemExit(f"error: xllamacpp: {answer.stderr.strip()[-500:]}")
    found = [json.loads(line) for line in answer.stdout.splitlines()]
    pairs = list(zip(found, rows, strict=True))
    return {
        "equal_tokens": sum(theirs[0][0] == int(ours.argmax()) for theirs, ours in pairs),
        "log_probs": max(
            abs(value - float(ours[i])) for theirs, ours in pairs for i, value in theirs
        ),
    }


def main(argv: Sequence[str]) -> int:
    """Compare all models; return 1 if tokens or log-probabilities differ."""
    benchmark = Benchmark("llama_cpp", __doc__)
    add = benchmark.parser.add_argument
    add("--llama-python", type=Path, required=True, metavar="PYTHON", help="Python of ENV")
    add("--model", type=Path, metavar="FOLDER", help="a model of the Llama family with its weights")
    arguments = benchmark.parse(argv)
    cases = []
    with tempfile.TemporaryDirectory() as root:
        for i, name in enumerate(_FAMILIES):
            folder = Path(root) / str(i)
            make_family(name, folder)
            cases.append((name, "fp32", folder, _PROMPT))
        if arguments.model is not None:
            from transformers import AutoTokenizer

            prompt = AutoTokenizer.from_pretrained(arguments.model)(_TEXT)["input_ids"]
            cases += [
                (arguments.model.name, dtype, arguments.model, prompt) for dtype in ("f16", "q8_0")
            ]
        labels = [case[0] for case in cases]
        table = benchmark.table("dtype", "equal tokens", "log-probs", title="model", labels=labels)
        found = []
        for number, (name, dtype, folder, prompt) in enumerate(cases):
            file = Path(root) / f"{number}.gguf"
            row = compare(folder, file, dtype=dtype, python=arguments.llama_python, prompt=prompt)
            table.row(name, dtype, f"{row['equal_tokens']} of {TOKENS}", f"{row['log_probs']:.1e}")
            found.append({"model": name, "dtype": dtype, **row})
    benchmark.finish({"cases": found}, packages=("torch", "transformers"))
    return int(
        any(
            case["equal_tokens"] < TOKENS
            or (case["dtype"] == "fp32" and case["log_probs"] > LOG_PROBS_BOUND)
            for case in found
        )
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

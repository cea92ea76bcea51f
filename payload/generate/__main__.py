"""`python -m payload.generate`: continue prompts with a trained model, or talk with it."""

from __future__ import annotations

import io
import json
import os
import signal
import sys
import time
from argparse import Namespace
from collections.abc import Sequence

from payload.core.errors import ExitCode, TileforgeError, UsageError
from payload.core.interrupts import interrupt_once
from payload.core.printable_text import printable
from payload.data.templates.chat_template import read_chat_template
from payload.generate.arguments import parser
from payload.generate.chat import Conversation, talk
from payload.generate.classify import (
    Result,
    classify,
    read_texts,
    refuse_classifier,
    require_classifier,
)
from payload.generate.codec import Codec, find_codec
from payload.generate.output import BETWEEN, InOrder, JsonOutput, Sample, TextOutput
from payload.generate.prompts import batches, encode, read_prompts
from payload.generate.sampling import Sampler, SamplingOptions
from payload.train.models.base import CausalLM
from payload.train.models.hf_weights import checkpoint_folder, tokenizer_folder
from payload.train.models.loading import load

_DEFAULTS = SamplingOptions()
_ANSWER_TOKENS = 1024


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return its exit code."""
    arguments = parser().parse_args(argv)
    for stream in (sys.stdout, sys.stderr):
        # The text can hold any character, whatever the terminal's locale.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(encoding="utf-8", errors="replace")
    try:
        _generate(arguments)
    except TileforgeError as error:
        print(f"error: {printable(str(error))}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except BrokenPipeError:
        # Nobody reads on, as with `| head`. Python would complain once more when it flushes.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    return ExitCode.OK


def _generate(arguments: Namespace) -> None:
    _require_sense(arguments)
    if arguments.classify:
        _classify(arguments)
        return
    prompts = [] if arguments.chat else read_prompts(arguments)
    folder = checkpoint_folder(arguments.checkpoint)
    codec = find_codec(folder)
    if arguments.chat:
        template = read_chat_template(tokenizer_folder(folder))
    model = load(folder)
    refuse_classifier(model, folder=folder)
    _note_vocabulary(codec, model)
    if not arguments.chat:
        _continue(prompts, arguments, weights=str(folder), codec=codec, model=model)
        return
    _say_model(str(folder), model)
    system = [{"role": "system", "content": arguments.system}] if arguments.system else []
    conversation = Conversation(
        model=model,
        codec=codec,
        template=template,
        options=_options(arguments, max_new_tokens=_ANSWER_TOKENS, num_samples=1),
        stops=arguments.stop,
        messages=system,
    )
    _chat(conversation, as_json=arguments.json)


def _classify(arguments: Namespace) -> None:
    """Print the label of every text."""
    folder = checkpoint_folder(arguments.checkpoint)
    codec = find_codec(folder)
    model = require_classifier(load(folder), folder=folder)

    def show(text: str, result: Result) -> None:
        if arguments.json:
            _write(result.as_json() + "\n")
        else:
            _write(f"{result.label}\t{result.scores[result.label]:.4f}\t{text}\n")

    began = time.perf_counter()
    count = classify(read_texts(arguments), model=model, codec=codec, show=show)
    print(f"{count:,} texts in {time.perf_counter() - began:.1f} s", file=sys.stderr)


def _require_sense(arguments: Namespace) -> None:
    """Refuse options that have no meaning together."""
    if arguments.system is not None and not arguments.chat:
        raise UsageError("--system is the first message of a chat. Add --chat, or leave it out.")
    if arguments.chat and arguments.num_samples not in (None, 1):
        raise UsageError("--chat gives one answer. Leave --num-samples out.")
    if arguments.input is not None and not arguments.classify:
        raise UsageError("--input has texts to classify. Add --classify, or use --prompts-file.")
    others = (arguments.chat, arguments.prompt_file, arguments.prompts_file)
    if arguments.classify and any(each not in (None, False) for each in others):
        raise UsageError("--classify takes texts from --input or --prompt alone.")


def _options(arguments: Namespace, *, max_new_tokens: int, num_samples: int) -> SamplingOptions:
    return SamplingOptions(
        max_new_tokens=arguments.max_new_tokens or max_new_tokens,
        temperature=arguments.temperature,
        top_k=arguments.top_k or None,
        num_samples=arguments.num_samples or num_samples,
        seed=arguments.seed,
        repetition_penalty=arguments.repetition_penalty,
    )


def _continue(
    prompts: Sequence[str], arguments: Namespace, *, weights: str, codec: Codec, model: CausalLM
) -> None:
    """Continue every prompt; print the results in the prompts' order."""
    options = _options(
        arguments,
        max_new_tokens=_DEFAULTS.max_new_tokens,
        num_samples=_DEFAULTS.num_samples,
    )
    encoded = [encode(prompt, codec=codec, model=model, note=_note) for prompt in prompts]
    samples = [
        [
            Sample(codec=codec, prompt=tokens, stops=arguments.stop, seed=options.seed + i)
            for i in range(options.num_samples)
        ]
        for tokens in encoded
    ]
    shown = _as_json(prompts, samples, weights) if arguments.json else _as_text(prompts, samples)
    began = time.perf_counter()
    places = [0]
    try:
        _say_model(weights, model)
        for places in batches(encoded, samples=options.num_samples, model=model):
            sampler = Sampler(
                model,
                [encoded[place] for place in places],
                options=options,
                stop_tokens=codec.stop_tokens,
                num_tokens=min(codec.vocab_size, model.spec.vocab_size),
            )
            rows = [sample for place in places for sample in samples[place]]
            for tokens in sampler.tokens():
                for row, (sample, token) in enumerate(zip(rows, tokens, strict=True)):
                    if token is not None and not sample.add(token):
                        sampler.end(row)
                shown.go_on(places)
            _finish(places, samples)
            shown.end(places)
    except KeyboardInterrupt:
        # What was made until then is not lost.
        _finish(places, samples)
        shown.interrupt(places)
        raise
    took_s = time.perf_counter() - began
    count = sum(sample.num_tokens for made in samples for sample in made)
    print(f"{count} tokens in {took_s:.1f} s ({count / took_s:.0f} tokens/s)", file=sys.stderr)


def _as_text(prompts: Sequence[str], samples: Sequence[Sequence[Sample]]) -> InOrder:
    outputs = [
        TextOutput(prompt, made, write=_write)
        for prompt, made in zip(prompts, samples, strict=True)
    ]
    return InOrder(outputs, between=lambda: _write(BETWEEN.lstrip("\n")))


def _as_json(prompts: Sequence[str], samples: Sequence[Sequence[Sample]], weights: str) -> InOrder:
    outputs = [
        JsonOutput(prompt, made, checkpoint=weights, write=_write)
        for prompt, made in zip(prompts, samples, strict=True)
    ]
    return InOrder(outputs, between=lambda: None)


def _finish(places: Sequence[int], samples: Sequence[Sequence[Sample]]) -> None:
    for place in places:
        for sample in samples[place]:
            sample.finish()


def _write(text: str) -> None:
    """Print; a terminal does not get the escape sequences that a model may have learned."""
    print(printable(text) if sys.stdout.isatty() else text, end="", flush=True)


def _note(text: str) -> None:
    print(printable(text), file=sys.stderr)


def _chat(conversation: Conversation, *, as_json: bool) -> None:
    """Talk in the terminal, or answer the lines of stdin one after another."""
    is_terminal = sys.stdin.isatty()
    if is_terminal:
        print("Ctrl-C ends an answer, Ctrl-D the conversation.", file=sys.stderr)
        # Line editing and history, where the platform has them.
        import readline  # noqa: F401

    def show(piece: str) -> None:
        if not as_json:
            _write(piece)

    def end() -> None:
        if not as_json:
            _write("\n")
            return
        question, answer = (message["content"] for message in conversation.messages[-2:])
        row = {"prompt": question, "text": answer, "num_tokens": conversation.num_tokens}
        print(json.dumps(row), flush=True)

    talk(
        conversation,
        read=(lambda: input("> ")) if is_terminal else (lambda: input()),
        show=show,
        end=end,
        note=_note,
    )


def _say_model(weights: str, model: CausalLM) -> None:
    print(f"model: {weights} ({model.spec.num_params() / 1e6:.1f}M parameters)", file=sys.stderr)


def _note_vocabulary(codec: Codec, model: CausalLM) -> None:
    """Say so where the tokenizer has more tokens than the model, or a GPT-2 has other ones."""
    size = model.spec.vocab_size
    if codec.vocab_size > size or (codec.name == "GPT-2's" and size != codec.vocab_size):
        print(
            f"note: the model's vocabulary has {size} tokens, {codec.name} has "
            f"{codec.vocab_size}: unless only its embedding was made larger or smaller, the text "
            "will make no sense",
            file=sys.stderr,
        )


if __name__ == "__main__":
    interrupt_once()
    sys.exit(main())

"""`python -m payload.generate`: continues prompts with a trained model, or chats with it."""

from __future__ import annotations

if __name__ == "__main__":
    from payload.core.missing_packages import explain_missing_packages

    explain_missing_packages()

import io
import os
import signal
import sys
import time
from argparse import Namespace
from collections.abc import Sequence

from payload.core.durations import in_words
from payload.core.error_line import print_error
from payload.core.errors import ConfigError, DataError, ExitCode, TileforgeError, UsageError
from payload.core.interrupts import interrupt_once
from payload.core.printable_text import printable, shown_name
from payload.data.rows.conversation import Message
from payload.data.templates.chat_template import read_chat_template
from payload.generate.answers import ChatFormat, chat_format
from payload.generate.arguments import parser
from payload.generate.chat import Conversation
from payload.generate.classify import (
    Result,
    classify,
    read_texts,
    refuse_classifier,
    require_classifier,
)
from payload.generate.codec import Codec, find_codec, read_generation_config
from payload.generate.output import (
    BETWEEN,
    ChatSample,
    JsonOutput,
    OrderedOutputs,
    Sample,
    TextOutput,
)
from payload.generate.prompts import Prompt, batches, encode, has_prompts, read_prompts, read_tools
from payload.generate.sampling import Sampler, SamplingOptions
from payload.generate.sampling_defaults import sampling_of
from payload.generate.terminal_chat import chat
from payload.train.models.base import CausalLM
from payload.train.models.hf_weights import checkpoint_folder, config_folder, tokenizer_folder
from payload.train.models.loading import load


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    arguments = parser().parse_args(argv)
    for stream in (sys.stdout, sys.stderr):
        # Generated text can contain any character, whatever the terminal's locale.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(encoding="utf-8", errors="replace")
    try:
        _generate(arguments)
    except TileforgeError as error:
        print_error(error)
        return error.exit_code
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except BrokenPipeError:
        # The reader has closed stdout, as with `| head`. Otherwise Python would report a second
        # error when it flushes stdout.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    return ExitCode.OK


def _generate(arguments: Namespace) -> None:
    _check_options(arguments)
    arguments.checkpoint = arguments.checkpoint or arguments.model
    if arguments.classify:
        _classify(arguments)
        return
    is_dialogue = arguments.chat and not has_prompts(arguments)
    prompts = [] if is_dialogue else read_prompts(arguments)
    tools = read_tools(arguments.tools)
    folder = checkpoint_folder(arguments.checkpoint)
    codec = find_codec(folder)
    form = None
    if arguments.chat:
        template = read_chat_template(tokenizer_folder(folder))
        variables = dict(arguments.template_var)
        form = chat_format(template, codec, tools=tools, variables=variables)
        if tools and form.calls is None:
            _print_note(
                f"note: {template.where} does not write calls, so a call is printed as text"
            )
    sampling = sampling_of(
        arguments,
        is_chat=arguments.chat,
        generation_config=read_generation_config(config_folder(folder)),
    )
    model = load(folder)
    refuse_classifier(model, folder=folder)
    if sampling.note is not None:
        _print_note(sampling.note)
    _note_vocabulary(codec, model)
    if form is None or not is_dialogue:
        _continue(
            prompts,
            arguments,
            options=sampling.options,
            form=form,
            weights=str(folder),
            codec=codec,
            model=model,
        )
        return
    _print_model(str(folder), model)
    conversation = Conversation(
        model=model,
        codec=codec,
        format=form,
        options=sampling.options,
        stops=arguments.stop,
        messages=_system_messages(arguments),
    )
    chat(conversation, as_json=arguments.json, write=_write_unchanged, note=_print_note)


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
    print(f"{count:,} texts in {in_words(time.perf_counter() - began)}", file=sys.stderr)


def _check_options(arguments: Namespace) -> None:
    """Raise UsageError for options that do not fit together."""
    if (arguments.model is None) == (arguments.checkpoint is None):
        raise UsageError(
            "name one MODEL: a run, a checkpoint, a Hugging Face folder or name, or a GGUF file."
        )
    if arguments.system is not None and not arguments.chat:
        raise UsageError("--system needs --chat. Add --chat, or leave --system out.")
    for option, value in (("--tools", arguments.tools), ("--template-var", arguments.template_var)):
        if value and not arguments.chat:
            raise UsageError(f"{option} needs --chat. Add --chat, or leave {option} out.")
    if arguments.chat and not has_prompts(arguments) and arguments.num_samples not in (None, 1):
        raise UsageError("--chat writes one answer. Leave --num-samples out.")
    if arguments.input is not None and not arguments.classify:
        raise UsageError("--input needs --classify. Add --classify, or use --prompts-file.")
    others = (arguments.chat, arguments.prompt_file, arguments.prompts_file)
    if arguments.classify and any(each not in (None, False) for each in others):
        raise UsageError("--classify reads texts only from --input or --prompt.")


def _continue(
    prompts: Sequence[Prompt],
    arguments: Namespace,
    *,
    options: SamplingOptions,
    form: ChatFormat | None,
    weights: str,
    codec: Codec,
    model: CausalLM,
) -> None:
    """Continue or answer every prompt. Print the results in the order of the prompts."""
    texts = [_text(prompt, form, arguments) for prompt in prompts]
    encoded = [
        encode(text, codec=codec, model=model, is_marked=form is not None, note=_print_note)
        for text in texts
    ]
    samples = [
        [
            _sample(form, codec, text, tokens, stops=arguments.stop, seed=options.seed + i)
            for i in range(options.num_samples)
        ]
        for text, tokens in zip(texts, encoded, strict=True)
    ]
    if arguments.json:
        shown = _as_json(prompts, samples, weights)
    else:
        shown = _as_text(texts if form is None else [""] * len(texts), samples)
    began = time.perf_counter()
    indices = [0]
    try:
        _print_model(weights, model)
        for indices in batches(encoded, samples=options.num_samples, model=model):
            sampler = Sampler(
                model,
                [encoded[index] for index in indices],
                options=options,
                stop_tokens=codec.stop_tokens if form is None else form.stop_tokens,
                num_tokens=min(codec.vocab_size, model.spec.vocab_size),
            )
            rows = [sample for index in indices for sample in samples[index]]
            for tokens in sampler.tokens():
                for row, (sample, token) in enumerate(zip(rows, tokens, strict=True)):
                    if token is not None and not sample.add(token):
                        sampler.end(row)
                shown.update(indices)
            _finish(indices, samples)
            shown.end(indices)
    except KeyboardInterrupt:
        # Print the text generated so far.
        _finish(indices, samples)
        shown.interrupt(indices)
        raise
    took_s = time.perf_counter() - began
    count = sum(sample.num_tokens for made in samples for sample in made)
    print(f"{count} tokens in {in_words(took_s)} ({count / took_s:.0f} tokens/s)", file=sys.stderr)


def _as_text(prompts: Sequence[str], samples: Sequence[Sequence[Sample]]) -> OrderedOutputs:
    outputs = [
        TextOutput(prompt, made, write=_write)
        for prompt, made in zip(prompts, samples, strict=True)
    ]
    return OrderedOutputs(outputs, between=lambda: _write(BETWEEN.lstrip("\n")))


def _text(prompt: Prompt, form: ChatFormat | None, arguments: Namespace) -> str:
    """Return the text that the model continues. Raises ConfigError."""
    if form is None:
        assert isinstance(prompt, str), "only a chat has messages"
        return prompt
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    try:
        return form.prompt([*_system_messages(arguments), *messages])
    except DataError as error:
        raise ConfigError(str(error)) from None


def _sample(
    form: ChatFormat | None,
    codec: Codec,
    text: str,
    tokens: Sequence[int],
    *,
    stops: Sequence[str],
    seed: int,
) -> Sample:
    if form is None:
        return Sample(decode=codec.decode, prompt=tokens, stops=stops, seed=seed)
    # An answer is decoded without its prompt, as the prompt ends with a special token.
    return ChatSample(
        decode=codec.decode_marked, prompt=(), stops=stops, seed=seed, form=form, rendered=text
    )


def _system_messages(arguments: Namespace) -> list[Message]:
    return [{"role": "system", "content": arguments.system}] if arguments.system else []


def _as_json(
    prompts: Sequence[Prompt], samples: Sequence[Sequence[Sample]], weights: str
) -> OrderedOutputs:
    outputs = [
        JsonOutput(prompt, made, checkpoint=weights, write=_write)
        for prompt, made in zip(prompts, samples, strict=True)
    ]
    return OrderedOutputs(outputs, between=lambda: None)


def _finish(indices: Sequence[int], samples: Sequence[Sequence[Sample]]) -> None:
    for index in indices:
        for sample in samples[index]:
            sample.finish()


def _write(text: str) -> None:
    """Print text; on a terminal, remove escape sequences from it."""
    print(printable(text) if sys.stdout.isatty() else text, end="", flush=True)


def _write_unchanged(text: str) -> None:
    print(text, end="", flush=True)


def _print_note(text: str) -> None:
    print(printable(text), file=sys.stderr)


def _print_model(weights: str, model: CausalLM) -> None:
    size = f"{model.spec.num_params() / 1e6:.1f}M parameters"
    print(f"model: {shown_name(weights)} ({size})", file=sys.stderr)


def _note_vocabulary(codec: Codec, model: CausalLM) -> None:
    """Print a note if the vocabularies of the tokenizer and the model do not match."""
    size = model.spec.vocab_size
    if codec.vocab_size > size or (codec.name == "GPT-2's" and size != codec.vocab_size):
        print(
            f"note: the model's vocabulary has {size} tokens, {codec.name} has "
            f"{codec.vocab_size}. Unless only the embedding was resized, the text will be "
            "meaningless",
            file=sys.stderr,
        )


if __name__ == "__main__":
    interrupt_once()
    sys.exit(main())

"""`jaxpaged generate`: complete one or many prompts; a single one is streamed."""

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from jaxpaged.cli_parser import Parser, integer
from jaxpaged.commands.answers import Answer, answer_of, as_record, plain, stream_answer, summary, write_lines
from jaxpaged.commands.engine_api import MakeEngine, Message, Prompt, TextEngine
from jaxpaged.commands.engine_start import (
    add_engine_arguments,
    add_sampling_arguments,
    make_llm,
    running_engine,
    sampling_params,
    terminal_config,
)
from jaxpaged.commands.prompts import PromptSource, read_prompts
from jaxpaged.errors import ConfigError, InvalidRequestError
from jaxpaged.profiler import traced

DEFAULT_MAX_TOKENS = 256


def add_arguments(parser: Parser) -> None:
    """See `commands`."""
    parser.add_argument("prompts", nargs="*", metavar="PROMPT", help="prompts; none: read --file or standard input as one prompt")
    parser.add_argument("-f", "--file", metavar="FILE", help="read the prompt from this file (- is standard input); .jsonl: one a line")
    parser.add_argument("--lines", action="store_true", help="the file or standard input holds one prompt a line")
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument("--chat", action="store_true", help="each prompt is what a user says to an instruct model (its chat template)")
    kind.add_argument("--raw", action="store_true", help="each prompt is text to go on with (the default)")
    parser.add_argument("--system", metavar="TEXT", help="system message; means --chat")
    parser.add_argument("--json", action="store_true", help="print one JSON object a line instead of text")
    parser.add_argument("-q", "--quiet", action="store_true", help="no summary line")
    add_sampling_arguments(parser, max_tokens=DEFAULT_MAX_TOKENS)
    told = parser.add_argument_group("log-probabilities", "Printed with --json: of each token, and of the N likeliest ones (0 to 20).")
    told.add_argument("--logprobs", type=integer, metavar="N", help="of the answer's tokens")
    told.add_argument("--prompt-logprobs", type=integer, metavar="N", help="of the prompt's; with --max-tokens 0 of these alone")
    parser.add_argument("--profile", metavar="FOLDER", help="write a trace by JAX's profiler below this folder, without the start")
    add_engine_arguments(parser)


def run(args: argparse.Namespace, make: MakeEngine = make_llm) -> int:
    """See `commands`. Everything that can be checked without the model is checked before it is loaded."""
    config = terminal_config(args)
    params = sampling_params(args, config, logprobs=args.logprobs, prompt_logprobs=args.prompt_logprobs)
    if not args.json and (args.logprobs is not None or args.prompt_logprobs is not None):
        raise ConfigError("--logprobs and --prompt-logprobs are printed with --json alone")
    sources = read_prompts(args.prompts, args.file, has_line_prompts=args.lines)
    is_chat = args.chat or args.system is not None
    for index, source in enumerate(sources):
        if not source.shown and not (is_chat and source.text is not None):
            raise InvalidRequestError(f"prompt {index} is empty")
    with running_engine(config, make) as engine:
        prompts = [_prompt(source, engine.llm, is_chat=is_chat, system=args.system) for source in sources]
        started_s = time.monotonic()
        with traced(None if args.profile is None else Path(args.profile)):
            if len(prompts) == 1 and not args.json:
                answers = [stream_answer(engine.llm, prompts[0], params, sys.stdout)]
                if not answers[0].text.endswith("\n"):
                    write_lines(sys.stdout, [""])
            else:
                outputs = engine.llm.generate(prompts, params, use_tqdm=len(prompts) > 1 and not args.quiet and sys.stderr.isatty())
                answers = [answer_of(output, time.monotonic() - started_s) for output in outputs]
                _print_all(sources, answers, is_json=args.json)
            seconds = time.monotonic() - started_s
        engine.settle()
        if not args.quiet:
            write_lines(sys.stderr, [summary(answers, seconds)])
        if args.profile is not None and not args.quiet:
            write_lines(sys.stderr, [f"trace below {args.profile}; where the time went: jaxpaged bench profile {args.profile}"])
    return 130 if any(answer.finish_reason == "abort" for answer in answers) else 0


def _prompt(source: PromptSource, llm: TextEngine, *, is_chat: bool, system: str | None) -> Prompt:
    """Text or token ids for the engine; messages and `--chat` go through the model's template."""
    if source.token_ids is not None:
        return source.token_ids
    messages = source.messages
    if messages is None:
        assert source.text is not None
        if not is_chat:
            return source.text
        messages = [{"role": "user", "content": source.text}]
    return llm.get_tokenizer().apply_chat_template(with_system(messages, system))


def with_system(messages: Sequence[Message], system: str | None) -> list[Message]:
    """The messages behind a system message, if there is one to add."""
    return ([] if system is None else [{"role": "system", "content": system}]) + list(messages)


def _print_all(sources: Sequence[PromptSource], answers: Sequence[Answer], *, is_json: bool) -> None:
    if is_json:
        records = (as_record(i, source.shown, answer) for i, (source, answer) in enumerate(zip(sources, answers, strict=True)))
        write_lines(sys.stdout, (msgspec.json.encode(record).decode() for record in records))
        return
    show = plain if sys.stdout.isatty() else str
    for source, answer in zip(sources, answers, strict=True):
        prompt = source.shown if isinstance(source.shown, str) else msgspec.json.encode(source.shown).decode()
        write_lines(sys.stdout, [show(f"==> {prompt}"), show(answer.text), ""])

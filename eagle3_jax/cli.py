"""The command line: parser, start-up of JAX, and how refusals and interruptions reach the shell.

Each verb is a module of `eagle3_jax.commands`; JAX and the models are imported only once a verb runs, so that
`--help` answers at once.
"""

import argparse
import contextlib
import errno
import io
import logging
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

from eagle3_jax.checkpoint.files import user_cache
from eagle3_jax.commands import (
    bench,
    convert,
    distill,
    evaluate,
    export,
    generate,
    inspect,
    quantize,
    score,
    train,
    verify,
)
from eagle3_jax.commands.options import output_folder
from eagle3_jax.errors import Eagle3Error

VERBS = (generate, score, inspect, verify, distill, train, evaluate, bench, convert, quantize, export)
WITHOUT_KERNELS = (inspect, convert, export)
"""Verbs that only look at files, or whose programs run elsewhere: they need not wait for a compiler."""
REFUSED, INTERRUPTED, CLOSED_PIPE = 2, 130, 141
"""Exit codes, the last two as a shell reports SIGINT and SIGPIPE."""
NO_MEMORY = "not enough memory; ask for fewer prompts, fewer tokens or a smaller model"
LONGEST_LINE = 1000
"""Characters of a refusal: what it quotes comes from files and flags and may be anything."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line.

    Args:
        argv: the arguments after the program's name; `sys.argv` if not given.

    Returns:
        The exit code: 0; 1 where `verify` found another token; 2 for whatever is refused, after one line on
        stderr; 130 after an interrupt.
    """
    ours = argv is None and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if ours:
        # Some imports swallow the exception of an interrupt, others print it.
        signal.signal(signal.SIGINT, _leave)
    _print_anything()
    with _logs_on_stderr():
        try:
            args = make_parser().parse_args(argv)
            _start_jax(args)
            if ours:
                signal.signal(signal.SIGINT, signal.default_int_handler)
            with _native_kernels(args):
                code = args.run(args)
            sys.stdout.flush()
            return code
        except SystemExit as stop:  # argparse after --help
            return int(stop.code or 0)
        except Eagle3Error as error:
            return _refuse(str(error))
        except BrokenPipeError:
            # The interpreter flushes stdout once more at exit.
            with contextlib.suppress(OSError, ValueError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return CLOSED_PIPE
        except OSError as error:
            return _refuse(f"{error.filename or 'output'}: {error.strerror or error}")
        except MemoryError:
            return _refuse(NO_MEMORY)
        except RuntimeError as error:  # XLA's
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            return _refuse(NO_MEMORY)
        except KeyboardInterrupt:
            if ours:
                _leave()
            return INTERRUPTED


def make_parser() -> argparse.ArgumentParser:
    """The parser of all verbs; a parsed namespace carries its verb's function as `run`."""
    parser = _Parser(prog="eagle3-jax", description="EAGLE-3 speculative decoding in JAX.", allow_abbrev=False)
    verbs = parser.add_subparsers(metavar="VERB", required=True)
    for verb in VERBS:
        summary = (verb.__doc__ or "").partition("\n")[0]
        name = verb.__name__.rpartition(".")[2]
        sub = verbs.add_parser(name, help=summary, description=summary, allow_abbrev=False)
        sub.set_defaults(run=verb.run)
        sub.add_flags = verb.add_arguments
    return parser


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are refusals, and that gets a verb's flags only once the verb is chosen."""

    add_flags: Callable[[argparse.ArgumentParser], None] | None = None

    def parse_known_args(self, *args: Any, **kwargs: Any) -> Any:
        if self.add_flags is not None:
            self.add_flags(self)
            self.add_flags = None
            _add_start_arguments(self)
        return super().parse_known_args(*args, **kwargs)

    def error(self, message: str) -> NoReturn:
        raise Eagle3Error(f"{message} (see {self.prog} --help)")


def _add_start_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_mutually_exclusive_group()
    group.add_argument(
        "--compilation-cache",
        metavar="DIR",
        type=output_folder,
        help="where compiled programs are kept (default: ~/.cache/eagle3_jax/xla)",
    )
    group.add_argument("--no-compilation-cache", action="store_true", help="compile everything, keep nothing")
    parser.add_argument(
        "--no-native",
        action="store_true",
        help="XLA alone; else, on CPU, kernels that the C++ compiler builds once multiply few rows and attend to them",
    )


def _leave(*_: Any) -> NoReturn:
    """End the process as interrupted, at once: XLA's threads may crash in an orderly shutdown."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, RuntimeError):
            stream.flush()
    os._exit(INTERRUPTED)


def _refuse(message: str) -> int:
    line = " ".join(message.split())
    if len(line) > LONGEST_LINE:
        line = f"{line[: LONGEST_LINE // 2]} [...] {line[-LONGEST_LINE // 4 :]}"
    print("eagle3-jax: error:", line, file=sys.stderr)
    return REFUSED


def _print_anything() -> None:
    """Let stdout escape what its encoding lacks (a terminal of ASCII only), and stand in for closed streams."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, io.StringIO())
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


@contextlib.contextmanager
def _logs_on_stderr() -> Iterator[None]:
    """Send the library's notes, and everybody's warnings, to the stderr of now as single lines."""

    class Lines(logging.Formatter):
        def format(self, record: logging.LogRecord) -> str:
            level = "" if record.levelno <= logging.INFO else f"{record.levelname.lower()}: "
            return f"eagle3-jax: {level}{' '.join(record.getMessage().split())}"

    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(Lines())
    own, root = logging.getLogger("eagle3_jax"), logging.getLogger()
    level = own.level
    own.setLevel(logging.INFO)
    root.addHandler(handler)
    logging.captureWarnings(True)
    try:
        yield
    finally:
        logging.captureWarnings(False)
        root.removeHandler(handler)
        own.setLevel(level)


@contextlib.contextmanager
def _native_kernels(args: argparse.Namespace) -> Iterator[None]:
    """The native kernels for as long as a verb runs that computes with a model here, and for no other."""
    from eagle3_jax.native.build import use_native_kernels
    from eagle3_jax.quant import few_rows

    before = few_rows.in_use()
    use_native_kernels(not args.no_native and args.run not in [verb.run for verb in WITHOUT_KERNELS])
    try:
        yield
    finally:
        few_rows.use(before)


def _start_jax(args: argparse.Namespace) -> None:
    """Start the back end and turn on the persistent compilation cache.

    JAX's own environment variables win over the defaults here, and flags win over both.
    """
    import jax

    import eagle3_jax.api  # noqa: F401 - what every verb needs, while an interrupt still ends the process at once

    if args.no_compilation_cache:
        jax.config.update("jax_enable_compilation_cache", False)
    elif args.compilation_cache is not None or "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        given = args.compilation_cache
        folder = Path("~/.cache/eagle3_jax/xla" if given is None else given)
        try:
            folder = user_cache() / "xla" if given is None else folder.expanduser()
            folder.mkdir(parents=True, exist_ok=True)
            if not os.access(folder, os.W_OK | os.X_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        except (OSError, RuntimeError) as error:  # RuntimeError: nobody knows the home folder
            fault = f"compilation cache {folder}: {getattr(error, 'strerror', None) or error}"
            if given is not None:
                raise Eagle3Error(f"{fault}; give a folder that can be written") from error
            logging.getLogger(__name__).warning("%s: compiling without it", fault)
        else:
            jax.config.update("jax_compilation_cache_dir", str(folder))
    # Everything is worth keeping: at start-up the many small programs cost as much as the two big ones.
    if "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS" not in os.environ:
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    if "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES" not in os.environ:
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    try:
        jax.devices()
    except RuntimeError as error:
        raise Eagle3Error(f"JAX finds no device: {str(error).partition(chr(10))[0]}") from error

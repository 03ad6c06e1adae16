"""Files as every checkpoint format needs them: mapped, strict JSON, and written whole or not at all."""

import json
import mmap
import os
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from eagle3_jax.errors import Eagle3Error


def write_json_atomic(path: str | os.PathLike[str], value: Any) -> None:
    """Write JSON, indented, atomically: an interrupted write leaves the old file whole.

    Args:
        path: the file; its folder must exist.
        value: anything JSON can say; NaN and infinity it cannot.

    Raises:
        Eagle3Error: not expressible in JSON, or the file cannot be written.
    """
    try:
        text = json.dumps(value, indent=2, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise Eagle3Error(f"{path}: cannot be written as JSON: {error}") from error
    with atomic_file(Path(path)) as file:
        file.write(text.encode() + b"\n")


def read_json(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read a JSON file that holds an object.

    Raises:
        Eagle3Error: the file cannot be read, is not UTF-8 JSON, repeats a key, or holds something else.
    """
    value = read_json_value(path)
    if not isinstance(value, dict):
        raise Eagle3Error(f"{path}: holds a JSON {type(value).__name__}; an object {{...}} is needed")
    return value


def read_json_value(path: str | os.PathLike[str]) -> Any:
    """Read any JSON file.

    Raises:
        Eagle3Error: the file cannot be read, is not UTF-8 JSON, or repeats a key.
    """
    try:
        data = Path(path).read_bytes()
    except (OSError, ValueError) as error:
        raise Eagle3Error(f"{path}: cannot be read: {reason(error)}") from error
    return parse_json(data, str(path))


def parse_json(data: bytes, where: str) -> Any:
    """Parse UTF-8 JSON strictly: no key may appear twice.

    Args:
        data: the text.
        where: its name for messages.

    Raises:
        Eagle3Error: not UTF-8, not JSON, nested too deeply, or a repeated key.
    """
    try:
        return json.loads(data.decode("utf-8"), object_pairs_hook=_unique)
    except UnicodeDecodeError as error:
        raise Eagle3Error(f"{where}: not UTF-8 text (byte {error.start}); JSON is needed") from error
    except (ValueError, RecursionError) as error:
        raise Eagle3Error(f"{where}: not valid JSON: {error}") from error


def map_file(path: Path) -> mmap.mmap:
    """Map a whole file read-only.

    Raises:
        Eagle3Error: it is missing, empty, not a regular file, or cannot be read.
    """
    if not os.path.isfile(path):
        fault = "is not a regular file" if os.path.exists(path) else "no such file"
        raise Eagle3Error(f"{path}: {fault}; give the path of a checkpoint file")
    try:
        with open(path, "rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:  # ValueError: an empty file cannot be mapped
        raise Eagle3Error(f"{path}: cannot be read: {reason(error)}") from error


def user_cache() -> Path:
    """The package's folder in the user's cache folder; it need not exist.

    Raises:
        RuntimeError: nobody knows the home folder.
    """
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "eagle3_jax"


def quote(value: object) -> str:
    """`repr`, cut to 80 characters: names in messages come from files and may be anything."""
    try:
        text = repr(value)
    except RecursionError:
        text = "something nested too deeply"
    return text if len(text) <= 80 else text[:77] + "..."


def reason(error: Exception) -> str:
    """The system's words for a failed file operation, without the path."""
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


def _unique(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key, value in pairs:
        if key in result:
            raise ValueError(f"key {quote(key)} appears twice")
        result[key] = value
    return result


@contextmanager
def refusing_io(path: str | os.PathLike[str]) -> Iterator[None]:
    """Turn what the system says against a path (no permission, no folder, no space) into one line.

    Raises:
        Eagle3Error: instead of any `OSError`.
    """
    try:
        yield
    except OSError as error:
        raise Eagle3Error(f"{error.filename or path}: {reason(error)}; give a path that can be used") from error


@contextmanager
def atomic_file(path: Path) -> Iterator[BinaryIO]:
    """Open a new binary file that takes its name only once it is complete and on disk.

    Where the name is a link, the file behind it is replaced.

    Raises:
        Eagle3Error: the file cannot be written, or the name belongs to a device or a pipe; the old one, if any,
            is whole.
    """
    try:
        path = Path(os.path.realpath(path))
    except ValueError as error:  # a NUL character
        raise Eagle3Error(f"{path}: cannot be written: {error}") from error
    if os.path.exists(path) and not os.path.isfile(path):
        raise Eagle3Error(f"{path}: cannot be written: it is no regular file; give the name of a file")
    temporary = path.parent / f".{path.name}.{uuid.uuid4().hex[:8]}.tmp"
    try:
        # Not tempfile: its files are private to the user, and the result should follow the umask.
        with open(temporary, "xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except (OSError, ValueError) as error:
        raise Eagle3Error(f"{path}: cannot be written: {reason(error)}") from error
    finally:
        with suppress(OSError, ValueError):
            temporary.unlink(missing_ok=True)

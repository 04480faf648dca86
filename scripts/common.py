"""
What all scripts share: errors in one line, files, optional packages. Standard library only.
"""
import importlib
import json
import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


class Error(Exception):
    """Bad input, or a program that failed. The message is one line."""


def run(main):
    """Runs main(): an Error becomes the line `error: ...` and exit code 1; Ctrl-C exit code 130."""
    try:
        main()
    except Error as e:
        sys.exit(f"error: {e}")
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:  # the reader of stdout has gone; nothing is left to be flushed at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except OSError as e:
        sys.exit(f"error: {f'{e.filename}: ' if e.filename else ''}{e.strerror or e}")


def package(name):
    """Imports an optional package. An Error if it is missing."""
    try:
        return importlib.import_module(name)
    except ImportError as e:
        wanted = (e.name or name).partition(".")[0]
        raise Error(f"Python package {wanted} is missing: pip install -c scripts/requirements.txt {wanted}")


def read_json(path):
    """The JSON object in a file. An Error if it cannot be read or is something else."""
    try:
        value = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as e:
        raise Error(f"{path}: {e.strerror if isinstance(e, OSError) else f'not JSON: {e}'}")
    if not isinstance(value, dict):
        raise Error(f"{path}: not a JSON object")
    return value


def write_file(path, text):
    """Replaces a file, or leaves it as it was."""
    new = f"{path}.tmp"
    try:
        with open(new, "w", encoding="utf-8") as f:
            f.write(text)
            f.flush()
            os.fsync(f.fileno())
        os.replace(new, path)
    except OSError as e:
        raise Error(f"{path}: cannot write: {e.strerror}")


def named_files(arguments):
    """[(name, path)] of arguments NAME=PATH, or PATH, which is its own name."""
    pairs = [a.split("=", 1) if "=" in a else (a, a) for a in arguments]
    return [(name, Path(path)) for name, path in pairs]

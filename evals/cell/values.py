"""What may pass between a completion and its test: plain values, by value, a line of JSON each.

None, bool, int, float, complex, str, bytes, list, tuple, set, frozenset and dict arrive as just those types, whatever
subclass was sent. Nothing else passes, so no object of the completion is ever asked by the test whether it is equal.
The sender of a line is not trusted: JSON builds nothing but plain values, numbers are hexadecimal (a decimal integer
takes quadratic time), and a line has a longest length.

    send(fd, {"value": encode([1, 2.5])}); decode(receive(reader, limit)["value"])
"""

from __future__ import annotations

import json
import os
from typing import BinaryIO

SERIES = {"frozenset": frozenset, "list": list, "set": set, "tuple": tuple}


class TooLong(Exception):
    """A line beyond the longest length."""


def encode(value: object) -> object:
    """A plain value as what `decode` reads; TypeError for anything else."""
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, int):
        return {"int": hex(value)}
    if isinstance(value, float):
        return {"float": float.hex(value)}
    if isinstance(value, complex):
        return {"complex": [float.hex(value.real), float.hex(value.imag)]}
    if isinstance(value, bytes | bytearray):
        return {"bytes": value.hex()}
    if isinstance(value, dict):
        return {"dict": [[encode(key), encode(item)] for key, item in value.items()]}
    for name, kind in SERIES.items():
        if isinstance(value, kind):
            return {name: [encode(item) for item in value]}
    raise TypeError(f"{type(value).__name__} is no plain type")


def decode(coded: object) -> object:
    """The value; ValueError, TypeError, RecursionError or MemoryError where the sender did not use `encode`."""
    if coded is None or isinstance(coded, bool | str):
        return coded
    if not isinstance(coded, dict) or len(coded) != 1:
        raise ValueError("one key, the type, was expected")
    ((kind, content),) = coded.items()
    if kind == "int":
        return int(content, 16)
    if kind == "float":
        return float.fromhex(content)
    if kind == "complex":
        real, imaginary = content
        return complex(float.fromhex(real), float.fromhex(imaginary))
    if kind == "bytes":
        return bytes.fromhex(content)
    if kind == "dict":
        return {decode(key): decode(item) for key, item in content}
    if kind in SERIES:
        return SERIES[kind](decode(item) for item in content)
    raise ValueError("an unknown type")


def send(fd: int, message: dict) -> None:
    line = memoryview(json.dumps(message).encode() + b"\n")
    while line:
        line = line[os.write(fd, line) :]


def receive(reader: BinaryIO, longest: int) -> dict:
    """The next line; EOFError at the end, TooLong, or ValueError or RecursionError where it is no JSON object."""
    line = reader.readline(longest + 1)
    if len(line) > longest:
        raise TooLong(f"more than {longest:,} bytes in one answer")
    if not line.endswith(b"\n"):
        raise EOFError("no answer")
    message = json.loads(line)
    if not isinstance(message, dict):
        raise ValueError("an object was expected")
    return message

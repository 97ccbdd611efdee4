"""The parts of a cell that need no sandbox to be tested: plain values, the list of calls, and the look round.

Laws: what is sent arrives, of just the plain types; the filter answers as listed, by interpreting it; the look round
sees that a process in no cell is in none.
"""

from __future__ import annotations

import io
import json
import math
import platform
import re
import struct
from dataclasses import asdict
from enum import IntEnum
from fractions import Fraction
from pathlib import Path

import pytest

from evals.cell import namespaces, syscalls
from evals.cell.values import TooLong, decode, encode, receive
from evals.trial import Limits

# ---------------------------------------------------------------- values


class Colour(IntEnum):
    RED = 3


class Text(str):
    __eq__ = lambda self, other: True  # noqa: E731
    __hash__ = str.__hash__


PLAIN = [
    None, True, False, 0, -1, 1 << 4000, 0.1, -0.0, 1e308, 5e-324, math.inf, -math.inf, 1 + 2j, "", "Zürich \ud800\0\n",
    b"", b"\xff\0", [], (), set(), frozenset(), {}, [[]], [1, [2.5, ("a", b"b")]], {1: {2: [3]}, (1, 2): {3}},
    {frozenset({1}), "x"}, [None, True, 1, 1.0], {"int": "0x1"}, {"list": []}, {None: None},
]  # fmt: skip


def passed_on(value):
    return decode(json.loads(json.dumps(encode(value))))


def types(value):
    """The type of a value and of all within it."""
    if isinstance(value, dict):
        return dict, [(types(key), types(item)) for key, item in value.items()]
    if isinstance(value, list | tuple):
        return type(value), [types(item) for item in value]
    return type(value)


@pytest.mark.parametrize("value", PLAIN, ids=lambda value: repr(value)[:30])
def test_a_plain_value_arrives(value):
    assert passed_on(value) == value
    assert types(passed_on(value)) == types(value)


def test_nan_and_the_sign_of_zero_arrive():
    assert math.isnan(passed_on(math.nan))
    assert math.copysign(1, passed_on(-0.0)) == -1


@pytest.mark.parametrize("value, plain", [(Colour.RED, int), (Text("a"), str), (bytearray(b"a"), bytes)])
def test_a_subclass_arrives_as_the_plain_type(value, plain):
    assert type(passed_on(value)) is plain


@pytest.mark.parametrize("value", [object(), int, len, range(3), iter([1]), Fraction(1, 2), [object()], {1: len}])
def test_nothing_else_is_sent(value):
    with pytest.raises(TypeError, match="no plain type"):
        encode(value)


@pytest.mark.parametrize(
    "line",
    ["1", "1.5", "[]", "{}", '{"int": 1}', '{"int": "x"}', '{"float": "x"}', '{"float": "0x1p99999"}', '{"list": 1}',
     '{"set": [{"list": []}]}', '{"dict": [[1]]}', '{"dict": {}, "int": "0x1"}', '{"object": []}', '{"bytes": "0"}',
     '{"complex": ["0x1p0"]}', '{"list": [{"module": "os"}]}'],
)  # fmt: skip
def test_what_encode_would_not_write_is_no_value(line):
    with pytest.raises((OverflowError, TypeError, ValueError)):
        decode(json.loads(line))


@pytest.mark.parametrize(
    "content, error",
    [(b"", EOFError), (b'{"value": 1}', EOFError), (b"x" * 99, TooLong), (b"x" * 99 + b"\n", TooLong),
     (b"\n", ValueError), (b"[]\n", ValueError), (b"\xff\n", ValueError), (b"[" * 50 + b"\n", ValueError)],
)  # fmt: skip
def test_a_line_that_is_no_message_is_an_error(content, error):
    with pytest.raises(error):
        receive(io.BytesIO(content), 64)


def test_messages_are_read_one_by_one():
    reader = io.BytesIO(b'{"a": 1}\n{"b": 2}\n')
    assert [receive(reader, 64), receive(reader, 64)] == [{"a": 1}, {"b": 2}]


# ---------------------------------------------------------------- the list of calls


def answered(code: bytes, architecture: int, number: int) -> int:
    """What the filter says to a call: the kernel's interpreter, for the three instructions that are used."""
    steps = list(struct.iter_unpack("=HBBI", code))
    data = struct.pack("=iIQ6Q", number, architecture, 0, *[0] * 6)
    at, loaded = 0, None
    while True:
        kind, yes, no, operand = steps[at]
        at += 1
        if kind == syscalls.RETURN:
            return operand
        if kind == syscalls.LOAD:
            (loaded,) = struct.unpack_from("=I", data, operand)
        else:
            assert kind == syscalls.EQUAL
            at += yes if loaded == operand else no


@pytest.mark.parametrize("machine", syscalls.MACHINES)
def test_the_filter_allows_the_list_and_nothing_else(machine):
    code = syscalls.filter_code(machine)
    column, architecture = syscalls.MACHINES[machine]
    numbers = {row[column] for row in syscalls.ALLOWED.values()} - {None}
    assert {n for n in range(1024) if answered(code, architecture, n) == syscalls.ALLOW} == numbers
    assert {answered(code, architecture, n) for n in range(1024)} == {syscalls.ALLOW, syscalls.EPERM}
    assert {answered(code, architecture, n | 1 << 30) for n in range(1024)} == {syscalls.EPERM}  # x32
    others = {row[1] for row in syscalls.MACHINES.values()} - {architecture} | {0x40000003}  # 32-bit x86
    assert {answered(code, other, n) for other in others for n in range(1024)} == {syscalls.KILL}


HEADERS = {
    "x86_64": "/usr/include/x86_64-linux-gnu/asm/unistd_64.h",
    "aarch64": "/usr/include/asm-generic/unistd.h",
}


@pytest.mark.parametrize("machine", HEADERS)
def test_the_numbers_are_the_kernels(machine):
    """Against the headers, where they are installed."""
    if not (header := Path(HEADERS[machine])).exists():
        pytest.skip(f"no {header} here")
    text = header.read_text()
    known = {name: int(number) for name, number in re.findall(r"#define __NR(?:3264)?_(\w+)\s+(\d+)\s", text)}
    known["newfstatat"] = known.get("newfstatat", known.get("fstatat"))
    column, _ = syscalls.MACHINES[machine]
    for name, row in syscalls.ALLOWED.items():
        assert known.get(name) == row[column], name


def test_no_call_is_allowed_that_makes_a_process_a_socket_or_shared_memory():
    """By name; their numbers follow from the test above."""
    assert not set(syscalls.ALLOWED) & {
        "bpf", "clone", "clone3", "execve", "execveat", "fork", "io_uring_setup", "keyctl", "memfd_create", "mount",
        "mq_open", "pidfd_getfd", "pidfd_open", "prctl", "process_vm_readv", "process_vm_writev", "ptrace", "setns",
        "shmat", "shmget", "socket", "socketpair", "unshare", "userfaultfd", "vfork",
    }  # fmt: skip


# ---------------------------------------------------------------- the look round


@pytest.mark.skipif(platform.system() != "Linux", reason="the look round asks Linux")
def test_a_process_in_no_cell_sees_that_it_is_in_none():
    """So a part of the sandbox that did not take, for whatever reason, is seen before any code runs."""
    assert set(namespaces.faults(asdict(Limits()))) >= {
        "other folders than /python and /tmp", "/python cannot be read", "not the first process of its namespace",
        "in a group with others", "another user", "new privileges", "the host's name", "environment variables",
        "other limits",
    }  # fmt: skip

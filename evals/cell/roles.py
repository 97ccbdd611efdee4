"""The two programs of a trial, each in a cell of its own: the completion, and the test that asks it.

The completion has never seen the test, the expected values or the canonical solution, and its process says nothing
but answers to calls. The test's process runs no line of the completion: it calls it over a pipe, compares plain values
(values.py) and alone may say `passed`. So a completion can end its process, write to every open file, patch every
module, or return an object equal to everything, and has still only answered wrongly.

    completion(job, {"requests": 5, "answers": 6}); test(job, {"requests": 5, "answers": 6, "word": 7})
"""

from __future__ import annotations

import os
import random
import traceback
from collections.abc import Callable

from evals.cell.values import TooLong, decode, encode, receive, send

REQUEST_BYTES = 64 << 20  # a request comes from the test, which is trusted
NO_MEMORY = b'{"raised": ["MemoryError", ""]}\n'  # made before there is none left
REASON_CHARACTERS = 200


class NoAnswer(BaseException):
    """Why a call of the completion has no value. No `except Exception` of a test may take it for its own."""

    def __init__(self, verdict: str, reason: str) -> None:
        super().__init__(reason)
        self.verdict, self.reason = verdict, reason


def completion(job: dict, channels: dict[str, int]) -> None:
    """Run job["code"], then answer each call of job["entry_point"] until there are no more."""
    function = define(job)
    with os.fdopen(channels["requests"], "rb") as requests:
        while True:
            try:
                request = receive(requests, REQUEST_BYTES)
            except EOFError:
                return
            answer(function, request, channels["answers"])


def define(job: dict) -> Callable:
    """The function that the code defines, or one that raises what the code raised."""
    space: dict = {"__name__": "completion"}
    try:
        exec(compile(job["code"], "<completion>", "exec"), space)
        return space[job["entry_point"]]
    except BaseException as exc:
        raised = exc

    def undefined(*arguments, **named):
        raise raised

    return undefined


def answer(function: Callable, request: dict, fd: int) -> None:
    try:
        send(fd, {"value": encode(function(*decode(request["arguments"]), **decode(request["named"])))})
    except MemoryError:
        os.write(fd, NO_MEMORY)
    except BaseException as exc:
        send(fd, {"raised": [type(exc).__name__, str(exc)[:REASON_CHARACTERS]]})


def test(job: dict, channels: dict[str, int]) -> None:
    """Run the task's own code, for the helpers that tests use, then its check; write one word on the result.

    The prompt may define such a helper, so it runs, made whole by the canonical solution. A test that calls the
    solution by its name so gets the canonical one: HumanEval/33 compares with that (the official harness has the
    completion under the name too, and passes whatever is equal to itself).
    """
    verdict, reason = examine(job, channels)
    send(channels["word"], {"verdict": verdict, "reason": reason})


def examine(job: dict, channels: dict[str, int]) -> tuple[str, str]:
    random.seed(0)  # some tests draw their cases
    space: dict = {"__name__": "test"}
    calls = 0
    with os.fdopen(channels["answers"], "rb") as answers:

        def candidate(*arguments, **named):
            nonlocal calls
            calls += 1
            return ask(arguments, named, channels["requests"], answers, job["limits"]["answer_bytes"])

        try:
            exec(compile(job["code"], "<task>", "exec"), space)
            exec(compile(job["test"], "<test>", "exec"), space)
            check = space["check"]
        except Exception as exc:
            return "refused", f"the task's own code: {type(exc).__name__}: {exc}"
        try:
            check(candidate)
        except NoAnswer as exc:
            return exc.verdict, exc.reason
        except AssertionError as exc:
            return "failed", f"wrong answer: {test_line(exc, job['test'])}"
        except Exception as exc:  # of the test, at a value of a wrong type
            return "failed", f"{type(exc).__name__} in the test: {test_line(exc, job['test'])}"
    return ("passed", "") if calls else ("refused", "the test asks the completion nothing")


def ask(arguments: tuple, named: dict, requests: int, answers, longest: int) -> object:
    """One call of the completion: its value, or NoAnswer. Whatever comes was written by code that is not trusted."""
    try:
        send(requests, {"arguments": encode(arguments), "named": encode(named)})
        message = receive(answers, longest)
        if "raised" in message:
            kind, text = (str(part)[:REASON_CHARACTERS] for part in message["raised"])
            raise NoAnswer("out_of_memory" if kind == "MemoryError" else "failed", f"{kind}: {text}")
        return decode(message["value"])
    except TooLong as exc:
        raise NoAnswer("output_limit", str(exc)) from None
    except (EOFError, BrokenPipeError):
        raise NoAnswer("failed", "the completion ended its process") from None
    except (KeyError, MemoryError, OverflowError, RecursionError, TypeError, ValueError) as exc:
        raise NoAnswer("failed", f"no plain value was answered: {type(exc).__name__}") from None


def test_line(exc: BaseException, test: str) -> str:
    """The innermost line of the test where the exception passed."""
    numbers = [frame.lineno for frame in traceback.extract_tb(exc.__traceback__) if frame.filename == "<test>"]
    lines = test.splitlines()
    return lines[numbers[-1] - 1].strip()[:REASON_CHARACTERS] if numbers else str(exc)[:REASON_CHARACTERS]


ROLES = {"completion": completion, "test": test}

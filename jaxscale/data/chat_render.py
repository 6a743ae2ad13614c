"""Runs a chat template in Jinja's sandbox: in this process, or in one that is killed when it takes too long.

A template is a program, and a thread cannot be stopped if it loops. So `Renderer` starts this file as a process, with
limits on memory and time. It imports only the standard library and Jinja, so that it starts fast.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import select
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import jinja2
    import jinja2.parser

GENERATED, GENERATED_END = "\ufdd2", "\ufdd3"
"""Markers around the assistant's turns; noncharacters of Unicode, which occur in no text."""

MEMORY = 2**30
"""The most bytes of memory of the process."""

OUTPUT = 2**24
"""The most characters of a rendered conversation."""


class TemplateFault(Exception):
    """A template that is not valid Jinja, or does not accept these messages; the message says why."""


class TooSlow(Exception):
    """A template that did not finish in time."""


@functools.lru_cache(16)
def compiled(text: str) -> jinja2.Template:
    """Return a template compiled in a sandbox, with the functions that Hugging Face's templates call.

    Args:
      text: the template.

    Raises:
      TemplateFault: it is not valid Jinja.
    """
    import jinja2
    import jinja2.ext
    import jinja2.sandbox

    class Generation(jinja2.ext.Extension):
        """The tag `{% generation %}...{% endgeneration %}` around the assistant's turns."""

        tags = {"generation"}

        def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return jinja2.nodes.CallBlock(self.call_method("_marked"), [], [], body).set_lineno(line)

        @staticmethod
        def _marked(caller: Callable[[], str]) -> str:
            return f"{GENERATED}{caller()}{GENERATED_END}"

    def refuse(message: str) -> None:
        raise jinja2.TemplateError(message)

    def tojson(x: object, ensure_ascii: bool = False, **options: Any) -> str:
        return json.dumps(x, ensure_ascii=ensure_ascii, **options)  # Jinja's own filter escapes HTML

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    try:
        return environment.from_string(text)
    except (jinja2.TemplateError, RecursionError, MemoryError, OverflowError) as e:
        raise TemplateFault(str(e) or type(e).__name__) from e


def render(text: str, names: Mapping[str, Any]) -> str:
    """Return what a template writes.

    Args:
      text: the template.
      names: its variables by name.

    Raises:
      TemplateFault: it is not valid Jinja, or does not accept these variables.
    """
    import jinja2

    try:
        return compiled(text).render(**names)
    except (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as e:
        raise TemplateFault(str(e)) from e
    except (RecursionError, MemoryError) as e:
        raise TemplateFault("it calls itself endlessly" if isinstance(e, RecursionError) else "out of memory") from e


class Renderer:
    """`render` in another process, which is started at first use and again after it was killed.

    Args:
      seconds: time limit of rendering one text.
    """

    def __init__(self, seconds: float):
        self.seconds = seconds
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def render(self, text: str, names: Mapping[str, Any]) -> str:
        """Return what a template writes.

        Args:
          text: the template.
          names: its variables by name; values must be JSON.

        Raises:
          TemplateFault: it is not valid Jinja, or does not accept these variables.
          TooSlow: it, or others before it, took longer than `seconds`.
        """
        return self._ask([text, dict(names)])

    def check(self, text: str) -> None:
        """Check that a template can be compiled, which also computes its constants.

        Args:
          text: the template.

        Raises:
          TemplateFault: it is not valid Jinja.
          TooSlow: compiling took longer than `seconds`.
        """
        self._ask([text, None])

    def _ask(self, task: list[Any]) -> str:
        line = json.dumps(task).encode() + b"\n"
        if not self._lock.acquire(timeout=2 * self.seconds):
            raise TooSlow
        try:
            if self._process is None or self._process.poll() is not None:
                self._process = _start()
                self._answer(b'["", {}]\n', 60.0)  # importing Jinja does not count towards the limit
            answer = json.loads(self._answer(line, self.seconds))
        except BaseException:
            self.close()
            raise
        finally:
            self._lock.release()
        if "fault" in answer:
            raise TemplateFault(answer["fault"])
        return answer["text"]

    def close(self) -> None:
        """End the process."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                with contextlib.suppress(OSError):
                    pipe.close()  # type: ignore[union-attr]

    def _answer(self, line: bytes, seconds: float) -> bytes:
        """Send a line to the process and return its answer."""
        assert self._process is not None and self._process.stdin is not None and self._process.stdout is not None
        source, sink = self._process.stdin.fileno(), self._process.stdout.fileno()
        until, rest, out = time.monotonic() + seconds, memoryview(line), bytearray()
        poll = select.poll()
        poll.register(sink, select.POLLIN)
        poll.register(source, select.POLLOUT)
        while not out.endswith(b"\n"):
            ready = {file for file, _ in poll.poll(max(0.0, until - time.monotonic()) * 1000)}
            if not ready:
                raise TooSlow
            if source in ready:
                try:
                    rest = rest[os.write(source, rest[:4096]) :]  # as much as a writable pipe takes without blocking
                except BrokenPipeError:
                    raise TemplateFault("its process ended") from None
                if not rest:
                    poll.unregister(source)
            if sink in ready:
                data = os.read(sink, 1 << 16)
                if not data:
                    raise TemplateFault("its process ended, perhaps out of memory")
                out += data
        return bytes(out)


def _start() -> subprocess.Popen[bytes]:
    # -P: this file's folder, which has a module `text`, is not in sys.path. New session: Ctrl-C does not reach it.
    command = [sys.executable, "-P", __file__]
    return subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True
    )


def _main() -> None:
    """Read templates with their variables, one per line, and write a line for each."""
    with contextlib.suppress(ImportError):  # Windows has no `resource`
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    for line in sys.stdin.buffer:
        try:
            template, names = json.loads(line)
            text = "" if names is None and compiled(template) else render(template, names)
            answer = {"text": text} if len(text) <= OUTPUT else {"fault": f"it writes more than {OUTPUT} characters"}
        except TemplateFault as e:
            answer = {"fault": str(e)[:1000]}
        sys.stdout.buffer.write(json.dumps(answer).encode() + b"\n")
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    _main()

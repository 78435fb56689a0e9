"""Calls between the two processes, and the objects that stand for those of the other process."""

import builtins
import importlib
import io
import json
import operator
import sys
import types
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from itertools import zip_longest
from typing import Any

MAX_OUTPUT = 1 << 20
"""Characters of a program's output that tests can read, for each call."""

SCALARS = (bool, int, float, str, type(None))
SEQUENCES = ("builtins.list", "builtins.tuple", "builtins.set", "builtins.frozenset", "collections.deque")
MAPPINGS = ("builtins.dict", "collections.OrderedDict", "collections.Counter", "collections.defaultdict")
VALUES: dict[str, Callable[[Any], Sequence[Any]]] = {
    "builtins.bytes": lambda x: [x.hex()],
    "builtins.bytearray": lambda x: [x.hex()],
    "builtins.complex": lambda x: [x.real, x.imag],
    "builtins.range": lambda x: [x.start, x.stop, x.step],
    "decimal.Decimal": lambda x: [str(x)],
    "fractions.Fraction": lambda x: [x.numerator, x.denominator],
    "datetime.date": lambda x: [x.year, x.month, x.day],
    "datetime.datetime": lambda x: [x.year, x.month, x.day, x.hour, x.minute, x.second, x.microsecond],
    "datetime.time": lambda x: [x.hour, x.minute, x.second, x.microsecond],
    "datetime.timedelta": lambda x: [x.days, x.seconds, x.microseconds],
}
"""Types that travel by value -> the arguments of their constructors. Aware times are passed as `Remote`."""
BASES: tuple[Any, ...] = (int, float, complex, str, bytes, list, tuple, dict, set, frozenset)
"""Types whose subclasses in a program compare by their content."""


def path_of(value: Any) -> str:
    """`module.qualname` of a class or function."""
    return f"{value.__module__}.{value.__qualname__}"


def in_library(value: Any) -> bool:
    """Whether a value is a class or function of the standard library."""
    if not isinstance(value, type | types.FunctionType | types.BuiltinFunctionType):
        return False
    return str(value.__module__).partition(".")[0] in sys.stdlib_module_names


def find(path: str) -> Any:
    """The standard library's object of a path; None if there is none or its module is not loaded yet."""
    module, _, name = path.rpartition(".")
    return getattr(sys.modules.get(module), name, None) if module.partition(".")[0] in sys.stdlib_module_names else None


class Disconnected(BaseException):
    """The other process has ended."""


class Peer:
    """The connection to the other process.

    Args:
        reader, writer: binary files; messages are lines of JSON.
        operations: what else the other process may ask for; None in the tests process, which trusts nothing it gets and
            gives access only to what its tests passed on.
    """

    def __init__(self, reader: Any, writer: Any, operations: Mapping[str, Callable[..., Any]] | None = None):
        self._reader, self._writer, self._operations = reader, writer, operations or {}
        self._trusted = operations is None
        self._exported: list[Any] = []  # objects that the other process knows by their index
        self._numbers: dict[int, int] = {}  # id of an object -> its index
        self._remotes: dict[int, Remote] = {}  # objects of the other process by their number
        self._exceptions: dict[int, type] = {}  # classes of the other process by their number

    def request(self, operation: str, *arguments: Any) -> Any:
        """The result of an operation in the other process, which may call back. Its exceptions are raised here."""
        self._send(["request", operation, self._encode(arguments)])
        while True:
            kind, *message = self._receive()
            if kind == "request":
                self._serve(*message)
                continue
            output, *message = message
            sys.stdout.write(str(output)[:MAX_OUTPUT])
            if kind == "error":
                raise self._exception(*message)
            value, after = message
            for before, now in zip(arguments, self._decode(after), strict=True):
                update(before, now)
            return self._decode(value)

    def serve_forever(self) -> None:
        """Answer requests until the other process ends."""
        while True:
            self._serve(*self._receive()[1:])

    def _send(self, message: Any) -> None:
        try:
            self._writer.write(json.dumps(message).encode() + b"\n")
            self._writer.flush()
        except OSError:
            raise Disconnected from None

    def _receive(self) -> Any:
        if not (line := self._reader.readline()):
            raise Disconnected
        return json.loads(line)

    def _serve(self, operation: str, encoded: Any) -> None:
        try:
            arguments = self._decode(encoded)
            value = self._operate(operation, *arguments)
            reply = ["result", self._output(), self._encode(value), self._encode(arguments)]
        except Disconnected:
            raise
        except BaseException as error:
            reply = ["error", self._output(), self._encode(type(error)), *self._details(error)]
        self._send(reply)

    def _details(self, error: BaseException) -> list[Any]:
        try:
            return [self._encode(error.args), self._encode(vars(error))]
        except Exception:
            return [self._encode(()), self._encode({})]

    def _output(self) -> str:
        """What was printed since the last message, for tests that capture the output."""
        if self._trusted or not isinstance(sys.stdout, io.StringIO):
            return ""
        text = sys.stdout.getvalue()[:MAX_OUTPUT]
        sys.stdout.seek(0)
        sys.stdout.truncate()
        return text

    def _operate(self, operation: str, *arguments: Any) -> Any:
        if operation == "call":
            function, positional, named = arguments
            return function(*positional, **named)
        if operation == "special":
            return special(*arguments)
        if operation == "content":
            return content(*arguments)
        if operation in ("getattr", "setattr", "delattr"):
            value, name = arguments[:2]
            if self._trusted and (name.startswith("_") or type(value).__module__ != "__main__"):
                raise AttributeError(f"{name} of an object of the tests is out of reach")
            return getattr(builtins, operation)(*arguments)
        return self._operations[operation](*arguments)

    # Each value is a scalar as it is, or a list whose first element says how the others are decoded.

    def _encode(self, value: Any) -> Any:
        cls = type(value)
        if cls in SCALARS:
            return value
        if cls is Remote:
            return ["yours", object.__getattribute__(value, "_number")]
        path = path_of(cls)
        if path in SEQUENCES:
            return [path, *map(self._encode, value)]
        if path in MAPPINGS:
            return [path, *([self._encode(k), self._encode(v)] for k, v in value.items())]
        if path in VALUES and getattr(value, "tzinfo", None) is None:
            return [path, *VALUES[path](value)]
        if cls is types.ModuleType and value.__name__.partition(".")[0] in sys.stdlib_module_names:
            return ["module", value.__name__]
        if isinstance(value, type) and issubclass(value, BaseException):
            if (theirs := next((n for n, known in self._exceptions.items() if known is value), None)) is not None:
                return ["yours", theirs]
            return ["exception", self._export(value), *map(path_of, value.__mro__)]
        if self._trusted and in_library(value):
            return ["library", value.__module__, value.__qualname__]
        return ["mine", self._export(value)]

    def _export(self, value: Any) -> int:
        number = self._numbers.setdefault(id(value), len(self._exported))
        if number == len(self._exported):
            self._exported.append(value)
        return number

    def _decode(self, encoded: Any) -> Any:
        if type(encoded) in SCALARS:
            return encoded
        kind, *parts = encoded
        if kind in SEQUENCES:
            return self._class(kind)(map(self._decode, parts))
        if kind in MAPPINGS:
            items = {self._decode(key): self._decode(value) for key, value in parts}
            return items if kind == "collections.defaultdict" else self._class(kind)(items)
        if kind in VALUES and all(type(part) in SCALARS for part in parts):
            return getattr(self._class(kind), "fromhex", self._class(kind))(*parts)
        if kind == "mine":
            return self._remotes.setdefault(parts[0], Remote(self, *parts))  # one for each object, so that `is` works
        if kind == "yours":
            return self._exported[parts[0]]
        if kind == "exception":
            return self._exception_class(*parts)
        if kind == "module" and parts[0].partition(".")[0] in sys.stdlib_module_names:
            return importlib.import_module(parts[0])
        if kind == "library" and not self._trusted:
            return operator.attrgetter(parts[1])(importlib.import_module(parts[0]))
        raise ValueError(f"found a value of kind '{kind}'")

    @staticmethod
    def _class(path: str) -> Any:
        module, _, name = path.rpartition(".")
        return getattr(importlib.import_module(module), name)

    def _exception_class(self, number: int, *paths: str) -> type:
        """The class of that path in the standard library, or a new one derived from the first base that is there."""
        known = ((path, found) for path in paths if isinstance(found := find(path), type))
        path, base = next((path, cls) for path, cls in known if issubclass(cls, BaseException))
        if path == paths[0]:
            return base
        return self._exceptions.setdefault(number, type(paths[0].rpartition(".")[2], (base,), {}))

    def _exception(self, encoded_class: Any, arguments: Any, attributes: Any) -> BaseException:
        cls, arguments = self._decode(encoded_class), self._decode(arguments)
        try:
            error = cls(*arguments)
        except TypeError:  # a constructor with other arguments than those that it stores
            error = cls.__new__(cls, *arguments)
        vars(error).update(self._decode(attributes))
        return error


def update(before: Any, now: Any) -> Any:
    """What an argument is after a call: a list, set or dictionary changes in place."""
    if type(before) is not type(now):
        return now
    if isinstance(before, tuple):
        return tuple(map(update, before, now))
    if isinstance(before, list):
        before[:] = [update(old, new) for old, new in zip_longest(before, now)][: len(now)]
    elif isinstance(before, dict):
        items = {key: update(before.get(key), new) for key, new in now.items()}
        before.clear()
        before.update(items)
    elif isinstance(before, bytearray):
        before[:] = now
    elif isinstance(before, set):
        before.clear()
        before.update(now)
    elif isinstance(before, deque):
        before.clear()
        before.extend(now)
    else:
        return now
    return before


UNARY = {
    "iter": iter,
    "next": next,
    "len": len,
    "bool": bool,
    "str": str,
    "repr": repr,
    "hash": hash,
    "reversed": reversed,
}
ITEMS = ("getitem", "setitem", "delitem", "contains")
COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge")
BINARY = ("add", "sub", "mul", "matmul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor", "lshift", "rshift")
ARITHMETIC = ("neg", "pos", "abs", "invert", *BINARY, *(f"r{name}" for name in BINARY))


def special(value: Any, name: str, arguments: Sequence[Any]) -> Any:
    """Apply the operator of a special method."""
    if name in UNARY:
        return UNARY[name](value)
    if name == "instancecheck":
        return isinstance(arguments[0], value)
    if name in ("enter", "exit"):
        return getattr(type(value), f"__{name}__")(value, *arguments)
    if name[0] == "r" and name[1:] in BINARY:
        return getattr(operator, f"__{name[1:]}__")(arguments[0], value)
    return getattr(operator, f"__{name}__")(value, *arguments)


def content(value: Any) -> Any:
    """The plain data of an object whose class derives from a builtin type; else the object."""
    base = next((base for base in BASES if isinstance(value, base)), None)
    return base(value) if base else value


class Remote:
    """An object of the other process.

    It answers for itself, but it never equals plain data, nor becomes plain data by arithmetic with it: an object that
    claims to equal everything is not the number that a test expects. Subclasses of builtin types compare by content.
    """

    __slots__ = ("_number", "_peer")

    def __init__(self, peer: Peer, number: int):
        object.__setattr__(self, "_peer", peer)
        object.__setattr__(self, "_number", number)

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return self._peer.request("call", self, arguments, named)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name not in ("__name__", "__doc__"):
            raise AttributeError(name)
        return self._peer.request("getattr", self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._peer.request("setattr", self, name, value)

    def __delattr__(self, name: str) -> None:
        self._peer.request("delattr", self, name)


def forwarding(name: str) -> Callable[..., Any]:
    """A special method that applies its operator in the other process."""
    return lambda self, *arguments: self._peer.request("special", self, name, arguments)


def mixing(name: str) -> Callable[..., Any]:
    """A comparison or an arithmetic operator, which has to keep objects and plain data apart."""

    def method(self: Any, *arguments: Any) -> Any:
        plain = self._peer.request("content", self)
        if type(plain) is not Remote:
            return special(plain, name, arguments)
        if not all(type(argument) is Remote for argument in arguments) and name in COMPARISONS:
            return NotImplemented
        value = self._peer.request("special", self, name, arguments)
        if name in ARITHMETIC and type(value) is not Remote and [*map(type, arguments)] != [Remote]:
            raise TypeError(f"an object of the program became {type(value).__name__} in arithmetic with plain data")
        return value

    return method


for _name in (*UNARY, *ITEMS, "enter", "exit", "instancecheck"):
    setattr(Remote, f"__{_name}__", forwarding(_name))
for _name in (*COMPARISONS, *ARITHMETIC):
    setattr(Remote, f"__{_name}__", mixing(_name))

"""Calls between two processes that do not trust each other: plain values cross as copies, others as handles.

One JSON line per message. A value that compares, adds or counts as its owner likes never crosses: subclasses
of int, str, list, ... arrive as their base, other objects as a `Remote`, whose operators the far side
answers only towards other objects of its own. So the answer's code cannot equal what it does not know.
Each side lets the other call what it has been handed, and read public attributes of plain objects.
"""

import builtins
import collections
import decimal
import fractions
import json
import os
import types
from collections.abc import Callable, Sequence
from typing import Any

CONTAINERS = (list, dict, set, bytearray, collections.deque)
_WHOLE = (type(None), bool, int, float, str)
_SEQUENCES: dict[str, type] = {
    kind.__name__: kind for kind in (tuple, set, frozenset, collections.deque, list)
}
_OPERATORS = (
    *("eq", "ne", "lt", "le", "gt", "ge", "add", "sub", "mul", "truediv", "floordiv", "mod", "pow"),
    *("and", "or", "xor", "matmul"),
)
_ASKED = ("len", "iter", "next", "bool", "str", "repr", "getitem", "setitem", "delitem", "enter", "exit")


class Far(Exception):
    """What the far side raised, where it is no exception of Python's own."""


class Lost(BaseException):
    """The far side is gone, or says what makes no sense."""


class Link:
    """One end. `serve` answers until the far side goes; `ask` puts a question, answering those in between."""

    def __init__(self, read: int, write: int, longest: int) -> None:
        self._read, self._write, self._longest = read, write, longest
        self._buffer = bytearray()
        self.lost = False  # stays so, whoever catches Lost
        self._shown: dict[int, Any] = {}  # what the far side holds handles of
        self._raised: dict[str, type[Exception]] = {}
        self.functions: dict[str, Callable[..., Any]] = {}  # what the far side may ask for by name

    # messages

    def ask(self, what: str, *arguments: Any, given: Sequence[Any] = ()) -> Any:
        """The far side's answer. Raises what it raised; Lost where there is none.

        Those of the `given` lists, dicts and sets that the far side changed in place are changed here too.
        """
        self._send({"ask": what, "of": [self.pack(value) for value in arguments]})
        while "ask" in (message := self._receive()):
            self._answer(message)
        try:
            if "raised" in message:
                kind = self.exception(str(message["raised"]), message["bases"])
                raise kind.__new__(kind, *self.unpack(message["with"]))
            for value, changed in zip(given, message.get("changed", ()), strict=False):
                if changed is not None:
                    _replace(value, self.unpack(changed))
            return self.unpack(message["value"])
        except LookupError as error:
            if "raised" in message and "with" in message:
                raise
            raise self._gone() from error

    def serve(self) -> None:
        while True:
            self._answer(self._receive())

    def _answer(self, message: dict[str, Any]) -> None:
        try:
            what, packed = message["ask"], message["of"]
            arguments = [self.unpack(value) for value in packed]
            value = (self.functions.get(what) or getattr(self, f"_do_{what}"))(*arguments)
            reply = {"value": self.pack(value)}
            if what == "call":
                given = [*arguments[1], *arguments[2].values()]
                before = [*packed[1]["v"], *(pair[1] for pair in packed[2]["v"])]
                now = [self.pack(each) if isinstance(each, CONTAINERS) else None for each in given]
                if any(new is not None and new != old for new, old in zip(now, before, strict=True)):
                    reply["changed"] = now
        except Exception as error:
            bases = [kind.__name__ for kind in type(error).__mro__ if kind.__module__ == "builtins"]
            reply = {"raised": type(error).__name__, "bases": bases, "with": self.pack(list(error.args))}
        self._send(reply)

    def _send(self, message: Any) -> None:
        data = json.dumps(message).encode() + b"\n"
        try:
            while data:
                data = data[os.write(self._write, data) :]
        except OSError as error:
            raise self._gone() from error

    def _gone(self) -> Lost:
        self.lost = True
        return Lost()

    def _receive(self) -> dict[str, Any]:
        while b"\n" not in self._buffer:
            chunk = os.read(self._read, 1 << 16)
            if not chunk or len(self._buffer) > self._longest:
                raise self._gone()
            self._buffer += chunk
        line, _, rest = self._buffer.partition(b"\n")
        self._buffer = rest
        try:
            message = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise self._gone() from error
        if not isinstance(message, dict):
            raise self._gone()
        return message

    # values

    def pack(self, value: Any) -> Any:
        """What JSON holds of a value: itself where it is plain, a tagged copy, or a handle."""
        if value is None or isinstance(value, bool):
            return value
        if isinstance(value, int):
            number = int.__add__(value, 0)
            return number if abs(number) < 1 << 62 else {"t": "int", "v": hex(number)}
        if isinstance(value, float):
            return float.__add__(value, 0.0)
        if isinstance(value, str):
            return str.__str__(value)
        if isinstance(value, dict):
            return {"t": "dict", "v": [[self.pack(k), self.pack(v)] for k, v in dict.items(value)]}
        for name, kind in _SEQUENCES.items():
            if isinstance(value, kind):
                return {"t": name, "v": [self.pack(item) for item in kind.__iter__(value)]}  # type: ignore[attr-defined]
        if isinstance(value, bytes | bytearray):
            return {"t": "bytes" if isinstance(value, bytes) else "bytearray", "v": bytes(value).hex()}
        if isinstance(value, complex):
            return {"t": "complex", "v": [value.real, value.imag]}
        if isinstance(value, range):
            return {"t": "range", "v": [self.pack(i) for i in (value.start, value.stop, value.step)]}
        if isinstance(value, decimal.Decimal):
            return {"t": "decimal", "v": decimal.Decimal.__str__(value)}
        if type(value) is fractions.Fraction:
            return {"t": "fraction", "v": [self.pack(i) for i in value.as_integer_ratio()]}
        if isinstance(value, types.ModuleType):
            raise TypeError(f"the module {value.__name__} cannot be passed")
        if type(value) is Remote and value._link is self:
            return {"t": "yours", "v": value._id}
        self._shown[id(value)] = value
        return {"t": "handle", "v": id(value)}

    def unpack(self, packed: Any) -> Any:
        """The value. Raises Lost for what no `pack` wrote."""
        if isinstance(packed, _WHOLE):
            return packed
        try:
            kind, value = packed["t"], packed["v"]
            if kind in _SEQUENCES:
                return _SEQUENCES[kind]([self.unpack(item) for item in value])
            return self._unpack_one(kind, value)
        except (LookupError, TypeError, ValueError, ArithmeticError, RecursionError) as error:
            raise self._gone() from error

    def _unpack_one(self, kind: str, value: Any) -> Any:
        if kind == "dict":
            return {self.unpack(key): self.unpack(item) for key, item in value}
        if kind == "int":
            return int(value, 16)
        if kind in ("bytes", "bytearray"):
            return bytes.fromhex(value) if kind == "bytes" else bytearray.fromhex(value)
        if kind in ("complex", "range", "fraction"):
            make = {"complex": complex, "range": range, "fraction": fractions.Fraction}[kind]
            return make(*(self.unpack(item) for item in value))
        if kind == "decimal":
            return decimal.Decimal(value)
        if kind == "yours":
            return self._shown[value]
        if kind == "handle":
            return Remote(self, int(value))
        raise ValueError(kind)

    def exception(self, name: str, bases: list[str]) -> type[Exception]:
        """The exception class of that name here: Python's own, else one made on its first base."""
        if name not in self._raised:
            found = [getattr(builtins, str(each), None) for each in bases]
            base = next((k for k in found if isinstance(k, type) and issubclass(k, Exception)), Far)
            self._raised[name] = base if name == base.__name__ else type(str(name), (base,), {})
        return self._raised[name]

    # what the far side may ask of what it holds

    def _do_call(self, target: Any, arguments: list[Any], options: dict[str, Any]) -> Any:
        return target(*arguments, **options)

    def _do_getattr(self, target: Any, name: str) -> Any:
        if name.startswith("_") or isinstance(target, types.FunctionType | types.BuiltinFunctionType):
            raise AttributeError(name)
        return getattr(target, name)

    def _do_setattr(self, target: Any, name: str, value: Any) -> None:
        if name.startswith("_"):
            raise AttributeError(name)
        setattr(target, name, value)

    def _do_isinstance(self, target: Any, kind: Any) -> bool:
        return isinstance(target, kind)

    def _do_special(self, name: str, target: Any, *arguments: Any) -> Any:
        if name not in _ASKED and name not in _OPERATORS:
            raise TypeError(name)
        found = getattr(type(target), f"__{name}__", None)
        if found is None and name == "bool":
            return bool(target)
        value = NotImplemented if found is None else found(target, *arguments)
        if value is not NotImplemented:
            return value
        if name in ("eq", "ne"):
            return name == "ne"
        raise TypeError(f"{type(target).__name__} has no use for __{name}__ here")


class Remote:
    """An object of the far side. Equal to another of its objects where the far side says so, else to none."""

    __slots__ = ("_id", "_link")
    _id: int
    _link: Link

    def __init__(self, link: Link, handle: int) -> None:
        object.__setattr__(self, "_link", link)
        object.__setattr__(self, "_id", handle)

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        given = [*arguments, *options.values()]
        return self._link.ask("call", self, list(arguments), options, given=given)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._link.ask("getattr", self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._link.ask("setattr", self, name, value)

    def __instancecheck__(self, other: object) -> bool:
        same = isinstance(other, Remote) and other._link is self._link
        return same and self._link.ask("isinstance", other, self) is True

    def __hash__(self) -> int:
        return hash(self._id)


def _replace(value: Any, new: Any) -> None:
    """Give a container the contents of another of its kind."""
    if not isinstance(value, CONTAINERS) or not isinstance(value, type(new)):
        return
    value.clear()
    (value.extend if isinstance(value, list | bytearray | collections.deque) else value.update)(new)


def _special(name: str, *, own_only: bool) -> Callable[..., Any]:
    def method(self: Remote, *arguments: Any) -> Any:
        if own_only and not all(type(a) is Remote and a._link is self._link for a in arguments):
            return NotImplemented
        value = self._link.ask("special", name, self, *arguments)
        wanted = {"len": int, "bool": bool, "str": str, "repr": str}.get(name)
        if wanted is not None and not isinstance(value, wanted):
            raise TypeError(f"__{name}__ gave a {type(value).__name__}")
        return iter(value) if name == "iter" and not isinstance(value, Remote) else value

    return method


for _name in _OPERATORS:
    setattr(Remote, f"__{_name}__", _special(_name, own_only=True))
for _name in _ASKED:
    setattr(Remote, f"__{_name}__", _special(_name, own_only=False))

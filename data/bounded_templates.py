# ruff: noqa: N802  (Jinja's visitor calls methods by the names of nodes)
"""Chat templates with bounded time and memory: Jinja's sandbox, in which all steps and values that grow are counted.

A template comes with a model or an adapter, so from strangers. The sandbox keeps it from reaching anything; here it is
kept from looping for hours and from making texts of gigabytes. What it does is counted in *steps*, never timed, so the
same template with the same messages is refused everywhere or nowhere: a round of a loop or a call of a macro is 32, a
character or an item of what an operation reads or makes is one. What would multiply (`'a' * 10**9`, a width, a list
that holds itself twice, over and over) is counted before it is done.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sized
from contextvars import ContextVar
from functools import wraps
from typing import Any

from jinja2 import Template, nodes, pass_context
from jinja2.exceptions import SecurityError
from jinja2.runtime import Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from ..specdec.target_settings import TemplateLimits

LIMITS: ContextVar[TemplateLimits] = ContextVar("template limits", default=TemplateLimits())  # noqa: B039  frozen
"""Limits of what is being rendered: templates are compiled once, for all."""
_ROUND = 32
_MOST_BITS = 1 << 12
_BUILTIN = (str, bytes, list, dict, tuple, int, float)
_LEFT_OUT = ("pprint", "random", "striptags", "urlize", "xmlattr")
"""Filters whose time or result has no bound in the size of their input, or no fixed one."""
_MULTIPLYING = frozenset(
    (
        *("center", "ljust", "rjust", "zfill", "expandtabs", "indent", "wordwrap"),
        *("batch", "slice", "round", "tojson", "sum"),
    )
)
"""Filters and methods whose result grows with the numbers and texts that they are given."""
_SHALLOW = frozenset(
    (
        *("length", "count", "first", "last", "default", "d", "safe", "list", "reverse", "attr"),
        *("map", "select", "selectattr", "reject", "rejectattr", "get", "items", "keys", "values", "copy"),
        *("defined", "undefined", "none", "string", "mapping", "iterable", "sequence", "number", "integer"),
        *("float", "boolean", "callable", "sameas", "true", "false", "odd", "even", "divisibleby", "test", "filter"),
    )
)
"""Filters, tests and methods that do not look into the items of a value."""
_SPECS = re.compile(r"%[^a-zA-Z%]*[a-zA-Z]|\{[^}]*\}")


class _BoundedTemplate(Template):
    """A template, each of whose renderings may take a number of steps."""

    environment: "BoundedEnvironment"

    def render(self, *args: Any, **kwargs: Any) -> str:
        self.environment.begin((args, kwargs))
        return super().render(*args, **kwargs)


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """Jinja's sandbox with counted steps. Raises SecurityError, a TemplateError, where a template takes too many."""

    intercepted_binops = frozenset(("+", "*", "**", "%"))
    template_class = _BoundedTemplate

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, finalize=self._read, **kwargs)
        self.begin(())
        # Filters and tests are wrapped as they are set, those that a library sets later too.
        self.filters = _Wrapped(self, self.filters)
        self.tests = _Wrapped(self, self.tests)
        for name in _LEFT_OUT:
            del self.filters[name]
        del self.globals["lipsum"]
        own = {"_tick": self._tick, "_joined": self._joined, "_sliced": self._sliced}
        dict.update(self.filters, own | {"_read": self._read, "_entered": self._entered})

    def begin(self, given: Any) -> None:
        """Begin a rendering of what is given."""
        limits = LIMITS.get()
        self._left = limits.steps
        self._left = self._most = limits.steps + limits.steps_each * self._size(given)

    def _generate(self, source: nodes.Template, *args: Any, **kwargs: Any) -> str:
        counted = _Counting().visit(source)
        counted.set_environment(self)
        return super()._generate(counted, *args, **kwargs)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Count what an operation makes before it is done."""
        if operator == "%" and isinstance(left, str):
            self._format(left, right)
        elif isinstance(left, int) and isinstance(right, int) and operator in ("*", "**"):
            bits = left.bit_length() * (abs(right) if operator == "**" else 1)
            if bits + (right.bit_length() if operator == "*" else 0) > _MOST_BITS:
                raise SecurityError(f"makes numbers of more than {_MOST_BITS} bits")
        elif operator == "*":
            several, times = (right, left) if isinstance(left, int) else (left, right)
            self._spend(self._size(several) * (abs(times) if isinstance(times, int) else 1))
        elif operator == "+":
            self._spend(sum(len(side) // 4 for side in (left, right) if isinstance(side, str | list | tuple)))
        return super().call_binop(context, operator, left, right)

    def call(self, context: Any, called: Any, *args: Any, **kwargs: Any) -> Any:
        """Count what a call reads and makes."""
        owner = getattr(called, "__self__", None)
        if not isinstance(owner, _BUILTIN):
            self._spend(1 if isinstance(called, Macro) else 1 + self._size((args, kwargs)))
            return super().call(context, called, *args, **kwargs)
        self._before(called.__name__, owner, args, kwargs)
        found = super().call(context, called, *args, **kwargs)
        return found if called.__name__ in _SHALLOW else self._read(found)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """`format` of a text, which the sandbox makes safe, counted."""
        safe = super().wrap_str_format(value)
        if safe is None:
            return None

        @wraps(safe)
        def counted(*args: Any, **kwargs: Any) -> str:
            self._before(value.__name__, value.__self__, args, kwargs)
            return safe(*args, **kwargs)

        return counted

    def wrapped(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """A filter or test that counts what it reads and makes."""
        hidden = int(hasattr(function, "jinja_pass_arg"))  # a context, before the value

        @wraps(function)
        def counted(*args: Any, **kwargs: Any) -> Any:
            if len(args) > hidden:
                self._before(name, args[hidden], args[hidden + 1 :], kwargs)
            found = function(*args, **kwargs)
            return found if name in _SHALLOW else self._read(found)

        return counted

    def _before(self, name: str, value: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Count what a method, filter or test reads, and what it may make of it."""
        given = (*args, *kwargs.values())
        if name in _SHALLOW:
            self._spend(1 + (len(value) // 4 if isinstance(value, list | tuple | dict) else 1))
            return
        size = self._size(value)
        self._spend(1 + size + self._size(given))
        if name in _MULTIPLYING:
            if name == "round" and any(isinstance(one, int) and abs(one) > 300 for one in given):
                raise SecurityError("rounds to more than 300 digits")
            self._spend(size * sum(abs(one) if isinstance(one, int) else self._size(one) for one in given))
        elif name == "join":
            separators = given if not isinstance(value, str) else (value,)
            items = value if not isinstance(value, str) else next(iter(given), ())
            self._spend((len(items) if isinstance(items, Sized) else size) * self._size(separators))
        elif name == "replace" and len(given) > 1 and isinstance(given[0], str):
            self._spend(str(value).count(given[0]) * self._size(given[1]))
        elif name in ("format", "format_map") and isinstance(value, str):
            self._format(value, given)
        elif name in ("translate", "maketrans"):
            raise SecurityError(f"calls {name}")

    def _format(self, text: str, values: Any) -> None:
        """Count what a format makes: each field may show all values, at the widths that it names."""
        specs = _SPECS.findall(text)
        if any("*" in spec or "{" in spec[1:] for spec in specs):
            raise SecurityError("formats to a width that is computed")
        widths = (int(number[:9]) for spec in specs for number in re.findall(r"\d+", spec))
        self._spend(len(text) + sum(widths) + len(specs) * self._size(values))

    def _size(self, value: Any) -> int:
        """Characters and items in a value, each as often as it stands there; counted no further than the steps last."""
        size, pending = 0, [value]
        while pending and size <= self._left:
            one = pending.pop()
            size += 1
            if isinstance(one, str | bytes):
                size += len(one)
            elif isinstance(one, dict):
                pending += (*one, *one.values())
            elif isinstance(one, list | tuple | set | frozenset):
                pending += one
        return size

    def _spend(self, steps: int) -> None:
        self._left -= steps
        if self._left < 0:
            raise SecurityError(f"takes more than {self._most:,} steps; target.template_limits allows more")

    def _read(self, value: Any) -> Any:
        self._spend(self._size(value))
        return value

    @pass_context
    def _tick(self, context: Any, steps: int) -> str:
        self._spend(steps)
        return ""

    def _entered(self, value: Any) -> Any:
        """What a loop goes over."""
        self._spend(len(value) if isinstance(value, Sized) else 1)
        return value

    def _joined(self, values: list[Any]) -> str:
        self._read(values)
        return "".join(map(str, values))

    def _sliced(self, value: Any, *ends: Any) -> Any:
        self._spend(len(value) // 4 if isinstance(value, Sized) else 1)
        return value[slice(*ends)]


class _Wrapped(dict[str, Any]):
    """Filters or tests by name, wrapped when they are set."""

    def __init__(self, environment: BoundedEnvironment, functions: Mapping[str, Any]) -> None:
        super().__init__()
        self._environment = environment
        for name, function in functions.items():
            self[name] = function

    def __setitem__(self, name: str, function: Callable[..., Any]) -> None:
        super().__setitem__(name, self._environment.wrapped(name, function))


class _Counting(NodeTransformer):
    """Puts the counting into a template's tree: into loops and macros, and around what the environment does not see."""

    def visit_For(self, node: nodes.For) -> Any:
        self.generic_visit(node)
        node.iter = _filter(node.iter, "_entered")
        return self._tick(node)

    def visit_Macro(self, node: nodes.Macro) -> Any:
        return self._tick(self.generic_visit(node))

    def visit_CallBlock(self, node: nodes.CallBlock) -> Any:
        return self._tick(self.generic_visit(node))

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:
        # Unlike a list, a tuple may be a key, and is then read to its depths.
        self.generic_visit(node)
        return _filter(node, "_read") if node.ctx == "load" else node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _filter(nodes.List(node.nodes, lineno=node.lineno), "_joined")

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        self.generic_visit(node)
        if not isinstance(node.arg, nodes.Slice):
            return node
        ends = (node.arg.start, node.arg.stop, node.arg.step)
        return _filter(node.node, "_sliced", *(end or nodes.Const(None) for end in ends))

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:
        self.generic_visit(node)
        # What is compared with a constant is not read; what is searched for one is.
        sides: list[nodes.Compare | nodes.Operand] = [node, *node.ops]
        constant = any(isinstance(side.expr, nodes.Const) for side in sides)
        for side in sides:
            searched = isinstance(side, nodes.Operand) and side.op in ("in", "notin")
            if not isinstance(side.expr, nodes.Const) and (searched or not constant):
                side.expr = _filter(side.expr, "_read")
        return node

    def _tick(self, node: Any) -> Any:
        """A loop or macro whose every round counts, with the text that stands in it."""
        written: Iterable[nodes.TemplateData] = node.find_all(nodes.TemplateData)
        steps = nodes.Const(_ROUND + sum(len(text.data) for text in written))
        node.body.insert(0, nodes.ExprStmt(_filter(steps, "_tick"), lineno=node.lineno))
        return node


def _filter(node: Any, name: str, *args: nodes.Expr) -> nodes.Filter:
    return nodes.Filter(node, name, list(args), [], None, None, lineno=node.lineno)

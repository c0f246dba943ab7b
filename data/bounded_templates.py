# ruff: noqa: N802  (Jinja's visitor calls methods by the names of nodes)
"""Chat templates with bounded time and memory: Jinja's sandbox, in which all steps and values that grow are counted.

A template comes with a model or an adapter, so from strangers. The sandbox keeps it from reaching anything; here it is
kept from looping for hours and from making texts of gigabytes. What it does is counted in *steps*, never timed, so the
same template with the same messages is refused everywhere or nowhere: a round of a loop or a call of a macro is 32 and
one for each expression in it (8 for a list or dict), a character or an item of what an operation reads or makes is one,
an item that is copied unread is 4. What would multiply
(`'a' * 10**9`, a width, a list that holds itself twice, over and over) is counted before it is done. Methods that are
not counted may not be called.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from contextvars import ContextVar
from dataclasses import dataclass
from enum import Flag, auto
from functools import wraps
from string import Formatter
from types import BuiltinFunctionType, FunctionType
from typing import Any

from jinja2 import Template, nodes, pass_context
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.runtime import LoopContext, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

from ..errors import SlowTemplateError
from ..specdec.target_settings import TemplateLimits

LIMITS: ContextVar[TemplateLimits] = ContextVar("template limits", default=TemplateLimits())  # noqa: B039  frozen
"""Limits of what is being rendered: templates are compiled once, for all."""
_ROUND = 32
_FULL_RENDERINGS = 64  # renderings of one tokenizer that may take all their steps, whatever the others take
_SPARED = 4  # of the steps that a rendering may take for the size of its input, all together may take a quarter
_MOST_BITS = 1 << 12
_MOST_ODD_KEYS = 64  # of a dict that is written out; others than texts can be made to collide
_STRFTIME_GROWTH = 256  # characters that Python lets the C library make of each of a format
_MOST_NODES, _MOST_SCOPES = 1 << 15, 1 << 10
_LONGEST_NUMBER = 4000  # digits of a width, which Python reads
_MADE = 8  # of a list or dict that stands in a loop
_COPIED = 4  # of an item that is copied: of a dict's each takes 50 bytes
_MOST_REMEMBERED = 32
_SCOPES = (nodes.For, nodes.If, nodes.Macro, nodes.CallBlock, nodes.Block, nodes.With, nodes.Scope, nodes.FilterBlock)
_BUILTIN = (str, list, dict, tuple, int, float)
_LEFT_OUT = ("pprint", "random", "striptags", "urlize", "xmlattr")
"""Filters whose time or result has no bound in the size of their input, or no fixed one."""


class _Cost(Flag):
    """What a filter, method or test takes. Without any of these: all that it is given, read once."""

    WHOLE = 0
    CONSTANT = auto()
    """Reads nothing of the value; what it yields is counted as it is taken."""
    SHALLOW = auto()
    """Does not look into the items of the value."""
    SAME_TEXT = auto()
    """Gives a text back as it is."""
    MULTIPLIES = auto()
    """Makes a result that grows with the numbers and texts that it is given."""
    BACKWARDS = auto()
    """May compare all that it is given at each character."""
    ITEMS = auto()
    """Takes all items of what yields them one by one."""
    ATTRIBUTES = auto()
    """Looks up what it is given in each item, or compares the items."""
    JOINS = auto()
    REPLACES = auto()
    FILLS_IN = auto()


_COSTS = {
    name: cost
    for cost, names in (
        # Methods, with a full stop in front: of texts, lists, dicts and numbers no others may be called.
        (_Cost.CONSTANT, ".get .items .keys .values .bit_length .is_integer"),
        (_Cost.SHALLOW, ".copy"),
        (_Cost.WHOLE, ".capitalize .casefold .count .endswith .find .index .lower .partition .removeprefix"),
        (_Cost.WHOLE, ".removesuffix .split .splitlines .startswith .swapcase .title .upper"),
        (_Cost.WHOLE, ".isalnum .isalpha .isascii .isdecimal .isdigit .isidentifier .islower .isnumeric"),
        (_Cost.WHOLE, ".isprintable .isspace .istitle .isupper"),
        (_Cost.MULTIPLIES, ".center .expandtabs .ljust .rjust .zfill"),
        (_Cost.BACKWARDS, ".lstrip .rfind .rindex .rpartition .rsplit .rstrip .strip"),
        (_Cost.JOINS, ".join"),
        (_Cost.REPLACES, ".replace"),
        (_Cost.FILLS_IN, ".format .format_map"),
        # Filters. Those that are not here are read whole.
        (_Cost.CONSTANT, "attr count d default first float last length map reject rejectattr select selectattr"),
        (_Cost.SHALLOW, "items reverse"),
        (_Cost.SHALLOW | _Cost.ITEMS, "list"),
        (_Cost.SAME_TEXT, "safe string"),
        (_Cost.MULTIPLIES, "center indent round tojson wordwrap"),
        (_Cost.MULTIPLIES | _Cost.ITEMS, "batch slice"),
        (_Cost.BACKWARDS, "trim"),
        (_Cost.ATTRIBUTES | _Cost.ITEMS, "groupby max min sort sum unique"),
        (_Cost.JOINS | _Cost.ITEMS, "join"),
        (_Cost.REPLACES, "replace"),
        (_Cost.FILLS_IN, "format"),
    )
    for name in names.split()
}
"""Cost of each filter and method by its name."""
_CONSTANT_TESTS = (
    *("boolean", "callable", "defined", "divisibleby", "even", "false", "filter", "float", "integer", "iterable"),
    *("mapping", "none", "number", "odd", "sameas", "sequence", "string", "test", "true", "undefined"),
)
_COMPUTING = ("is divisibleby", "is even", "is odd", "round")
"""Of a text these would make another one, as `%` and `*` do."""
_LOOKING_UP = ("is filter", "is in", "is test")
_UNREAD = _Cost.CONSTANT | _Cost.SHALLOW
"""Of these the result is not read."""
_COSTS |= {f"is {name}": _Cost.CONSTANT for name in _CONSTANT_TESTS}
_ROWS: tuple[type[Any], ...] = (list, tuple, set, frozenset, type({}.keys()), type({}.values()), type({}.items()))
_PERCENT = re.compile(r"%[^a-zA-Z%]*\*")
_WIDTH = re.compile(r"(?<!\d)\d++(?:\.\d*+)?+[hlL]?[diouxXeEfFgGcrsa]")


_BROKEN: dict[str, str] = {}
"""Templates that could not be compiled, and why."""


@dataclass
class StepBudget:
    """Steps that all renderings for one tokenizer took, and the size of what they were given, which limits them.

    A template that takes most of its steps for each conversation would take days for a log of them.
    """

    steps: int = 0
    size: int = 0

    def add(self, steps: int, size: int) -> None:
        """Count a rendering. Raises SlowTemplateError where all together take more than real templates do."""
        self.steps, self.size, limits = self.steps + steps, self.size + size, LIMITS.get()
        most = limits.steps * _FULL_RENDERINGS + limits.steps_each // _SPARED * self.size
        if self.steps > most:
            raise SlowTemplateError(
                f"target.model: its chat template takes more than {most:,} steps for its prompts together; "
                "target.template_limits allows more"
            )


STEP_BUDGET: ContextVar[StepBudget] = ContextVar("template step budget")
"""Step budget of the tokenizer for which a template is rendered; none: nothing is added up."""


class _BoundedTemplate(Template):
    """A template, each of whose renderings may take a number of steps."""

    environment: "BoundedEnvironment"

    def render(self, *args: Any, **kwargs: Any) -> str:
        size = self.environment.begin((args, kwargs))
        try:
            return super().render(*args, **kwargs)
        finally:
            if budget := STEP_BUDGET.get(None):
                budget.add(self.environment.taken, size)


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """Jinja's sandbox with counted steps. Raises SecurityError, a TemplateError, where a template takes too many."""

    intercepted_binops = frozenset(("+", "-", "*", "/", "//", "**", "%"))
    intercepted_unops = frozenset(("+", "-"))
    template_class = _BoundedTemplate

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, finalize=self._read, **kwargs)
        self.begin(())
        # Filters and tests are wrapped as they are set, those that a library sets later too.
        self.filters = _Wrapped(self, self.filters)
        self.tests = _Wrapped(self, self.tests, "is ")
        for name in _LEFT_OUT:
            del self.filters[name]
        del self.globals["lipsum"]
        # Names with a space, which no template can write.
        own = {" tick": self._tick, " joined": self._joined, " sliced": self._sliced}
        dict.update(self.filters, own | {" read": self._read, " entered": self._entered, " key": self._key})

    def from_string(self, source: Any, *args: Any, **kwargs: Any) -> Any:
        """Compile a template. One that could not be is refused again at once: to read a large one takes seconds, and
        each conversation asks anew."""
        if source in _BROKEN:
            raise TemplateError(_BROKEN[source])
        try:
            return super().from_string(source, *args, **kwargs)
        except (SlowTemplateError, MemoryError):
            raise
        except Exception as error:
            if len(_BROKEN) >= _MOST_REMEMBERED:
                _BROKEN.clear()
            _BROKEN[source] = str(error)
            raise

    def begin(self, given: Any) -> int:
        """Begin a rendering of what is given. Returns its size."""
        limits = LIMITS.get()
        self._left = self._most = limits.steps
        size = self._size(given)
        self._left = self._most = limits.steps + limits.steps_each * size
        return size

    @property
    def taken(self) -> int:
        """Steps that the rendering has taken."""
        return self._most - self._left

    def _generate(self, source: nodes.Template, *args: Any, **kwargs: Any) -> str:
        # Python's own compiler takes 10 kB for an expression, and Jinja's copies all names for each part with its own.
        every = _all_nodes(source)
        for kind, most in ((nodes.Node, _MOST_NODES), (_SCOPES, _MOST_SCOPES)):
            if (found := sum(isinstance(one, kind) for one in every) - (kind is nodes.Node)) > most:
                what = f"{found:,} {'expressions' if kind is nodes.Node else 'conditions, loops and macros'}"
                raise SlowTemplateError(f"target.model: its chat template has {what}; must have {most:,} at most")
        counted = _Counting(every).visit(source)
        counted.set_environment(self)
        return super()._generate(counted, *args, **kwargs)

    def call_unop(self, context: Any, operator: str, arg: Any) -> Any:
        """Refuse to compute with a huge number."""
        _check_number(arg)
        return super().call_unop(context, operator, arg)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Count what an operation makes before it is done."""
        _check_number(left)
        _check_number(right)
        if operator == "%" and isinstance(left, str):
            self._percent(left, right)
        elif isinstance(left, int) and isinstance(right, int) and operator in ("*", "**"):
            bits = left.bit_length() * (abs(right) if operator == "**" else 1)
            if bits + (right.bit_length() if operator == "*" else 0) > _MOST_BITS:
                raise SecurityError(f"makes numbers of more than {_MOST_BITS} bits")
        elif operator == "*":
            several, times = (right, left) if isinstance(left, int) else (left, right)
            self._spend(self._size(several) * (max(abs(times), 1) if isinstance(times, int) else 1))
        elif operator == "+":
            self._spend(sum(_copying(side) for side in (left, right) if isinstance(side, str | list | tuple)))
        return super().call_binop(context, operator, left, right)

    def call(self, context: Any, called: Any, *args: Any, **kwargs: Any) -> Any:
        """Count what a call reads and makes."""
        args = tuple(list(one) if isinstance(one, Iterator) else one for one in args)
        # 1) Macros count themselves; what transformers and Jinja provide is read whole.
        owner = getattr(called, "__self__", None)
        if not isinstance(called, BuiltinFunctionType) and not isinstance(owner, _BUILTIN):
            size = 1 if isinstance(called, Macro) else _ROUND + self._size((args, kwargs))
            # `dict` and `namespace`, whichever transformers has in their places, make keys of these.
            if not isinstance(called, Macro | LoopContext) and args and isinstance(args[0], list | tuple | range):
                size += len(args[0]) ** 2 // _MOST_ODD_KEYS
                for pair in () if isinstance(args[0], range) else args[0]:
                    self._key(pair[0] if isinstance(pair, list | tuple) and pair else pair)
            elif isinstance(called, FunctionType) and called.__name__ == "strftime_now":
                size *= _STRFTIME_GROWTH
            self._spend(size)
            found = super().call(context, called, *args, **kwargs)
            return self._read(found) if isinstance(found, str) else found
        # 2) Methods.
        name = f".{called.__name__}"
        if not isinstance(owner, _BUILTIN) or name not in _COSTS:
            raise SecurityError(f"calls {called.__name__}")
        self._before(name, owner, args, kwargs)
        found = super().call(context, called, *args, **kwargs)
        return found if _COSTS[name] & _UNREAD else self._read(found)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """`format` of a text, which the sandbox makes safe, counted."""
        safe = super().wrap_str_format(value)
        if safe is None:
            return None

        @wraps(safe)
        def counted(*args: Any, **kwargs: Any) -> str:
            self._before(f".{value.__name__}", value.__self__, args, kwargs)
            return safe(*args, **kwargs)

        return counted

    def wrapped(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """A filter, or a test (`is NAME`), that counts what it reads and makes."""
        hidden = int(hasattr(function, "jinja_pass_arg"))  # a context, before the value
        cost = _COSTS.get(name, _Cost.WHOLE)

        @wraps(function)
        def counted(*args: Any, **kwargs: Any) -> Any:
            passed, args = args[:hidden], args[hidden:]
            if cost & _Cost.ITEMS and args and isinstance(args[0], Iterator):
                args = (list(args[0]), *args[1:])
            if args:
                self._before(name, args[0], args[1:], kwargs)
            found = function(*passed, *args, **kwargs)
            if isinstance(found, Iterator):
                self._spend(each := self._size((args[1:], kwargs)))
                return self._counted(found, each)
            return found if cost & _UNREAD else self._read(found)

        return counted

    def _counted(self, items: Iterator[Any], each: int) -> Iterator[Any]:
        """Count items as they are taken."""
        for item in items:
            self._spend(each)
            yield item

    def _before(self, name: str, value: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Count what a method, filter or test reads, and what it may make of it."""
        # 1) What does not look into the value.
        given, cost = (*args, *kwargs.values()), _COSTS.get(name, _Cost.WHOLE)
        if name in _COMPUTING and not isinstance(value, int | float):
            raise SecurityError(f"computes {name.removeprefix('is ')} of what is no number")
        for one in (*given, value) if name in _LOOKING_UP else given:
            self._key(one)
        if cost & _Cost.CONSTANT:
            self._spend(1)
            return
        if cost & _Cost.SHALLOW or (cost & _Cost.SAME_TEXT and isinstance(value, str)):
            apart = _COPIED * len(value) if name == "list" and isinstance(value, str) else _copying(value)
            self._spend(1 + apart)
            return
        # 2) What reads all of it, once or more often.
        size, more = self._size(value), self._size(given)
        self._spend(1 + size + more)
        items = len(value) if isinstance(value, Sized) else 1
        if cost & _Cost.MULTIPLIES:
            if name == "round" and any(isinstance(one, int) and abs(one) > 300 for one in given):
                raise SecurityError("rounds to more than 300 digits")
            times = sum(abs(one) if isinstance(one, int) else self._size(one) for one in given)
            lines = size // 1024 if name == "wordwrap" else self._depth(value) if name == "tojson" and times else 1
            self._spend(size * max(times * max(lines, 1), lines))
        elif cost & _Cost.BACKWARDS:
            self._spend(size * more // 16)
        elif cost & _Cost.JOINS:
            joined, separators = (value, given) if name == "join" else (next(iter(given), ()), (value,))
            self._spend((len(joined) if isinstance(joined, Sized) else size) * self._size(separators))
        elif cost & _Cost.REPLACES:
            self._spend(max((str(value).count(str(one)) for one in given), default=0) * more)
        elif cost & _Cost.FILLS_IN:
            if name == "format":
                self._percent(str(value), given)
            elif isinstance(value, str):
                self._braces(value, given)
        # 3) What looks up an attribute of each item, or compares and copies each with all others.
        if cost & _Cost.ATTRIBUTES:
            self._spend(items * more)
            if name == "unique" or any(isinstance(one, list | tuple) for one in given):
                self._spend(items**2 // _MOST_ODD_KEYS + items * more)
            for one in value if name == "unique" and isinstance(value, _ROWS) else ():
                self._key(one)

    def _percent(self, text: str, values: Any) -> None:
        """Count what `text % values` makes: each field may show all values, at the widths that it names."""
        if _PERCENT.search(text):
            raise SecurityError("formats to a width that is computed")
        self._spend(len(text) + sum(map(_widths, _WIDTH.findall(text))) + max(text.count("%"), 1) * self._size(values))

    def _braces(self, text: str, values: Any) -> None:
        """Count what `text.format(values)` makes."""
        specs = [spec for _, field, spec, _ in Formatter().parse(text) if field is not None]
        if any("{" in (spec or "") for spec in specs):
            raise SecurityError("formats to a width that is computed")
        self._spend(len(text) + sum(_widths(spec or "") for spec in specs) + len(specs) * self._size(values))

    def _size(self, value: Any) -> int:
        """Characters and items in a value, each as often as it stands there; counted no further than the steps last."""
        size, pending, looks = 0, [value], 0
        while pending and size <= self._left:
            one = pending.pop()
            size, looks = size + 1, looks + 1
            if issubclass(type(one), Namespace):  # first, as `isinstance` asks it for its class, slowly
                pending.append(object.__getattribute__(one, "_Namespace__attrs"))
            elif isinstance(one, str | range):
                size += len(one)
            elif isinstance(one, int):
                size += one.bit_length() // 32
            elif isinstance(one, dict):
                pending += (*one, *one.values())
            elif isinstance(one, _ROWS):
                pending += one
        if size > self._left:  # whoever asked is refused; what was looked at until here is done
            self._left = max(self._left - looks, 0)
        return size

    def _depth(self, value: Any) -> int:
        """Levels of lists and dicts in a value whose size is within the steps."""
        level, depth = [value], 0
        while level := [one for one in level if isinstance(one, list | tuple | dict)]:
            level = [inner for one in level for inner in (one.values() if isinstance(one, dict) else one)]
            depth += 1
        return depth

    def _spend(self, steps: int) -> None:
        # What is refused is not done, so it is not counted.
        if steps > self._left:
            raise SecurityError(f"takes more than {self._most:,} steps; target.template_limits allows more")
        self._left -= steps

    def _read(self, value: Any) -> Any:
        _check_number(value)
        self._spend(self._size(value))
        return value

    @pass_context
    def _tick(self, context: Any, steps: int) -> str:
        # `map` finds this by its name, too, and would give steps back.
        self._spend(steps if type(steps) is int and steps > 0 else self._most + 1)
        return ""

    def _key(self, value: Any) -> Any:
        """What is looked up, if it can be: Python hashes a tuple to its depths, each time anew, and deep ones crash."""
        if isinstance(value, tuple):
            if any(isinstance(one, tuple) for one in value):
                raise SecurityError("looks up a tuple of tuples")
            self._spend(len(value))
        return value

    def _entered(self, value: Any) -> Any:
        """What a loop goes over."""
        self._spend(len(value) if isinstance(value, Sized) else 1)
        return value

    def _joined(self, values: list[Any]) -> str:
        self._read(values)
        return "".join(map(str, values))

    def _sliced(self, value: Any, *ends: Any) -> Any:
        self._spend(_copying(value))
        return value[slice(*ends)]


class _Wrapped(dict[str, Any]):
    """Filters or tests by name, wrapped when they are set."""

    def __init__(self, environment: BoundedEnvironment, functions: Mapping[str, Any], kind: str = "") -> None:
        super().__init__()
        self._environment, self._kind = environment, kind
        for name, function in functions.items():
            self[name] = function

    def __setitem__(self, name: str, function: Callable[..., Any]) -> None:
        super().__setitem__(name, self._environment.wrapped(self._kind + name, function))


class _Counting(NodeTransformer):
    """Puts the counting into a template's tree: into loops and macros, and around what the environment does not see."""

    def __init__(self, every: Sequence[nodes.Node]) -> None:
        """`every`: all nodes of the tree, each before those in it."""
        self._written: dict[int, int] = {}
        """Steps of what stands in a node, by its id."""
        for node in reversed(every):
            own = len(node.data) if isinstance(node, nodes.TemplateData) else 1
            own = _MADE if isinstance(node, nodes.List | nodes.Dict) else own
            self._written[id(node)] = own + sum(self._written[id(inner)] for inner in node.iter_child_nodes())

    def visit_For(self, node: nodes.For) -> Any:
        return self._tick(node, node)

    def visit_Macro(self, node: nodes.Macro) -> Any:
        return self._tick(node)

    def visit_CallBlock(self, node: nodes.CallBlock) -> Any:
        return self._tick(node)

    def visit_Block(self, node: nodes.Block) -> Any:
        return self._tick(node)

    def visit_Const(self, node: nodes.Const) -> nodes.Node:
        _check_number(node.value)
        return node

    def visit_Dict(self, node: nodes.Dict) -> nodes.Node:
        texts = [isinstance(pair.key, nodes.Const) and isinstance(pair.key.value, str) for pair in node.items]
        if texts.count(False) > _MOST_ODD_KEYS:
            raise SecurityError(f"has a dict with more than {_MOST_ODD_KEYS} keys that are computed")
        self.generic_visit(node)
        for pair in node.items:
            pair.key = _looked_up(pair.key)
        return node

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:
        # Unlike a list, a tuple may be a key, and is then read to its depths.
        self.generic_visit(node)
        return _filter(node, " read") if node.ctx == "load" else node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _filter(nodes.List(node.nodes, lineno=node.lineno), " joined")

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        self.generic_visit(node)
        if not isinstance(node.arg, nodes.Slice):
            node.arg = _looked_up(node.arg)
            return node
        ends = (node.arg.start, node.arg.stop, node.arg.step)
        return _filter(node.node, " sliced", *(end or nodes.Const(None) for end in ends))

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:
        self.generic_visit(node)
        # What is compared with a constant alone is not read; what is searched for one is.
        sides: list[nodes.Compare | nodes.Operand] = [node, *node.ops]
        constant = len(sides) == 2 and any(isinstance(side.expr, nodes.Const) for side in sides)
        for side, following in zip(sides, [*node.ops, None]):
            searched = isinstance(side, nodes.Operand) and side.op in ("in", "notin")
            if not isinstance(side.expr, nodes.Const) and (searched or not constant):
                side.expr = _filter(side.expr, " read")
            if following is not None and following.op in ("in", "notin"):
                side.expr = _looked_up(side.expr)
        return node

    def _tick(self, node: Any, loop: nodes.For | None = None) -> Any:
        """A loop or macro whose every round counts, with the text and the expressions that stand in it."""
        written = self._written[id(node)] - 1
        asked = 0 if loop is None or loop.test is None else self._written[id(loop.test)]
        self.generic_visit(node)
        if loop is not None:
            loop.iter = _filter(loop.iter, " entered")
            if loop.test is not None:  # of a round that is passed over it is all that is done
                loop.test = nodes.Or(_filter(nodes.Const(asked, lineno=node.lineno), " tick"), loop.test)
        node.body.insert(0, nodes.ExprStmt(_filter(nodes.Const(_ROUND + written), " tick"), lineno=node.lineno))
        return node


def _check_number(value: Any) -> None:
    """Raise SecurityError for a number that takes long to compute with."""
    if isinstance(value, int) and value.bit_length() > _MOST_BITS:
        raise SecurityError(f"computes with numbers of more than {_MOST_BITS} bits")


def _copying(value: Any) -> int:
    """Steps of a copy of a value, whose items are not looked into."""
    if isinstance(value, str):
        return len(value) // 4
    return _COPIED * len(value) if isinstance(value, Sized) else 1


def _widths(text: str) -> int:
    """Sum of the numbers in a field of a format, which may have zeros in front. Raises SecurityError for a long one."""
    numbers = re.findall(r"\d+", text)
    if any(len(number) > _LONGEST_NUMBER for number in numbers):
        raise SecurityError("formats to a width of thousands of digits")
    return sum(map(int, numbers))


def _all_nodes(tree: nodes.Template) -> list[nodes.Node]:
    """All nodes of a tree, each before those in it."""
    found: list[nodes.Node] = []
    pending: list[nodes.Node] = [tree]
    while pending:
        found.append(node := pending.pop())
        pending += node.iter_child_nodes()
    return found


def _looked_up(node: nodes.Expr) -> nodes.Expr:
    """A key, checked unless it is written out."""
    return node if isinstance(node, nodes.Const) else _filter(node, " key")


def _filter(node: Any, name: str, *args: nodes.Expr) -> nodes.Filter:
    return nodes.Filter(node, name, list(args), [], None, None, lineno=node.lineno)

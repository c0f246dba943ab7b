"""What engines find out of a chat template by reading it, such as whether it loops over the parts of a content.

A template comes from strangers, and some take hours to read: `template_process.py` runs these in its process.
"""

from collections.abc import Callable, Iterator, Sequence

from jinja2 import TemplateError, meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

_ROW = ("message", "msg", "m")  # SGLang's names of a loop over messages


def loops_over_parts(template: str, engine: str) -> bool:
    """Whether a chat template loops over the parts of a message's content, as the engine finds it out.

    vLLM (0.33) looks for loops over the messages, or over a variable or a namespace's field that was set to them, then
    for one over such a loop variable's content, over a macro's parameter that is given it, or over a variable `content`
    outside macros. SGLang takes a loop over the content of `message`, `msg` or `m`. Raises TemplateError, and what else
    Jinja raises for a template that it cannot read.
    """
    tree = _tree(template)
    loops = list(tree.find_all(nodes.For))
    if engine == "sglang":
        return any(_reads(loop.iter, name, "content") for loop in loops for name in _ROW)
    try:
        return _loops_over_content(tree, loops)
    except _Unreadable:
        return False


def arguments(template: str) -> list[str]:
    """Names that a template reads and does not set. Raises TemplateError."""
    return sorted(meta.find_undeclared_variables(_tree(template)))


def wants_system_first(template: str) -> bool:
    """Whether vLLM holds that a template refuses a system message among others: it renders some with nothing but
    Jinja, so a template that needs its tokenizer's tokens or functions counts, too."""
    asked = [{"role": role, "content": "t"} for role in ("system", "user", "system", "user")]
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    try:
        environment.from_string(template).render(messages=asked, add_generation_prompt=False)
    except TemplateError:
        return True
    return False


class _Unreadable(Exception):  # noqa: N818
    """A construct before which vLLM's search gives up."""


def _loops_over_content(tree: nodes.Template, loops: Sequence[nodes.For]) -> bool:
    """Whether vLLM finds a loop over a message's content."""
    names = _message_names(tree, loops)

    def is_content(node: nodes.Node) -> bool:
        return any(_reads(node, name, "content") for name in names)

    # 1) What each loop inside a macro may go over by name: the macro's parameters that are given a content.
    given: dict[int, set[str]] = {}
    for macro in tree.find_all(nodes.Macro):
        parameters = _given_contents(tree, macro, is_content)
        for loop in macro.find_all(nodes.For):
            given[id(loop)] = parameters or given.get(id(loop), set())

    # 2) The first loop that is found decides; any other may go over a variable `content`.
    for loop in loops:
        named = isinstance(loop.iter, nodes.Name) and loop.iter.name in given.get(id(loop), {"content"})
        if named or is_content(loop.iter):
            return _name_of(loop.target) != ""
    return False


def _given_contents(tree: nodes.Template, macro: nodes.Macro, is_content: Callable[[nodes.Node], bool]) -> set[str]:
    """Names of a macro's parameters that some call gives a message's content."""
    parameters, found = [parameter.name for parameter in macro.args], set[str]()
    for call in tree.find_all(nodes.Call):
        if isinstance(call.node, nodes.Name) and call.node.name == macro.name:
            found |= {name for name, value in zip(parameters, call.args) if is_content(value)}
            found |= {named.key for named in call.kwargs if named.key in parameters and is_content(named.value)}
    return found


def _message_names(tree: nodes.Template, loops: Sequence[nodes.For]) -> set[str]:
    """Names of the variables of loops over the messages."""
    # Variables, and fields of namespaces, that hold the messages, or a slice of them.
    known, pending = {"messages"}, ["messages"]
    while pending:
        name = pending.pop()
        for assignment in tree.find_all(nodes.Assign):
            for target in _holders(assignment, name):
                if target not in known:
                    known.add(target)
                    pending.append(target)
    return {_name_of(loop.target) for loop in loops if any(_reads(loop.iter, name) for name in known)}


def _holders(assignment: nodes.Assign, name: str) -> Iterator[str]:
    """Names under which an assignment keeps the value of a variable: its target, or a field of a namespace
    (`{% set ns = namespace(rest=messages) %}`, `{% set ns.rest = messages %}`)."""
    target, value = assignment.target, assignment.node
    if isinstance(target, nodes.Name):
        if _reads(value, name):
            yield target.name
        elif isinstance(value, nodes.Call) and _is_variable(value.node, "namespace"):
            yield from (f"{target.name}.{field.key}" for field in value.kwargs if _reads(field.value, name))
    elif isinstance(target, nodes.NSRef) and _reads(value, name):
        yield f"{target.name}.{target.attr}"


def _name_of(target: nodes.Node) -> str:
    if not isinstance(target, nodes.Name):
        raise _Unreadable
    return target.name


def _reads(node: nodes.Node | None, name: str, field: str | None = None) -> bool:
    """Whether an expression is a variable (or its field), filtered, sliced or tested."""
    if isinstance(node, nodes.Filter | nodes.Test):
        return _reads(node.node, name, field)
    if isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice):
        return _reads(node.node, name, field)
    if field is None:
        return _is_variable(node, name)
    if isinstance(node, nodes.Getitem):
        return isinstance(node.arg, nodes.Const) and node.arg.value == field and _is_variable(node.node, name)
    return isinstance(node, nodes.Getattr) and node.attr == field and _is_variable(node.node, name)


def _is_variable(node: nodes.Node | None, name: str) -> bool:
    """Whether an expression is the variable of that name, or the field of a namespace (`ns.rest`)."""
    space, dot, attribute = name.rpartition(".")
    if dot and isinstance(node, nodes.Getattr):
        return node.attr == attribute and _is_variable(node.node, space)
    return isinstance(node, nodes.Name) and node.ctx == "load" and node.name == name


class _Generation(Extension):
    """The tag `generation` of transformers, with which templates mark the assistant's words."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _tree(template: str) -> nodes.Template:
    extensions = [_Generation, loopcontrols]
    return ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=extensions).parse(template)

"""What a chat template does with words that it does not look at: the literal text around them.

Place in the flow: data/render.py traces each sequence of roles once, then fills in the words of every conversation that has it. Most templates only
put a message's words out, so what they render depends on the roles alone. Whether that is so is found by rendering with stand-ins for the words:

    Words      a str that notices every way of looking at it but being put out, joined with +, stripped of white space, and tested for being there
    _Watched   the environment of the template, where filters, tests, calls, operators, `~` and `in` notice stand-ins among their arguments,
               because most of them read a str without calling any of its methods

What cannot be watched (macros and blocks make plain text of stand-ins; the clock and chance) is not traced. In doubt the answer is None: then every
conversation is rendered by Jinja itself.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jinja2 import Template, Undefined, nodes
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer
from transformers.utils import chat_template_utils

AS_IS, LEFT, RIGHT, BOTH = range(4)  # which ends of the words are stripped
# Characters that escaping, quoting, changing case or white space would change, between two that no template has.
# What of the text is not found again whole, as after a method of C that nothing watches, leaves one of the two behind.
_STAND_IN = "\ue000{}:{}: <&\"'\\\n\t aBß%{{}} \ue001"
_STOOD_IN = re.compile(re.escape(_STAND_IN.format("INDEX", "KIND")).replace("INDEX", r"(\d+)").replace("KIND", r"([0-3])"))
_TEXT_BLOCKS = (nodes.Macro, nodes.CallBlock, nodes.AssignBlock, nodes.FilterBlock, nodes.Block)
_OTHER_FILES = (nodes.Extends, nodes.Include, nodes.Import, nodes.FromImport)
_UNTRACEABLE = (*_TEXT_BLOCKS, *_OTHER_FILES, nodes.ScopedEvalContextModifier, nodes.EvalContextModifier)
_KEEPING_TESTS = {"defined", "undefined", "none", "string", "mapping", "number", "integer", "float", "boolean", "true", "false"}
_OPERATORS = ("eq", "ne", "lt", "le", "gt", "ge", "hash", "len", "iter", "contains", "getitem", "mul", "rmul", "mod", "format", "repr")


@dataclass(frozen=True)
class Skeleton:
    """A rendered text with gaps.

    Attributes:
        literals: the text between the gaps; one more than there are gaps.
        gaps: (index of the message whose words stand there, which of their ends are stripped of white space).
    """

    literals: tuple[str, ...]
    gaps: tuple[tuple[int, int], ...]


class Watch:
    """Whether anything that the render depends on was looked at, other than roles."""

    def __init__(self) -> None:
        self.has_looked = False

    def look(self) -> None:
        """Remembers that it was."""
        self.has_looked = True


class Words(str):
    """Stand-ins for words that hold a visible character, and literal text around them.

    Args:
        parts: literal text, or (index of a message, which ends are stripped).
        watch: told of every look at it.
    """

    def __new__(cls, parts: Sequence[str | tuple[int, int]], watch: Watch) -> Words:
        words = super().__new__(cls, "".join(part if isinstance(part, str) else _STAND_IN.format(*part) for part in parts))
        words.__dict__.update(parts=list(parts), watch=watch)
        return words

    def __getattribute__(self, name: str) -> Any:
        if name not in ("strip", "lstrip", "rstrip", "__class__", "__dict__"):
            _look(self)
        return super().__getattribute__(name)

    def __str__(self) -> str:
        return self

    def __bool__(self) -> bool:
        return True

    def __add__(self, other: str) -> str:
        return _joined(self, other)

    def __radd__(self, other: str) -> str:
        return _joined(other, self)

    def strip(self, chars: str | None = None, /) -> str:
        """Stripped of white space at both ends."""
        return _stripped(self, BOTH, chars)

    def lstrip(self, chars: str | None = None, /) -> str:
        """Stripped of white space before it."""
        return _stripped(self, LEFT, chars)

    def rstrip(self, chars: str | None = None, /) -> str:
        """Stripped of white space after it."""
        return _stripped(self, RIGHT, chars)


def _look(words: Words) -> None:
    words.__dict__["watch"].look()


def _looking(method: Callable[..., Any]) -> Callable[..., Any]:
    def look(self: Words, *args: Any) -> Any:
        _look(self)
        return method(self, *args)

    return look


for _name in _OPERATORS:
    setattr(Words, f"__{_name}__", _looking(getattr(str, f"__{_name}__")))


def _joined(left: str, right: str) -> str:
    parts: list[str | tuple[int, int]] = []
    for side in (left, right):
        if type(side) not in (str, Words):
            return NotImplemented
        parts += side.__dict__["parts"] if isinstance(side, Words) else [side]
    watch = next(side.__dict__["watch"] for side in (left, right) if isinstance(side, Words))
    return Words(parts, watch)


def _stripped(words: Words, ends: int, chars: str | None) -> str:
    if chars is not None:
        _look(words)
    parts: list[str | tuple[int, int]] = list(words.__dict__["parts"])
    # The words of a message hold a visible character: stripping goes no further than the first of them.
    for end, place, strip in ((LEFT, 0, str.lstrip), (RIGHT, -1, str.rstrip)):
        while ends & end:
            part = parts[place]
            stripped = strip(part) if isinstance(part, str) else (part[0], part[1] | end)
            parts[place : place + 1 or None] = [stripped] if stripped else []
            if stripped:
                break
    return Words(parts, words.__dict__["watch"])


class _Watched(ImmutableSandboxedEnvironment):
    """The environment of a template, with an eye on stand-ins; made of another one by `_watched`."""

    intercepted_binops = frozenset({"-", "*", "/", "//", "**", "%"})
    watch: Watch

    def call(__self, __context: Context, __obj: Any, *args: Any, **named: Any) -> Any:
        """Every call that the template makes; the signature is Jinja's."""
        known = {name: __obj is function for name, function in __self.globals.items()}
        keeps = known["namespace"] or known["dict"]
        is_pure = keeps or known["range"] or known["raise_exception"] or not any(known.values())
        if not is_pure or (not keeps and _has_words((args, named))):
            __self.watch.look()
        return super().call(__context, __obj, *args, **named)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Every operator but +, which `Words` watches."""
        if _has_words((left, right)):
            self.watch.look()
        return super().call_binop(context, operator, left, right)


def _has_words(value: Any) -> bool:
    """Whether a stand-in is among the values, as far as can be told."""
    if isinstance(value, Words):
        return True
    if value is None or isinstance(value, (str, int, float, Undefined)):
        return False
    if isinstance(value, Mapping):
        return any(map(_has_words, value.values())) or any(map(_has_words, value))
    if isinstance(value, (list, tuple)):
        return any(map(_has_words, value))
    return True  # a generator, a namespace, a loop: who knows


def _is_harmless_filter(name: str, own: Any, others: Any) -> bool:
    """Whether the filter's result depends on no stand-in's words, or watches them by itself."""
    if name in ("default", "d"):
        return True
    if name in ("trim", "string") and isinstance(own, Words):
        return True
    if name in ("length", "count", "first", "last", "list") and isinstance(own, (list, tuple)):
        return True
    return name != "random" and not _has_words((own, others))


def _watching(function: Callable[..., Any], watch: Watch, is_harmless: Callable[[Any, Any], bool]) -> Callable[..., Any]:
    """A filter or a test that tells of what it looks at."""
    num_passed = int(hasattr(function, "jinja_pass_arg"))  # the context or the environment, before the value

    @functools.wraps(function)
    def watched(*args: Any, **named: Any) -> Any:
        own, *others = args[num_passed:]
        if not is_harmless(own, [*others, *named.values()]):
            watch.look()
        return function(*args, **named)

    return watched


def _is_harmless_test(name: str, own: Any, others: Any) -> bool:
    return name in _KEEPING_TESTS or not _has_words((own, others))


def _is_text_or(test: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, Words) or test(value)


def _join_all(values: list[Any]) -> str:
    """What `~` does, by +."""
    return functools.reduce(lambda left, right: left + right, [value if isinstance(value, str) else str(value) for value in values], "")


class _Traceable(NodeTransformer):
    """Puts filters in the place of `~` and `in`, which nothing can watch."""

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return nodes.Filter(nodes.List(node.nodes), "join_all", [], [], None, None).set_lineno(node.lineno)

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:
        self.generic_visit(node)
        if not any(operand.op in ("in", "notin") for operand in node.ops):
            return node
        if len(node.ops) > 1:
            raise _UntraceableError
        found: nodes.Expr = nodes.Filter(node.expr, "is_in", [node.ops[0].expr], [], None, None)
        found = nodes.Not(found) if node.ops[0].op == "notin" else found
        return found.set_lineno(node.lineno)


class _UntraceableError(Exception):
    pass


def _watched(environment: ImmutableSandboxedEnvironment, watch: Watch) -> _Watched:
    """The same environment, watched."""
    # `overlay` copies everything that transformers has put into it; only what is called by templates differs.
    watched = environment.overlay()
    watched.__class__ = _Watched
    assert isinstance(watched, _Watched)
    watched.watch = watch

    def is_in(value: Any, container: Any) -> bool:
        if isinstance(container, str) and isinstance(value, Words):
            watch.look()
        return value in container

    filters: dict[str, Any] = environment.filters
    tests: dict[str, Any] = environment.tests
    filters = {name: _watching(function, watch, functools.partial(_is_harmless_filter, name)) for name, function in filters.items()}
    tests = {name: _watching(function, watch, functools.partial(_is_harmless_test, name)) for name, function in tests.items()}
    watched.filters = {**filters, "join_all": _join_all, "is_in": is_in}
    watched.tests = {**tests, **{name: _is_text_or(tests[name]) for name in ("iterable", "sequence")}}
    return watched


class Tracer:
    """A chat template, rendered with stand-ins; not for several threads at once.

    Args:
        template: its source.
        variables: what it is given beside the messages: special tokens.
    """

    def __init__(self, template: str, variables: dict[str, Any]) -> None:
        self._variables = variables
        self._watch = Watch()
        self._template = _traceable(template, self._watch)

    def trace(self, roles: Sequence[str], generation_prompt: bool) -> Skeleton | None:
        """What the template renders for messages of these roles, whatever their words; None where it depends on them or cannot be told."""
        if self._template is None:
            return None
        self._watch.has_looked = False
        messages = [{"role": role, "content": Words([(index, AS_IS)], self._watch)} for index, role in enumerate(roles)]
        try:
            text = self._template.render(
                messages=messages, tools=None, documents=None, add_generation_prompt=generation_prompt, **self._variables
            )
        except Exception:
            return None  # a template is foreign code: what it says of real words is told when it is given them
        pieces = _STOOD_IN.split(text)
        literals = tuple(pieces[::3])
        if self._watch.has_looked or any("\ue000" in literal or "\ue001" in literal for literal in literals):
            return None
        return Skeleton(literals, tuple((int(index), int(kind)) for index, kind in zip(pieces[1::3], pieces[2::3], strict=True)))


def _traceable(template: str, watch: Watch) -> Template | None:
    # The function is transformers' own; where another version has none, nothing is traced.
    if not hasattr(chat_template_utils, "_compile_jinja_template"):
        return None
    environment = chat_template_utils._compile_jinja_template(template).environment
    if type(environment) is not ImmutableSandboxedEnvironment:
        return None
    watched = _watched(environment, watch)
    tree = watched.parse(template)
    if next(tree.find_all(_UNTRACEABLE), None) or any(loop.recursive for loop in tree.find_all(nodes.For)):
        return None
    try:
        traceable = _Traceable().visit(tree)
    except _UntraceableError:
        return None
    return watched.from_string(traceable)

"""A conversation is rendered as its chat template renders it, whether the text around the words was remembered or not."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from through_pipe import sent
from tokenizers import AddedToken, Tokenizer, models
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

import data.render
from data.render import Message, Rendered, Renderer, answers
from data.template_trace import _STAND_IN, BOTH, Skeleton, Tracer

LOOP, END = "{% for m in messages %}", "{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
HEAD = LOOP + "[{{ m.role }}]"
# In the manner of the families' templates: the same constructs, few words.
CHATML = r"""
{%- for m in messages %}
    {%- if loop.first and messages[0]['role'] != 'system' %}{{ '[system]be kind[end]\n' }}{% endif %}
    {{- '[' + m['role'] + ']\n' + m['content'] + '[end]' + '\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '[assistant]\n' }}{% endif %}"""
LLAMA3 = r"""
{%- set loop_messages = messages %}
{%- for m in loop_messages %}
    {%- set content = '[' + m['role'] + ']\n\n'+ m['content'] | trim + '[end]' %}
    {%- if loop.index0 == 0 %}{% set content = bos_token + content %}{% endif %}
    {{- content }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '[assistant]\n\n' }}{% endif %}"""
QWEN2 = r"""
{%- if tools %}{{- messages[0].content ~ (tools | tojson) }}
{%- elif messages[0]['role'] == 'system' %}{{- '[system]' + messages[0]['content'] + '[end]\n' }}
{%- else %}{{- '[system]you are[end]\n' }}
{%- endif %}
{%- for m in messages %}
    {%- if (m.role == 'user') or (m.role == 'system' and not loop.first) or (m.role == 'assistant' and not m.tool_calls) %}
        {{- '[' + m.role + ']\n' + m.content + '[end]' + '\n' }}
    {%- elif m.role == 'assistant' and m.content %}{{- m.content | upper }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '[assistant]\n' }}{% endif %}"""
GEMMA = r"""
{%- if messages[0].role == 'system' %}
    {%- set prefix = messages[0].content | trim + '\n\n' %}{% set rest = messages[1:] %}
{%- else %}
    {%- set prefix = '' %}{% set rest = messages %}
{%- endif %}
{{- bos_token }}
{%- for m in rest %}
    {%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}
    {{- '[' ~ ('model' if m.role == 'assistant' else m.role) ~ ']\n' ~ (prefix if loop.first else '') }}
    {%- if m.content is string %}{{ m.content | trim }}
    {%- elif m.content is iterable %}{% for item in m.content %}{{ item.text }}{% endfor %}
    {%- endif %}
    {{- '[end]\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '[model]\n' }}{% endif %}"""
MISTRAL = r"""
{%- if messages[0]['role'] == 'system' %}
    {%- set system = messages[0]['content'] %}{% set rest = messages[1:] %}
{%- else %}
    {%- set rest = messages %}
{%- endif %}
{%- set ns = namespace(index=0) %}
{{- bos_token }}
{%- for m in rest %}
    {%- if m['role'] in ['user', 'tool'] %}
        {%- if loop.first and system is defined %}{{- '[INST]' + system + '\n\n' + m['content'] + '[/INST]' }}
        {%- else %}{{- '[INST]' + m['content'] + '[/INST]' }}
        {%- endif %}
    {%- elif m.role not in ['system'] %}
        {{- ' ' + m['content'].strip() + '[end]' }}{% set ns.index = ns.index + 1 %}
    {%- endif %}
{%- endfor %}"""
PHI3 = r"""
{%- for m in messages %}
    {%- if m['role'] in ['system', 'user'] %}{{ '[' + m.get('role') + ']\n' + m['content'] + '[end]\n' }}
    {%- elif m['role'] == 'assistant' %}{{ '[assistant]\n' + m['content'] + '[end]\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '[assistant]\n' }}{% else %}{{ eos_token }}{% endif %}"""
ZEPHYR = r"""
{% for m in messages %}
{% if m['role'] == 'user' %}
{{ '[user]\n' + m['content'] + eos_token }}
{% else %}
{{ '[' ~ m['role'] ~ ']\n' ~ m['content'] ~ eos_token }}
{% endif %}
{% if loop.last and add_generation_prompt %}
{{ '[assistant]' }}
{% endif %}
{% endfor %}"""
QWEN3 = r"""
{%- set ns = namespace(last=messages | length - 1) %}
{%- for m in messages[::-1] %}
    {%- if m.role == 'user' and not (m.content.startswith('<tool>')) %}{% set ns.last = loop.index0 %}{% endif %}
{%- endfor %}
{%- for m in messages %}
    {%- set content = m.content %}
    {%- if '</think>' in content %}{% set content = content.split('</think>')[-1].lstrip('\n') %}{% endif %}
    {{- '[' + m.role + ']' + content + '[end]\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '[assistant]\n' }}{% endif %}"""
R1 = r"""
{%- for m in messages %}
    {%- if m['role'] == 'assistant' and m['content'] is not none %}
        {%- set content = m['content'] %}
        {%- if '</think>' in content %}{% set content = content.split('</think>')[-1] %}{% endif %}
        {{- '[assistant]' + content + '[end]' }}
    {%- else %}{{ '[' + m.role + ']' + m.content }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '[assistant]<think>\n' }}{% endif %}"""
PUT_OUT = {"chatml": CHATML, "llama3": LLAMA3, "qwen2": QWEN2, "gemma": GEMMA, "mistral": MISTRAL, "phi3": PHI3, "zephyr": ZEPHYR}
LOOKED_AT = {
    "qwen3": QWEN3,
    "r1": R1,
    "macro": HEAD + "{% macro say() %}{{ m.content }}{% endmacro %}{% if say() == 'x' %}ex{% endif %}{{ m.content }}" + END,
    "block": HEAD + "{% set text %}{{ m.content }}!{% endset %}{{ 'ex' if text == 'x!' else text }}" + END,
    "filter block": HEAD + "{% filter trim %}{{ m.content }}{% endfilter %}" + END,
    "previous": HEAD + "{{ '=' if loop.previtem and loop.previtem.content == m.content else m.content }}" + END,
    "changed": HEAD + "{{ loop.changed(m.content) }}{{ m.content }}" + END,
    "loop over": HEAD + "{% for char in m.content %}{{ char }}.{% endfor %}" + END,
    "unpacked": HEAD + "{% set a, b = m.content %}{{ a }}-{{ b }}" + END,
    "letters": HEAD + "{% for char in m.content %}{{ 'x' if char == 'x' }}{% endfor %}" + END,
    "clock": "{{ strftime_now('%Y') }}" + HEAD + "{{ m.content }}" + END,
    "clock by another name": "{% set now = strftime_now %}{{ now('%Y') }}" + HEAD + "{{ m.content }}" + END,
    "chance": "{{ [1] | random }}" + HEAD + "{{ m.content }}" + END,
    "babble": "{{ lipsum(n=0) }}" + HEAD + "{{ m.content }}" + END,
}
LOOKING = [
    "m.content[-1] == 'x'",
    "m.content == 'x'", "'x' == m.content", "m.content != 'x'", "m.content < 'b'", "'x' in m.content", "m.content in 'abc'",
    "m.content not in 'abc'", "m.content in ['x', 'b']", "m.content in {'x': 1}", "m.content | length", "m.content | upper", "m.content | tojson",
    "messages | tojson", "m.content | replace('x', 'y')", "m.content[:3]", "m.content[0]", "messages", "m | string", "m ~ ''", "m.items() | list",
    "{m.content: 1}", "m.content.strip('x')", "m.content | trim('x')", "m.content.upper()", "m.content.startswith('x')",
    "'abc'.startswith(m.content)", "'axb'.replace('x', m.content)", "'-'.join([m.content, 'z'])", "[m.content, 'z'] | join('-')",
    "'%s!' % m.content", "'{}!'.format(m.content)", "m.content | e", "m.content | safe", "m.content * 2", "m.content is lower",
    "m.content is eq 'x'", "m.content is in 'abc'", "[m.content] | sort", "{'x': 1}[m.content]", "messages[m.content] is defined",
    "messages | map(attribute='content') | join", "messages | selectattr('content', 'eq', 'x') | list", "('<' + m.content + '>') == '<x>'",
    "'x' in ('<' ~ m.content)", "(m.content | trim) == 'x'", "m.content | first", "m.content | int", "(m.content ~ '!') | length",
    "dict([m.content])", "m.content is sameas 'x'", "messages | groupby('content') | length", "m.content | indent", "[m.content].index('x')",
    "[m.content].count('x')", "m.content | attr('upper')", "m == {'role': 'user', 'content': 'x'}", "m.content | wordcount",
]
KEEPING = [
    "m.content", "m['content']", "m.content | trim", "m.content.strip()", "m.content.lstrip()", "m.content.rstrip()", "m.content ~ '!' ~ 1",
    "'<' + m.content", "(' a' + m.content + ' ') | trim", "(' ' ~ m.content ~ '\\n').strip()",
    "' ' + (m.content.lstrip() + ' ' + m.content).rstrip()", "m.get('content')", "m.content is string", "m.content is defined",
    "m.content is iterable", "m.content is mapping", "m.content | default('z')", "m.content or 'z'", "m.content and 'z'", "not m.content",
    "m.content | string", "messages | length", "(messages | last).content", "m.role | upper", "'ser' in m.role", "'content' in m",
    "m.content if m.role == 'user' else m.content | trim", "namespace(a=m.content).a", "dict(a=m.content).a", "dict(m).content", "m.role == 'user'",
    "[m.content][0]", "{'a': m.content}.a", "m.role * 2", "loop.index0 % 2", "(m.content, 'z')[0]", "m.tool_calls is defined",
]

NASTY = ["x", "abc", "b", " padded \n", "<think>a</think>\n\nb", "</think>", "{{ 7 * 7 }}{% raw %}", "'q\" \\ \\n", "🌱 é\u0301"]
NASTY += ["\u00a0\u2028.\u00a0", "A<&>"]
NASTY += ["count", "[end]\n[assistant]", "1", "\ue000", "\ue000x\ue001", _STAND_IN.format(0, 0), "%s {} {0.content}"]
BLANK = ["", " ", "\n\t", "\u00a0"]
ROLES = [["user", "assistant"], ["system", "user", "assistant"], ["user", "assistant", "user", "assistant"], ["user", "assistant", "assistant"]]
ROLES += [["system", "user", "assistant", "user", "assistant", "user", "assistant"], ["user", "user", "assistant"]]


def tokenizer(template: str) -> PreTrainedTokenizerBase:
    """One that can render; its special tokens are `<s>` and `</s>`."""
    backend = Tokenizer(models.BPE())
    backend.add_special_tokens([AddedToken("<s>"), AddedToken("</s>")])
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>", chat_template=template)


def said(roles: list[str], words: list[str]) -> list[Message]:
    return [{"role": role, "content": words[index % len(words)]} for index, role in enumerate(roles)]


def by_jinja(made: PreTrainedTokenizerBase, messages: list[Message]) -> Rendered | str:
    """What `apply_chat_template` gives, turn by turn; or the message of its error."""
    try:
        text = str(made.apply_chat_template(messages, tokenize=False))
        befores = [str(made.apply_chat_template(messages[:index], tokenize=False, add_generation_prompt=True)) for index in answers(messages)]
    except Exception as error:
        return str(error)
    return Rendered(text, [len(before) if text.startswith(before) else None for before in befores])


def check(made: PreTrainedTokenizerBase, batches: list[list[list[Message]]]) -> Renderer:
    """Renders batch after batch and compares each conversation with Jinja's render."""
    renderer = Renderer(made)
    for batch in batches:
        for messages, found in zip(batch, renderer.render_answers(batch), strict=True):
            assert (str(found) if isinstance(found, Exception) else found) == by_jinja(made, messages), messages
    return renderer


def showing(expression: str) -> str:
    return HEAD + "{{ " + expression + " }}[end]" + END


WORDS = st.lists(st.one_of(st.sampled_from(NASTY + BLANK), st.text(st.characters(exclude_categories=["Cs"]), max_size=8)), min_size=1, max_size=7)
FAMILIES = {name: tokenizer(template) for name, template in (PUT_OUT | LOOKED_AT).items()}
RENDERERS = {name: Renderer(made) for name, made in FAMILIES.items()}


@given(st.sampled_from(sorted(FAMILIES)), st.sampled_from(ROLES), WORDS)
@settings(max_examples=500, deadline=None)
def test_every_family_is_rendered_as_by_apply_chat_template(name: str, roles: list[str], words: list[str]) -> None:
    messages = said(roles, words)
    (found,) = RENDERERS[name].render_answers([messages])
    assert (str(found) if isinstance(found, Exception) else found) == by_jinja(FAMILIES[name], messages)


@pytest.mark.parametrize("name", sorted(PUT_OUT))
def test_templates_that_only_put_words_out_are_asked_once_a_shape(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made = tokenizer(PUT_OUT[name])
    renderer = Renderer(made)
    roles = ROLES[4]
    renderer.render_answers([said(roles, ["hello"])])
    assert renderer._shapes[tuple(roles)] is not None
    expected = by_jinja(made, said(roles, NASTY))
    monkeypatch.setattr(data.render, "render_jinja_template", None)
    assert renderer.render_answers([said(roles, NASTY)]) == [expected]


@pytest.mark.parametrize("name", sorted(LOOKED_AT))
def test_templates_that_look_at_words_are_asked_for_every_conversation(name: str) -> None:
    assert Tracer(LOOKED_AT[name], {}).trace(ROLES[3], False) is None
    renderer = check(tokenizer(LOOKED_AT[name]), [[said(roles, NASTY[index:]) for roles in ROLES] for index in range(8)])
    assert renderer._shapes and not any(renderer._shapes.values())


@pytest.mark.parametrize("expression", LOOKING)
def test_a_look_at_the_words_is_noticed(expression: str) -> None:
    assert Tracer(showing(expression), {}).trace(["user", "assistant"], False) is None
    for template in (showing(expression), HEAD + "{% if " + expression + " %}yes{% else %}no{% endif %}" + END):
        check(tokenizer(template), [[said(["user", "assistant"], [word, "hi"])] for word in NASTY])


@pytest.mark.parametrize("expression", KEEPING)
def test_putting_words_out_is_not_a_look_at_them(expression: str) -> None:
    assert Tracer(showing(expression), {}).trace(["user", "assistant"], False) is not None
    check(tokenizer(showing(expression)), [[said(ROLES[2], NASTY[index:] + BLANK)] for index in range(len(NASTY))])


ATOMS = [
    "m.content", "m.content", "m.role", "'x'", "'abc '", "ns.x", "messages[0].content", "loop.index0", "m", "[m.content, 'x']", "text",
]
UNARY = [
    "({} | trim)", "({}.strip())", "({}.rstrip())", "({} | upper)", "({}[:2])", "({} | replace('a', 'b'))", "('y' if {} else 'n')", "({} | length)",
    "('%s!' % {})", "({} | tojson)", "({}.split('x')[-1])", "('abc'.replace('b', {}))", "({} | default('z'))", "({} * 2)", "({} is string)",
    "({} | first)", "('abc'.startswith({}))", "({{'x': 1}}[{}])", "(not {})", "({} | string)", "({} | list)", "({} is iterable)",
    "namespace(x={}).x", "({} | int)",
]
BINARY = [
    "({} + {})", "({} ~ {})", "({} == {})", "({} in {})", "({} not in {})", "({} or {})", "({} and {})", "('{{}}-{{}}'.format({}, {}))",
    "([{}, {}] | join)", "({} < {})", "({} if {} else 'n')", "({}).get({})", "({} | default({}, true))", "{{'a': {}, 'b': {}}}.b",
]
STATEMENTS = [
    "{{{{ {} }}}}", "{{% if {} %}}Y{{% else %}}N{{% endif %}}", "{{% set ns.x = {} %}}", "{{% set text = {} %}}{{{{ text }}}}",
    "{{% for part in {} %}}{{{{ part }}}},{{% endfor %}}", "{{% set text %}}{{{{ {} }}}}{{% endset %}}",
]


def expressions(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    unary = st.builds(lambda form, a: form.format(a), st.sampled_from(UNARY), inner)
    return st.one_of(unary, st.builds(lambda form, a, b: form.format(a, b), st.sampled_from(BINARY), inner, inner))


EXPRESSIONS = st.recursive(st.sampled_from(ATOMS), expressions, max_leaves=4)
BODIES = st.lists(st.builds(lambda form, a: form.format(a), st.sampled_from(STATEMENTS), EXPRESSIONS), min_size=1, max_size=3)


@pytest.mark.filterwarnings("ignore::SyntaxWarning")
@given(BODIES, st.lists(st.lists(st.sampled_from(NASTY), min_size=2, max_size=2), min_size=4, max_size=4))
@settings(max_examples=400, deadline=None)
def test_any_template_renders_as_by_apply_chat_template(bodies: list[str], words: list[list[str]]) -> None:
    template = "{% set ns = namespace(x='') %}" + HEAD + "".join(bodies) + END
    conversations = [said(["user", "assistant"], pair) for pair in [*words, ["x", "abc"], ["abc", "x"], ["b", "b"]]]
    check(tokenizer(template), [[messages] for messages in conversations])


def test_words_are_stripped_where_the_template_strips_them() -> None:
    skeleton = Tracer(showing("(' ' + m.content + '! ') | trim"), {}).trace(["user"], True)
    assert skeleton == Skeleton(("[user]", "![end][assistant]"), ((0, 1),))
    assert Tracer(showing("m.content.strip()"), {}).trace(["user"], False) == Skeleton(("[user]", "[end]"), ((0, BOTH),))


def test_blank_words_are_left_to_jinja() -> None:
    template = HEAD + "{{ m.content if m.content else 'nothing' }}{{ '!' if m.content | trim else '?' }}" + END
    check(tokenizer(template), [[said(ROLES[2], ["x"])], [said(ROLES[2], ["x", blank]) for blank in BLANK]])


def test_a_prompt_that_the_whole_does_not_begin_with_has_no_end() -> None:
    numbered = LOOP + "[{{ m.role }} of {{ messages | length }}]{{ m.content }}" + END
    renderer = check(tokenizer(numbered), [[said(ROLES[2], ["x"])], [said(ROLES[2], NASTY)]])
    assert renderer.render_answers([said(ROLES[2], ["x"])])[0].prompt_ends == [None, None]  # type: ignore[union-attr]


def test_what_the_template_refuses_is_refused_beside_others() -> None:
    good, bad = said(ROLES[0], ["hi"]), said(ROLES[5], ["hi"])
    found = check(tokenizer(PUT_OUT["gemma"]), [[bad, good, bad]]).render_answers([good, bad, good])
    assert [type(item).__name__ for item in found] == ["Rendered", "TemplateError", "Rendered"]
    assert str(found[1]) == "roles must alternate"


def test_a_shape_that_does_not_give_what_jinja_gives_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Tracer, "trace", lambda self, roles, generation_prompt: Skeleton(("wrong",), ()))
    assert not any(check(tokenizer(PUT_OUT["chatml"]), [[said(ROLES[0], ["hi"])]])._shapes.values())


def test_remembered_shapes_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data.render, "_MAX_TURNS", 30)
    conversations = [[said(["user", "assistant"] * number, NASTY)] for number in (1, 2, 3, 4, 5, 6, 7, 8, 1, 2)]
    renderer = check(tokenizer(PUT_OUT["chatml"]), conversations)
    assert 0 < sum(map(len, renderer._shapes)) < 60


def test_a_renderer_sent_to_another_process_knows_the_same_shapes() -> None:
    made = tokenizer(PUT_OUT["llama3"])
    renderer = check(made, [[said(ROLES[0], ["hi"])]])
    other = sent(renderer)
    assert other._shapes == renderer._shapes
    for roles in ROLES[:3]:
        assert other.render_answers([said(roles, NASTY)]) == [by_jinja(made, said(roles, NASTY))]


def test_another_version_of_transformers_renders_every_conversation(monkeypatch: pytest.MonkeyPatch) -> None:
    made: Any = tokenizer(PUT_OUT["chatml"])
    monkeypatch.setattr("data.template_trace.chat_template_utils", json)
    assert Tracer(made.chat_template, {}).trace(["user"], False) is None

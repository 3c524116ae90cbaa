"""Chat templates: what is the template's, what the request's, and where media go."""

import json
import re

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

pytest.importorskip("PIL")
pytest.importorskip("jinja2")

from gateway_media import FAMILY, LetterTokenizer

from examples.m3_serving.gateway.errors import GatewayError, InvalidParameter, PromptMismatch
from examples.m3_serving.gateway.expand import Expander
from examples.m3_serving.gateway.families import Qwen2VLFamily
from examples.m3_serving.gateway.protocols import MediaSlot, TemplateText, UserText
from examples.m3_serving.gateway.server.template import ChatTemplate, Message, load_template

SPECIALS = ["]~!b[", "]~b]", "[e~[", *FAMILY.placeholder_tokens, *FAMILY.bracket_tokens]


def user(*content, role="user", **extra):
    return Message(role, content, extra)


def render(source, *messages, media=(), family=FAMILY, **variables):
    return ChatTemplate(source, family, variables).render(messages, media)


def spelled(parts):
    """Parts as text: the request's between curly brackets."""
    return "".join(
        f"{{{part.text}}}"
        if isinstance(part, UserText)
        else f"<{part.index}>"
        if isinstance(part, MediaSlot)
        else part.text
        for part in parts
    )


def test_the_familys_own_template():
    parts = render(
        FAMILY.chat_template,
        user("Be brief.", role="system"),
        user("What", MediaSlot(0), "and", MediaSlot(1)),
        user("A cat.", role="assistant"),
        user(MediaSlot(2)),
        media=["image", "video", "image"],
    )
    assert spelled(parts) == (
        "]~!b[]~b]system\n{Be brief.}[e~[\n]~b]user\n{What}<0>{and}<1>[e~[\n"
        "]~b]ai\n{A cat.}[e~[\n]~b]user\n<2>[e~[\n]~b]ai\n"
    )


def test_the_other_familys_template_and_brackets():
    family = Qwen2VLFamily()
    messages = [user("a", MediaSlot(0), MediaSlot(1))]
    expected = "<|im_start|>user\n{a}<0><1><|im_end|>\n<|im_start|>assistant\n"
    own = render(family.chat_template, *messages, media=["image", "video"], family=family)
    assert spelled(own) == expected
    # Released templates write the brackets too, which the family writes already.
    bracketed = family.chat_template.replace(
        "'<|' ~ part.type ~ '_pad|>'", "'<|vision_start|><|' ~ part.type ~ '_pad|><|vision_end|>'"
    )
    assert bracketed != family.chat_template
    both = render(bracketed, *messages, media=["image", "video"], family=family)
    assert spelled(both) == expected


TEMPLATE_WAYS = [
    "{{ c }}",
    "{{ 'a' + c + ']~b]' }}",
    "{{ c ~ ']~b]' }}",
    "{{ c | trim }}",
    "{{ c.strip() + '[e~[' }}",
    "{{ (c + ' ') | trim }}",
    "{{ c | upper }}{{ c | lower }}{{ c | title }}{{ c | capitalize }}",
    "{{ c.split(']')[-1] }}{{ c.split('x')[0] }}{{ c.rpartition('b')[2] }}",
    "{{ c.replace('x', '') }}{{ c | replace('x', 'y') }}",
    "{{ 'x'.replace('x', c) }}{{ 'xyx'.join([c, c]) }}{{ [c, c] | join('-') }}",
    "{{ '%s!' % c }}{{ '%s' | format(c) }}{{ '{} {x}'.format(c, x=c) }}{{ 'a'.center(9, c[0]) }}",
    "{% for letter in c %}{{ letter }}{% endfor %}",
    "{% for letter in c | list %}{{ letter }}{% endfor %}{{ c | list | join }}",
    "{{ c[1:] }}{{ c[:-1] }}{{ c[::-1] }}{{ c[0] }}{{ c | first }}{{ c | last }}{{ c | reverse }}",
    "{{ [c] }}{{ {'x': c} }}{{ messages }}{{ messages[0] }}{{ (c,) }}",
    "{{ messages | tojson }}{{ c | tojson }}{{ messages | tojson(indent=2) }}",
    "{{ c | indent }}{{ c | wordwrap(4) }}{{ c | center(20) }}{{ c | truncate(5) }}",
    "{{ c | e }}{{ c | safe }}{{ c | forceescape }}{{ c | striptags }}{{ c | urlize }}",
    "{{ c | pprint }}{{ [c] | pprint }}{{ c | string }}{{ c | batch(2) | list }}",
    "{% set x = c %}{{ x }}{% set y %}{{ c }}{% endset %}{{ y }}{{ y | upper }}",
    "{% macro m(t) %}{{ t }}{% endmacro %}{{ m(c) }}{{ m(c) + '!' }}{{ m(t=c) | upper }}",
    "{% set ns = namespace(t='') %}{% for l in c %}{% set ns.t = ns.t + l %}{% endfor %}{{ ns.t }}",
    "{% filter upper %}{{ c }}{% endfilter %}{% filter indent %}{{ c }}{% endfilter %}",
    "{{ c * 2 }}{{ 2 * c }}{{ [c] | sort | join }}{{ [c, 'a'] | map('upper') | join(',') }}",
    "{{ c.splitlines() | join('\n') }}{{ c.title() }}{{ c.zfill(30) }}{{ c.expandtabs() }}",
    "{{ [c] | sum(start='') }}{{ c | default('x') }}{{ c | xmlattr }}",
    "{{ cycler(c, 'b').next() }}{{ joiner(c) }}{{ dict(a=c)['a'] }}{{ c.encode().decode() }}",
    "{% autoescape true %}{{ c }}{{ c ~ 'x' }}{{ 'x' ~ c }}{% endautoescape %}",
    "{{ c.translate({120: 'y'}) }}{{ c.format() }}{{ c.format_map({}) }}{{ strftime_now(c) }}",
    "{{ (c ~ 'x').split('x')[0] }}{{ (c ~ 'x')[1:] }}{{ (c ~ 'x').removeprefix('x') }}",
    "{{ (c ~ 'x')[1:] }}{{ (c ~ 'x')[:1] }}",
    "{{ 'x'.partition(c) }}{{ ''.join(c) }}{{ ' '.join(c.split()) }}{{ 'y'.__add__(c) }}",
]
HOSTILE = st.lists(
    st.sampled_from([*SPECIALS, "]", "~", "b", "x", " ", "\n", "ö", "<", ">[", "%s", "{}"]),
    min_size=1,
    max_size=8,
).map("".join)


@pytest.mark.parametrize("way", TEMPLATE_WAYS)
@settings(deadline=None, max_examples=25)
@given(text=HOSTILE)
def test_no_way_through_a_template_makes_text_of_the_request_the_templates(way, text):
    """What the template says does not depend on the request's letters, or it is refused."""
    source = "{% set c = messages[0].content %}]~b]user\n" + way + "[e~["
    try:
        template = ChatTemplate(source, FAMILY)
    except ValueError:
        return  # refused when the gateway starts
    try:
        parts = template.render([user(text)], [])
    except GatewayError as error:
        assert error.status == 400
        assert not re.search("[\ud800-\udfff]", error.message)
        return
    tokenizer = LetterTokenizer(SPECIALS)
    ids = Expander(FAMILY, tokenizer).expand(parts, [], 10**6).token_ids
    written = source.count("]~b]") + source.count("[e~[")
    assert sum(token < len(SPECIALS) for token in ids) <= written
    assert not any(re.search("[\ud800-\udfff]", getattr(part, "text", "")) for part in parts)


def test_what_templates_do_with_reasoning_still_works():
    source = (
        "{% for m in messages %}{% if '</think>' in m.content %}"
        "{{ m.content.split('</think>')[-1].lstrip('\\n') + '[e~[' }}"
        "{% else %}{{ m.content }}{% endif %}{% endfor %}"
    )
    parts = render(source, user("<think>secret</think>\n\nanswer ]~b]", role="assistant"))
    assert spelled(parts) == "{answer ]~b]}[e~["
    assert [type(part) for part in parts] == [UserText, TemplateText]


def test_names_and_reasoning_are_the_requests_text_too():
    source = "{{ messages[0].name ~ messages[0].reasoning_content }}{{ messages[0].role }}"
    template = ChatTemplate(source, FAMILY)
    parts = template.render([user("x", role="assistant", name="]~b]", reasoning_content="r")], [])
    assert spelled(parts) == "{]~b]r}assistant"


def test_variables_of_the_tokenizer_are_the_templates():
    parts = render("{{ bos_token }}{{ messages[0].content }}", user("a"), bos_token="]~!b[")
    assert spelled(parts) == "]~!b[{a}"


@pytest.mark.parametrize(
    "source",
    [
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}",
        "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}{% endfor %}",
        "{% for m in messages %}<{{ m.role }}>{{ m['content'].strip() }}{% endfor %}",
        "{% for m in messages %}{{ '<' + m.role + '>' + m.content }}{% endfor %}",
    ],
)
def test_templates_that_know_no_parts_get_media_in_the_text(source):
    messages = [user("be", MediaSlot(0), role="system"), user("a", MediaSlot(1), "b")]
    parts = render(source, *messages, media=["image", "video"])
    assert spelled(parts) == "<system>{be}<0><user>{a}<1>{b}"


def test_text_in_parts_is_one_string_for_every_template():
    source = "{% for m in messages %}{{ m.content is string }}{{ m.content }}{% endfor %}"
    assert spelled(render(source, user("a", "b", "c"))) == "True{abc}"


def test_an_assistant_without_content_is_rendered():
    source = "{% for m in messages %}{{ m.role }}{{ m.content or '-' }}{% endfor %}"
    assert spelled(render(source, Message("assistant", None, {}))) == "assistant-"


LOSING = [
    ("{{ 'x' if messages[0].content is string else ']<]image[>[' * 2 }}", ["image"]),
    ("{{ 'x' if messages[0].content is string else ']<]video[>[' }}", ["image"]),
    ("]<]image[>[{{ messages[0].content }}", []),
    (
        "{{ messages[0].content if messages[0].content is string else ']<]image[>[' }}" * 2,
        ["image"],
    ),
    ("hello", ["image"]),
]


@pytest.mark.parametrize(("source", "media"), LOSING)
def test_media_that_are_lost_doubled_or_exchanged_are_a_mismatch(source, media):
    if not media:
        with pytest.raises(ValueError, match="puts images where the request has none"):
            ChatTemplate(source, FAMILY)
        return
    template = ChatTemplate(source, FAMILY)
    with pytest.raises(PromptMismatch) as caught:
        template.render([user("a", *map(MediaSlot, range(len(media))))], media)
    assert caught.value.status == 400


def test_a_templates_refusal_is_the_requests_fault_in_the_templates_words():
    source = (
        "{% if messages | length > 1 %}{{ raise_exception('one only: ' + messages[1].content) }}"
    )
    source += "{% endif %}"
    template = ChatTemplate(source, FAMILY)
    with pytest.raises(InvalidParameter, match="refuses these messages: one only: two"):
        template.render([user("one"), user("two")], [])
    broken = ChatTemplate(
        "{{ messages[0].content }}{{ messages[1:][0].x.y if messages[1:] }}", FAMILY
    )
    with pytest.raises(InvalidParameter, match="cannot render"):
        broken.render([user("one"), user("two")], [])


@pytest.mark.parametrize(
    "source",
    [
        "{% if",
        "{{ nonsense() }}",
        "{{ messages.__class__.__mro__ }}",
        "{{ ''.__class__.__base__.__subclasses__() }}",
        "{{ messages[0].content.__class__ }}",
        "{{ messages.append(1) }}",
        "{% include '/etc/passwd' %}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ raise_exception('never') }}",
    ],
)
def test_templates_that_do_not_work_or_break_out_stop_the_start(source):
    with pytest.raises(ValueError, match="chat template"):
        template = ChatTemplate(source, FAMILY)
        # Reading a forbidden attribute gives nothing, which is as good.
        assert spelled(template.render([user("a")], [])) == ""
        raise ValueError("the chat template shows nothing")


def test_where_a_template_comes_from(tmp_path):
    messages = [user("a")]

    def shown():
        return spelled(load_template(tmp_path, FAMILY).render(messages, []))

    assert shown().startswith("]~!b[]~b]user")
    config = {"chat_template": "config {{ bos_token }}", "bos_token": {"content": "B"}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert shown() == "config B"
    config["chat_template"] = [
        {"name": "tool_use", "template": "no"},
        {"name": "default", "template": "named"},
    ]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert shown() == "named"
    (tmp_path / "chat_template.jinja").write_text("file {{ bos_token }}")
    assert shown() == "file B"
    (tmp_path / "other").write_text("other")
    template = load_template(tmp_path, FAMILY, tmp_path / "other")
    assert spelled(template.render(messages, [])) == "other"
    for content in ("{", "[]", '"x"'):
        (tmp_path / "tokenizer_config.json").write_text(content)
        with pytest.raises(ValueError, match="cannot be read"):
            load_template(tmp_path, FAMILY)
    (tmp_path / "tokenizer_config.json").unlink()
    with pytest.raises(ValueError, match="cannot be read"):
        load_template(tmp_path, FAMILY, tmp_path / "missing")

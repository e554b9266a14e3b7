"""Chat templates: what transformers' sandbox gives, and what a broken or hostile template gets."""

import datetime
import threading

import pytest

from pagedkv.models.chat_template import MAX_SOURCE_CHARS, ChatTemplate, ChatTemplateError

HI = [{"role": "user", "content": "hi"}]


def render(source: str, messages=HI, **variables) -> str:
    return ChatTemplate(source).render(messages, **variables)


def refused(source: str, messages=HI, max_seconds: float = 0.3, **variables) -> str:
    with pytest.raises(ChatTemplateError) as caught:
        ChatTemplate(source, max_seconds=max_seconds, max_chars=100_000).render(messages, **variables)
    assert "\n" not in str(caught.value)
    return str(caught.value)


class TestRendering:
    def test_blocks_leave_no_blank_lines(self):
        lines = ["{% for m in messages %}", "    {% if true %}", "{{ m.role }}:{{ m['content'] }}", "    {% endif %}"]
        source = "\n".join([*lines, "{% endfor %}", "end"])
        assert render(source) == "user:hi\nend"

    def test_variables(self):
        assert render("{{ add_generation_prompt }}{{ tools is none }}{{ x }}", x=5) == "TrueTrue5"
        assert ChatTemplate("{{ add_generation_prompt }}").render(HI, False) == "False"
        assert render("{% for t in tools %}{{ t.name }}{% endfor %}", tools=[{"name": "f"}]) == "f"
        assert render("{{ undefined_thing }}|") == "|"

    def test_tojson_is_plain_json(self):
        value = {"b": "é<&'\"", "a": [1, None, True]}
        assert render("{{ x | tojson }}", x=value) == '{"b": "é<&\'\\"", "a": [1, null, true]}'
        assert render("{{ x | tojson(indent=2) }}", x={"a": 1}) == '{\n  "a": 1\n}'

    def test_nothing_is_escaped(self):
        assert render("{{ messages[0].content }}", [{"role": "user", "content": "<b>&'"}]) == "<b>&'"

    def test_loop_controls_and_namespaces(self):
        assert render("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}") == "01"
        assert (
            render(
                "{% set ns = namespace(n=0) %}{% for i in range(4) %}{% set ns.n = ns.n + i %}{% endfor %}{{ ns.n }}"
            )
            == "6"
        )

    def test_text_helpers_that_templates_use(self):
        assert render("{{ ' a,b '.strip().split(',') | join('-') | upper }}{{ 'xay'.replace('a', 'bb') }}") == "A-Bxbby"
        assert (
            render("{{ ', '.join(['a', 'b']) }}{{ 'a\nb' | indent(2) }}{{ 'a' | replace('a', 'c') }}") == "a, ba\n  bc"
        )
        assert (
            render("{{ 'ab' * 2 }}{{ 3 * 4 }}{{ 7 % 4 }}{{ 'a' + 'b' }}{{ 1 ~ 'x' }}{{ [1] + [2] }}")
            == "abab123ab1x[1, 2]"
        )

    def test_macros(self):
        assert render("{% macro f(x) %}<{{ x }}>{% endmacro %}{{ f(1) }}{{ f('a') | trim }}") == "<1><a>"

    def test_strftime_now(self):
        before, text, after = datetime.date.today(), render("{{ strftime_now('%Y-%m-%d') }}"), datetime.date.today()
        assert before.isoformat() <= text <= after.isoformat()


# what transformers 5.24 makes of CHAT
CHAT = [
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "yo", "reasoning": "why", "tool_calls": None, "name": None},
]
AS_TRANSFORMERS = [
    ('{% generation %}<{{ messages[0].content }}>{% endgeneration %}',
     '<hi>'),
    ('{% for m in messages %}{%- generation -%} {{ loop.index }}{{ m.role }} {%- endgeneration -%}{% endfor %}',
     '1user2assistant'),
    ('{% set x = 1 %}{% generation %}{% set x = 2 %}{{ x }}{% endgeneration %}{{ x }}',
     '21'),
    ("{{ '%s-%d %5.2f|%-4s|%r' % ('a', 3, 1.5, 'b', 'c') }}",
     "a-3  1.50|b   |'c'"),
    ("{{ '%(a)s%%%(a)s' % {'a': 'x'} }}",
     'x%x'),
    ("{{ '%s' % messages[0].content }}",
     'hi'),
    ("{{ '%s' % [1, 'a'] }}",
     "[1, 'a']"),
    ("{{ '{}-{:>4}-{x!r}'.format(1, 'b', x='c') }}",
     "1-   b-'c'"),
    ("{{ '{0[content]}{1:{2}}'.format(messages[0], 'a', 4) }}|",
     'hia   |'),
    ("{{ '{a}'.format_map({'a': 2}) }}",
     '2'),
    ("{{ '%s and %s' | format('a', 'b') }}",
     'a and b'),
    ("{{ 'a' | center(5) }}|{{ 'a'.center(4, '*') }}|{{ 'a'.ljust(3) }}|{{ 'a'.rjust(3) }}|{{ '7'.zfill(3) }}",
     '  a  |*a**|a  |  a|007'),
    ('{% for row in [1, 2, 3, 4, 5] | batch(2, 0) %}{{ row }}{% endfor %}',
     '[1, 2][3, 4][5, 0]'),
    ('{% for row in [1, 2, 3, 4, 5] | slice(2) %}{{ row }}{% endfor %}',
     '[1, 2, 3][4, 5]'),
    ("{{ 'see http://a.b/c now' | urlize }}",
     'see http://a.b/c now'),
    ("{{ 'aaa bbb ccc' | wordwrap(5) }}",
     'aaa\nbbb\nccc'),
    ("{{ {'a': 'x', 'b': 1} | xmlattr }}",
     ' a="x" b="1"'),
    ('{{ 123456 | filesizeformat }}',
     '123.5 kB'),
    ("{{ {'a': [1, 2]} | pprint }}",
     "{'a': [1, 2]}"),
    ("{{ 'a\\tb'.expandtabs(4) }}{{ 'ab'.translate({97: 'x'}) }}",
     'a   bxb'),
    ("{{ [1, 2, 3] | join(', ') }}{{ messages | join('-', attribute='role') }}",
     '1, 2, 3user-assistant'),
    ("{{ 2.567 | round(1) }}{{ 2.5 | round(0, 'ceil') }}{{ 1234 | round(-2) }}",
     '2.63.01200'),
    ("{% set c = cycler('a', 'b') %}{{ c.next() }}{{ c.next() }}{{ c.next() }}"
     "{% set j = joiner('+') %}{{ j() }}1{{ j() }}2",
     'aba1+2'),
    ("{{ ['b', 'a'] | sort | tojson(indent=1) }}{{ 'a b' | title | truncate(5) }}",
     '[\n "a",\n "b"\n]A B'),
    ("{{ messages | map(attribute='content') | map('center', 4) | list }}",
     "[' hi ', ' yo ']"),
    ("{{ 'a,b'.partition(',') }}{{ 'é'.encode('utf-8') | length }}",
     "('a', ',', 'b')2"),
    ("{{ '{:,}'.format(1234567) }}{{ '{:.3f}'.format(2.5) }}{{ '%x' % 255 }}{{ '%05d' % 42 }}",
     '1,234,5672.500ff00042'),
    ('{{ messages[1].reasoning_content }}{{ messages[1].thinking }}',
     'whywhy'),
    ("{{ 'tool_calls' in messages[1] }}{{ messages[1].name is defined }}",
     'FalseFalse'),
    ("{{ 'a' ~ 1 ~ none }}{{ 7 // 2 }}{{ 'abc'[::-1] }}{{ 'a' in 'abc' }}{{ dict(a=1) }}",
     "a1None3cbaTrue{'a': 1}"),
    ("{{ {'b': 1, 'a': 2} | dictsort }}{{ [1, 1, 2] | unique | list }}{{ [1, 2, 3] | sum }}"
     "{{ 'a<b' | e }}{{ ['x'] | first }}",
     "[('a', 2), ('b', 1)][1, 2]6a&lt;bx"),
    ("{{ ('%s' | safe) % '<b>' }}{{ '<i>' | striptags }}{{ 'a b' | urlencode }}{{ 'a b c' | wordcount }}",
     '&lt;b&gt;a%20b3'),
]  # fmt: skip


@pytest.mark.parametrize(("source", "text"), AS_TRANSFORMERS)
def test_as_transformers_renders(source, text):
    assert render(source, CHAT) == text


class TestContent:
    def test_null_is_empty(self):
        assert render("{{ messages[0].content + '|' }}", [{"role": "assistant", "content": None}]) == "|"
        assert render("{{ messages[0].content + '|' }}", [{"role": "assistant"}]) == "|"

    def test_text_parts_are_joined(self):
        parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
        assert render("{{ messages[0]['content'] + '|' }}", [{"role": "user", "content": parts}]) == "ab|"

    def test_templates_that_read_parts_get_parts(self):
        source = "{% for p in messages[0]['content'] %}<{{ p.text }}>{% endfor %}"
        parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
        assert render(source, [{"role": "user", "content": parts}]) == "<a><b>"

    def test_other_parts_are_refused(self):
        message = {"role": "user", "content": [{"type": "image_url", "image_url": {}}]}
        assert "part of type 'image_url'" in refused("{{ messages[0].content }}", [message])
        assert "not int" in refused("x", [{"role": "user", "content": 5}])

    @pytest.mark.parametrize("messages", ["hi", None, [1], {"role": "user"}])
    def test_messages_that_are_none(self, messages):
        assert refused("x", messages) == "messages: must be a list of dicts with role and content"

    def test_messages_are_not_changed(self):
        messages = [{"role": "user", "content": None}]
        render("{{ messages }}", messages)
        assert messages == [{"role": "user", "content": None}]


class TestBroken:
    def test_syntax(self):
        with pytest.raises(ChatTemplateError, match="chat template line 2: "):
            ChatTemplate("a\n{% endfor %}")
        with pytest.raises(ChatTemplateError, match="chat template"):
            ChatTemplate("{{ x | no_such_filter }}")
        with pytest.raises(ChatTemplateError):
            ChatTemplate("{{" + "(" * 5000)
        with pytest.raises(ChatTemplateError, match=f"at most {MAX_SOURCE_CHARS}"):
            ChatTemplate("x" * (MAX_SOURCE_CHARS + 1))

    def test_the_templates_own_refusal(self):
        assert refused("{{ raise_exception('Roles must\nalternate') }}") == "Roles must alternate"

    def test_errors_while_rendering(self):
        assert refused("{{ 1 / 0 }}") == "chat template: division by zero"
        assert "chat template: " in refused("{{ messages[0].content + 1 }}")
        assert "chat template: " in refused("{{ missing.attribute }}")

    def test_it_is_an_ordinary_value_error(self):
        with pytest.raises(ValueError):
            render("{{ raise_exception('no') }}")


class TestHostile:
    @pytest.mark.parametrize(
        "source",
        [
            "{{ ''.__class__.__mro__[1].__subclasses__() }}",
            "{{ messages.append(1) }}",
            "{{ messages[0].update({'a': 1}) }}",
            "{{ messages.__init__.__globals__ }}",
            "{{ raise_exception.__globals__.keys() }}",
            "{{ strftime_now.__globals__['threading'] }}",
            "{{ lipsum(10) }}",
            "{{ ('' | attr('format'))('x').__class__.__mro__ }}",
            "{{ cycler.__init__.__globals__.keys() }}",
        ],
    )
    def test_no_way_out(self, source):
        refused(source)

    @pytest.mark.parametrize("field", ["0.__class__", "0.__class__.__mro__", "0.__init__.__globals__", "x.__class__"])
    @pytest.mark.parametrize("use", ["'{F}'.format(cycler, x='a')", "'{F}'.format_map({'0': cycler, 'x': 'a'})"])
    def test_formats_show_no_more_than_attributes_do(self, field, use):
        source = "{{ " + use.replace("F", field) + " }}|"
        try:
            assert render(source) == "|"
        except ChatTemplateError as error:
            assert "\n" not in str(error)

    @pytest.mark.parametrize(
        "expression",
        [
            "'a' * 10**9",
            "'a' * 1000000000",
            "1000000000 * 'a'",
            "([1] * 1000000000) | length",
            "9 ** 99999999",
            "'x'.ljust(1000000000)",
            "'{:1000000000}'.format(1)",
            "'%1000000000d' % 1",
            "'x' | indent(1000000000, true)",
            "'x'.center(1000000000)",
            "'x'.zfill(1000000000)",
            "'x'.rjust(width=1000000000)",
            "('\\t' * 1000).expandtabs(1000000)",
            "('a' * 1000).translate({97: 'b' * 1000})",
            "'x' | center(1000000000)",
            "[1] | batch(1000000000, 0) | list",
            "[1] | slice(1000000000) | list",
            "('a ' * 1000) | wordwrap(1, wrapstring='b' * 1000)",
            "('a.com ' * 1000) | urlize(target='b' * 1000)",
            "1.5 | round(100000000, 'ceil')",
            "[1] | tojson(indent='x' * 1000)",
            "([0] * 10000) | join('x' * 1000)",
            "'{:1000000000}'.format(1)",
            "'{:{}}'.format('a', 1000000000)",
            "'{0}{0}{0}{0}{0}{0}{0}{0}{0}{0}{0}{0}{0}'.format('a' * 10000)",
            "'{a:1000000000}'.format_map({'a': 1})",
            "'%s' | format('a' * 90000) | format() ~ '%.1000000000f' % 1",
            "'%1000000000d' | format(1)",
            "'%*d' % (1000000000, 1)",
            "('%(a)s' * 1000) % {'a': 'x' * 1000}",
            "(1).to_bytes(1000000000, 'big')",
            "('a' * 1000).encode().replace('a'.encode(), ('b' * 1000).encode())",
        ],
    )
    def test_operators_are_bounded(self, expression):
        assert "not finished" not in refused("{{ " + expression + " }}", max_seconds=20)

    @pytest.mark.parametrize(
        ("start", "step"),
        [
            ("3", "ns.x * ns.x"),
            ("'ab'", "ns.x + ns.x"),
            ("'ab'", "ns.x ~ ns.x"),
            ("'ab'", "ns.x.replace('a', ns.x)"),
            ("'ab'", "ns.x | replace('a', ns.x)"),
            ("'ab'", "ns.x.join([ns.x, ns.x])"),
            ("'ab'", "double(ns.x)"),
            ("[1]", "ns.x + ns.x"),
        ],
    )
    def test_growth_by_repetition_is_bounded(self, start, step):
        macro = "{% macro double(x) %}{{ x }}{{ x }}{% endmacro %}"
        loop = "{% for i in range(60) %}{% set ns.x = STEP %}{% endfor %}".replace("STEP", step)
        source = macro + "{% set ns = namespace(x=START) %}".replace("START", start) + loop
        assert "not finished" not in refused(source, max_seconds=20)

    @pytest.mark.parametrize(
        "use", ["ns.x", "ns.x | tojson", "ns.x | string", "ns.x | join", "ns.x ~ ''", "ns.x | upper"]
    )
    def test_lists_within_lists_are_bounded(self, use):
        loop = "{% for i in range(60) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}"
        source = "{% set ns = namespace(x=[1]) %}" + loop + "{{ USE }}".replace("USE", use)
        assert "not finished" not in refused(source, max_seconds=20)

    def test_output_is_bounded(self):
        assert "at most 100000" in refused("{% for i in range(99999) %}xxxxxxxxxxxxxxxx{% endfor %}", max_seconds=20)

    @pytest.mark.parametrize(
        "source",
        [
            "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
            "{% macro f(n) %}{% for i in range(9) %}{{ f(n) if n else '' }}{% endfor %}{% endmacro %}"
            "{% for i in range(99999) %}{% for j in range(99999) %}{% set x = j %}{% endfor %}{% endfor %}",
        ],
    )
    def test_time_is_bounded(self, source):
        before = threading.active_count()
        assert refused(source) == "chat template: not finished after 0.3 seconds"
        assert threading.active_count() == before

    def test_endless_recursion(self):
        assert "chat template: " in refused("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}")

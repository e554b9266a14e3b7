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
        ],
    )
    def test_no_way_out(self, source):
        refused(source)

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

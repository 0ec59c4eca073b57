"""The finish guard through the patched post-processors of every window: nothing ends in silence (I4)."""

from __future__ import annotations

import logging

import pytest

from .common.loading import WINDOWS
from .serving import Server

pytestmark = pytest.mark.usefixtures("nothing_published")

MERGING = ("w13b", "w14")  # adapters that feed the last response's tokens
THOUGHT = "<|channel|>analysis<|message|>Need the weather.<|end|>"
CALL = '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"x": 1}'
SECOND = "<|start|>assistant" + CALL.replace("functions.f", "functions.g")
UNFINISHED = "<|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json"
FINAL = "<|channel|>final<|message|>It is blue."
HARMONY = {
    "thought and answer": THOUGHT + "<|start|>assistant" + FINAL + "<|return|>",
    "answer": FINAL + "<|return|>",
    "thought and call": THOUGHT + "<|start|>assistant" + CALL + "<|call|>",
    "two calls": CALL + "<|end|>" + SECOND + "<|call|>",
    "preamble": "<|channel|>commentary<|message|>Let me look.<|end|><|start|>assistant" + CALL + "<|call|>",
}
BROKEN_HARMONY = {
    "unfinished header": THOUGHT + UNFINISHED + "<|call|>",
    "unfinished header before an answer": THOUGHT + UNFINISHED + "<|start|>assistant" + FINAL + "<|return|>",
    "stray text between messages": THOUGHT + "oops<|start|>assistant" + FINAL + "<|return|>",
    "two recipients": "<|channel|>analysis to=a to=b<|message|>x<|end|><|start|>assistant" + FINAL + "<|return|>",
}
CALL_TEXT = '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'
HERMES = {
    "text": "It is blue.<|im_end|>",
    "call": CALL_TEXT + "<|im_end|>",
    "text and two calls": "Both.\n" + CALL_TEXT + "\n" + CALL_TEXT.replace('"f"', '"g"') + "<|im_end|>",
}
OPEN_HERMES = 'Looking.\n<tool_call>\n{"na'


@pytest.fixture
def messages(caplog):
    caplog.set_level(logging.INFO, logger="structured_commit")
    return lambda: [r.getMessage() for r in caplog.records if r.name == "structured_commit"]


def replies(name):
    return {**HARMONY, **BROKEN_HARMONY} if name == "harmony" else {**HERMES, "open": OPEN_HERMES}


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("name", ["harmony", "hermes"])
def test_patched_but_off_replies_are_byte_identical(unpatched, patched, served, window, name):
    before, after = (Server(t, served[name]) for t in (unpatched[window], patched(window)))
    for text in replies(name).values():
        for step, reason in ((3, "stop"), (100, "length")):
            assert after.stream(text, step, reason).raw == before.stream(text, step, reason).raw
            assert after.whole(text, step, reason).raw == before.whole(text, step, reason).raw


@pytest.mark.parametrize("window", WINDOWS)
def test_whole_turns_are_delivered_as_before(unpatched, patched, served, window):
    before = Server(unpatched[window], served["harmony"])
    after = Server(patched(window), served["harmony"], served["harmony"].section())
    for text in HARMONY.values():
        assert after.whole(text).raw == before.whole(text).raw
        for step in (1, 4, 100):
            old, new = before.stream(text, step), after.stream(text, step)
            if window in MERGING and not new.calls:
                assert new.raw == old.raw
            elif window in MERGING:
                assert [c.replace('"tool_calls","stop', '"stop","stop') for c in new.raw[:-3]] == old.raw[:-3]
            whole = before.whole(text)
            assert (new.reasoning, new.call_list) == (whole.reasoning, whole.call_list)
            assert new.finish_reason == whole.finish_reason


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("step", [1, 4, 100])
def test_streamed_hermes_equals_the_whole_reply(patched, served, window, step):
    server = Server(patched(window), served["hermes"], served["hermes"].section())
    for text in HERMES.values():
        streamed, whole = server.stream(text, step), server.whole(text)
        assert [n for n, _ in streamed.call_list] == [n for n, _ in whole.call_list]
        assert [a.replace(" ", "") for _, a in streamed.call_list] == [a.replace(" ", "") for _, a in whole.call_list]
        assert streamed.content.strip() == whole.content.strip()
        assert streamed.finish_reason == whole.finish_reason


@pytest.mark.parametrize("window", WINDOWS)
def test_a_call_cut_inside_its_header_reaches_the_client_as_content(unpatched, patched, served, window, messages):
    text = BROKEN_HARMONY["unfinished header"]
    lost = Server(unpatched[window], served["harmony"]).whole(text)
    assert (lost.content, lost.calls, lost.finish_reason) == ("", {}, "stop")  # report #16377
    server = Server(patched(window), served["harmony"], served["harmony"].section())
    for answer in (server.whole(text), server.stream(text, 1), server.stream(text, 100)):
        assert answer.content == UNFINISHED
        assert (answer.calls, answer.finish_reason, answer.report) == ({}, "stop", None)
    told = [m for m in messages() if "ended inside a header" in m]
    assert len(told) == 3
    assert "request 7 choice 0" in told[0]
    assert "format harmony, state header:" in told[0]
    assert server.overlay("serving.process").SERVING.incomplete.total() == 3


@pytest.mark.parametrize("window", WINDOWS)
def test_a_refused_token_costs_its_message_and_not_the_batch(unpatched, patched, served, window):
    text = BROKEN_HARMONY["stray text between messages"]
    lost = Server(unpatched[window], served["harmony"]).stream(text, 100)
    assert (lost.reasoning, lost.content) == ("", "")  # report #10824: the whole batch is gone
    server = Server(patched(window), served["harmony"], served["harmony"].section())
    for step in (1, 3, 100):
        answer = server.stream(text, step)
        assert answer.reasoning == "Need the weather."
        assert answer.content == "It is blue.oops"
    answer = server.stream(BROKEN_HARMONY["two recipients"], 100)
    assert answer.content == "It is blue.<|channel|>analysis to=a to=b<|message|>x<|end|>"


@pytest.mark.parametrize("window", WINDOWS)
def test_an_unfinished_header_does_not_swallow_the_next_message(unpatched, patched, served, window):
    text = BROKEN_HARMONY["unfinished header before an answer"]
    before = Server(unpatched[window], served["harmony"])
    assert before.stream(text, 3).content == before.whole(text).content == ""
    server = Server(patched(window), served["harmony"], served["harmony"].section())
    for step in (1, 3, 100):
        assert server.stream(text, step).content == "It is blue." + UNFINISHED
    assert UNFINISHED in server.whole(text).content
    assert "It is blue." in server.whole(text).content


@pytest.mark.parametrize("window", WINDOWS)
def test_the_finish_reason_is_tool_calls_where_a_call_was_delivered(unpatched, patched, served, window):
    before = Server(unpatched[window], served["harmony"])
    server = Server(patched(window), served["harmony"], served["harmony"].section())
    for step in (1, 5, 100):
        assert before.stream(HARMONY["two calls"], step).finish_reason == "stop"
        answer = server.stream(HARMONY["two calls"], step)
        assert answer.finish_reason == "tool_calls"
        assert answer.call_list == [("f", '{"x": 1}'), ("g", '{"x": 1}')]


@pytest.mark.parametrize("window", WINDOWS)
def test_a_length_limit_inside_a_call_stays_length_and_loses_no_text(unpatched, patched, served, window):
    before = Server(unpatched[window], served["harmony"])
    server = Server(patched(window), served["harmony"], served["harmony"].section())
    text = HARMONY["two calls"].removesuffix(": 1}<|call|>")
    assert before.whole(text, reason="length").finish_reason == "tool_calls"  # although the second call is cut
    answer = server.whole(text, reason="length")
    assert answer.finish_reason == "length"
    assert answer.call_list == [("f", '{"x": 1}')]
    assert answer.content.endswith('to=functions.g <|constrain|>json<|message|>{"x"')
    streamed = server.stream(text, 3, "length")
    assert streamed.finish_reason == "length"
    assert streamed.call_list == [("f", '{"x": 1}'), ("g", '{"x"')]  # what there is of it was streamed
    assert streamed.content == ""


@pytest.mark.parametrize("window", WINDOWS)
def test_calls_that_the_server_drops_become_content(unpatched, patched, served, window):
    unknown = CALL.replace("functions.f", "functions.nowhere") + "<|call|>"
    empty = CALL.replace('{"x": 1}', "") + "<|call|>"
    before = Server(unpatched[window], served["harmony"])
    server = Server(patched(window), served["harmony"], served["harmony"].section())
    for text in (unknown, empty):
        for silent in (before.whole(text), before.stream(text, 4)):
            assert (silent.content, silent.calls, silent.finish_reason) == ("", {}, "stop")
        for told in (server.whole(text), server.stream(text, 1), server.stream(text, 100)):
            assert told.content == text.removesuffix("<|call|>")
        assert server.whole(text, tool_choice="none").content == before.whole(text, tool_choice="none").content


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("reason", ["stop", "length"])
def test_an_open_hermes_block_reaches_the_client_as_content(unpatched, patched, served, window, reason, messages):
    before = Server(unpatched[window], served["hermes"])
    lost = OPEN_HERMES.removeprefix("Looking.\n")
    server = Server(patched(window), served["hermes"], served["hermes"].section())
    for answer in (server.whole(OPEN_HERMES, 4, reason), *(server.stream(OPEN_HERMES, s, reason) for s in (1, 4, 100))):
        assert answer.content.startswith("Looking.")
        assert answer.content.count(lost) == 1
        assert (answer.calls, answer.finish_reason) == ({}, reason)
    assert lost not in before.whole(OPEN_HERMES, 4, reason).content
    assert sum("ended inside a block" in m for m in messages()) == 4


@pytest.mark.parametrize("window", WINDOWS)
def test_a_call_that_was_streamed_in_part_is_not_repeated_as_content(patched, served, window):
    text = CALL_TEXT + '\n<tool_call>\n{"name": "g", "arguments": {"x": "long'
    server = Server(patched(window), served["hermes"], served["hermes"].section())
    streamed = server.stream(text, 1, "length")
    assert [name for name, _ in streamed.call_list] == ["f", "g"]
    assert "<tool_call>" not in streamed.content
    whole = server.whole(text, reason="length")
    assert [name for name, _ in whole.call_list] == ["f"]
    assert whole.content.endswith('<tool_call>\n{"name": "g", "arguments": {"x": "long')


@pytest.mark.parametrize("window", WINDOWS)
def test_text_a_parser_waits_with_arrives_at_the_end(unpatched, patched, served, window):
    text = "Is a <tool<|im_end|>"
    server = Server(patched(window), served["hermes"], served["hermes"].section())
    assert Server(unpatched[window], served["hermes"]).stream(text, 1).content == "Is a"
    assert server.stream(text, 1).content == "Is a <tool"


@pytest.mark.parametrize("window", WINDOWS)
def test_recovery_can_be_turned_off_and_the_log_still_tells(patched, served, window, messages):
    section = served["harmony"].section(recover_text=False)
    answer = Server(patched(window), served["harmony"], section).whole(BROKEN_HARMONY["unfinished header"])
    assert (answer.content, answer.finish_reason) == ("", "stop")
    assert any("ended inside a header" in m for m in messages())


@pytest.mark.parametrize("window", WINDOWS)
def test_the_report_field_names_state_and_block_and_a_front_end_reads_it(patched, served, window):
    for name, text in (("harmony", BROKEN_HARMONY["unfinished header"]), ("hermes", OPEN_HERMES)):
        server = Server(patched(window), served[name], served[name].section(report_field=True))
        reply = server.reply(text)
        data = reply.model_dump()
        report = data["choices"][0]["structured_commit"]
        assert report["state"].startswith("header:" if name == "harmony" else "block:")
        assert report["open"] in ("header", "block")
        assert type(reply)(**data).model_dump() == data  # as a disaggregated front end validates it
        assert server.stream(text, 3).report == report
        whole = server.whole(HARMONY["answer"] if name == "harmony" else HERMES["text"])
        assert "structured_commit" not in whole.raw[0]


@pytest.mark.parametrize("window", WINDOWS)
def test_a_parser_that_raises_costs_its_piece(unpatched, patched, served, window):
    text = "One. " + CALL_TEXT + " BOOM " + CALL_TEXT.replace('"f"', '"g"') + "<|im_end|>"
    with pytest.raises(RuntimeError, match="BOOM"):
        Server(unpatched[window], served["hermes"]).stream(text, 100, parser="raising")
    server = Server(patched(window), served["hermes"], served["hermes"].section())
    for step in (1, 7, 100):
        answer = server.stream(text, step, parser="raising")
        if step > 1:
            assert "BOOM" in answer.content
        assert [name for name, _ in answer.call_list] == ["f", "g"]
        assert answer.finish_reason == "tool_calls"


@pytest.mark.parametrize("window", WINDOWS)
def test_a_client_that_disconnects_leaves_no_trace_on_other_requests(patched, served, window):
    for name, text in (("harmony", HARMONY["two calls"]), ("hermes", HERMES["text and two calls"])):
        server = Server(patched(window), served[name], served[name].section())
        expected = server.stream(text, 3, request_id=1).raw
        for stop_after in (1, 2, 5):
            server.chunks(text, 3, request_id=2, stop_after=stop_after)
            assert server.stream(text, 3, request_id=3).raw == expected
        assert not server.overlay("serving.process").SERVING.incomplete


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("name", ["harmony", "hermes"])
def test_without_a_readable_checkpoint_serving_goes_on_and_says_so_once(
    unpatched, patched, served, window, name, tmp_path, messages
):
    section = served[name].section(checkpoint=str(tmp_path))
    server, before = Server(patched(window), served[name], section), Server(unpatched[window], served[name])
    for text in replies(name).values():
        assert server.stream(text).raw == before.stream(text).raw
        assert server.whole(text).raw == before.whole(text).raw
    assert len([m for m in messages() if "stands aside in serving" in m]) == 1


@pytest.mark.parametrize("window", WINDOWS)
def test_calls_survive_every_delta_length_only_with_aligned_delivery(unpatched, patched, served, window):
    text = HERMES["text and two calls"]
    expected = [("f", '{"x": 1}'), ("g", '{"x": 1}')]
    section = served["hermes"].section
    before = Server(unpatched[window], served["hermes"])
    lost = [step for step in range(1, 41) if before.stream(text, step).call_list != expected]
    off = Server(patched(window), served["hermes"], section(align_deltas=False))
    assert [step for step in range(1, 41) if off.stream(text, step).call_list != expected] == lost
    assert len(lost) > 20
    server = Server(patched(window), served["hermes"], section())
    for step in range(1, 41):
        answer = server.stream(text, step)
        assert (answer.call_list, answer.finish_reason) == (expected, "tool_calls")
        assert answer.content.strip() == "Both."

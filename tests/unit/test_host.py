"""The host twin answers what CPU-side code asks, and finds where a prompt stands."""

import pytest

from scripts.tables import compiled
from tests.support.streams import spell


@pytest.fixture(scope="module")
def harmony():
    return compiled("harmony")


def located(harmony, text):
    table, chat = harmony
    return table.host.locate(spell(chat, text))


def test_a_generation_prompt_starts_a_turn(harmony):
    assert located(harmony, "<|start|>user<|message|>hi<|end|><|start|>assistant") == harmony[0].host.start


def test_a_prompt_that_opened_a_block_starts_inside_it(harmony):
    host = harmony[0].host
    state = located(harmony, "<|start|>user<|message|>hi<|end|><|start|>assistant<|channel|>commentary to=functions.f")
    assert host.header_open(state)
    assert host.block_open(state)
    assert not host.may_end(state)


def test_a_resumed_request_continues_in_its_last_message(harmony):
    table, chat = harmony
    turn = spell(chat, "<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>final<|message|>b c")
    prompt = spell(chat, "<|start|>user<|message|>hi<|end|><|start|>assistant")
    assert table.host.locate(prompt + turn) == table.host.walk(turn).state


@pytest.mark.parametrize(
    "prompt",
    [
        "no chat template",
        "<|start|>user<|message|>hi<|end|>",
        "<|start|>assistant<|channel|>final<|message|>x<|return|>",
        "<|start|>assistant<|channel|>final<|message|>x<|return|><|start|>user<|message|>",
        "<|start|>assistant<|channel|> final",
        "",
    ],
)
def test_a_prompt_outside_a_turn_is_untracked(harmony, prompt):
    assert located(harmony, prompt) == 0


def test_the_walk_stops_at_the_first_illegal_token(harmony):
    table, chat = harmony
    ids = spell(chat, "<|channel|>analysis<|end|>")
    walk = table.host.walk(ids)
    assert (walk.illegal_at, walk.taken) == (len(ids) - 1, len(ids) - 1)
    assert table.host.first_illegal(ids) == len(ids) - 1


def test_nothing_after_a_terminal_is_taken(harmony):
    table, chat = harmony
    ids = spell(chat, "<|channel|>final<|message|>x<|return|>more")
    walk = table.host.walk(ids)
    assert (walk.taken, walk.state, walk.illegal_at) == (len(ids) - 1, table.ended, None)


def test_ids_outside_the_vocabulary_are_illegal_while_tracked_only(harmony):
    host = harmony[0].host
    assert host.step(host.start, -1) == -1
    assert host.step(host.start, 10**6) == -1
    assert host.step(0, 10**6) == 0
    assert host.step(host.stray, -1) == host.stray


def test_states_have_names_for_logs(harmony):
    table, chat = harmony
    host = table.host
    assert host.describe(0) == "untracked"
    assert host.describe(host.ended) == "ended"
    assert host.describe(host.stray) == "stray"
    assert host.describe(host.start).startswith("header:")
    call = host.walk(spell(chat, "<|channel|>commentary to=functions.f<|message|>{")).state
    assert host.describe(call).startswith("block:")
    assert host.describe(host.walk(spell(chat, "<|channel|>final<|message|>")).state).startswith("text:")

"""A trace on a page, in a real browser without a network, and in the terminal."""

import io
import itertools
import json
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from scripts.browser import BrowserError, Page, find_browser
from scripts.incident.__main__ import main
from scripts.incident.page import render
from scripts.incident.spelling import Speller
from scripts.incident.timeline import show
from structured_commit import Event, StructuredCommitError, VocabularyError
from structured_commit.recording.trace import Choice, Trace, Window, write_trace
from tests.unit.test_vocabulary import byte_level_tokenizer

HOSTILE = '</code><script>document.title = "owned"</script><img src=x onerror="document.title=1"> & "quoted"\n\u202e'
SHOWN = HOSTILE.replace(" ", "·").replace("\n", "⏎").replace("\u202e", "\\u202e")
TRACE = Trace(
    windows=(
        Window(7, 4, (1, 2, 6), (1, 2), (1, 2), (1, 1, 2), 2, Event(0)),
        Window(
            8,
            4,
            (1, 6, 7),
            (1, 6, 7, 5),
            (1, 4),
            (2, 3, -1, -1, -1),
            3,
            Event.ILLEGAL | Event.REPAIRED,
            1,
            Choice(1, (4, 6), (0.75, 0.125), (True, False), 0.875),
        ),
        Window(9, 4, (4, 4, 4), (4, 4, 4, 1), (4, 4, 4, 1), (3, 3, 3, 3, 3), 3, Event(0)),
        Window(10, 1, None, (3,), (3,), (3, 4), 4, Event.ENDED),
    ),
    reasons=("illegal", "<b>asked</b>"),
    request={"id": "<i>12</i>", "slot": 3, "rank": 0, "prompt_tokens": 9, "prompt_sha256": "0" * 64},
    table={"format": "tiny", "format_digest": "f", "vocabulary_digest": "aaaa", "vocabulary": 16, "ended": 4},
    policy="repair",
    states={1: "text:1", 2: "header:2", 3: "block:3", 4: "ended"},
    controls={"<|end|>": 3},
    texts={1: "one", 2: " two", 4: "four", 5: "five", 6: HOSTILE, 7: ""},
)
CELLS = [
    ["accepted one text:1", "recovered ↺·two header:2", "rejected ✗·two –", f"rejected ✗{SHOWN} –"],
    ["accepted one block:3", "repaired ✎four block:3", f"cut illegal ✂!{SHOWN} –", "cut ✂⟨7⟩ –", "cut ✂five –"],
    ["accepted four block:3"] * 3 + ["bonus +one block:3"],
    ["sampled control <|end|> ended"],
]


@pytest.fixture
def page(tmp_path):
    path = tmp_path / "page.html"
    path.write_text(render(TRACE, Speller(TRACE)), encoding="utf-8")
    return path


@pytest.fixture(params=[False, True], ids=["light", "dark"])
def opened(page, request):
    if find_browser() is None:
        pytest.skip("no browser: run `make browser`")
    with Page(page, dark=request.param) as opened:
        yield opened


def test_a_browser_shows_every_window_token_and_state_and_asks_for_nothing(opened, page):
    cells = opened.evaluate(
        "[...document.querySelectorAll('.window')].map(w => [...w.querySelectorAll('.token')].map(t =>"
        " [[...t.classList].slice(1).join(' '), t.querySelector('code').textContent,"
        " t.querySelector('.state').textContent].join(' ')))"
    )
    assert cells == CELLS
    assert opened.evaluate("[...document.querySelectorAll('.incident')].map(w => w.id)") == ["w8"]
    assert opened.evaluate("[...document.querySelectorAll('nav a')].map(a => a.textContent + a.hash)") == [
        "window 8: illegal, repaired#w8"
    ]
    rows = opened.evaluate(
        "[...document.querySelectorAll('table tr')].slice(1).map(r => [...r.cells].map(c => c.textContent).join('|'))"
    )
    assert rows == ["four|4|0.75||legal", f"{SHOWN}|6|0.125||illegal"]
    assert opened.evaluate("document.querySelector('caption').textContent").endswith("have probability 0.875")
    assert opened.requests == [page.as_uri()]
    assert opened.errors == []


def test_no_text_of_a_trace_becomes_markup(opened):
    assert opened.evaluate("document.title") == "request <i>12</i>: illegal, <b>asked</b>"
    assert opened.evaluate("document.querySelectorAll('script, img, i, main b b, dd *').length") == 0
    assert opened.evaluate("document.querySelector('[title*=owned]')") is None
    assert "<b>asked</b>" in opened.evaluate("document.querySelector('dl').innerText")


def test_the_roles_look_different_and_can_be_read(opened):
    colours = opened.evaluate(
        "['accepted', 'recovered', 'bonus', 'repaired', 'cut'].map(c => { const s = getComputedStyle("
        "document.querySelector(`main .${c} code`)); return s.color + s.backgroundColor + s.borderTopStyle; })"
    )
    assert len(set(colours)) == 5
    contrasts = opened.evaluate(
        "(() => { const light = c => { const v = c.match(/\\d+/g).slice(0, 3).map(x => x / 255)"
        ".map(x => x <= .03928 ? x / 12.92 : ((x + .055) / 1.055) ** 2.4);"
        " return .2126 * v[0] + .7152 * v[1] + .0722 * v[2]; };"
        " const seen = e => { for (; e; e = e.parentElement) { const c = getComputedStyle(e).backgroundColor;"
        " if (!c.endsWith(', 0)')) return c; } };"
        " return [...document.querySelectorAll('main code, main small, main h2, dt, dd, caption')]"
        ".filter(e => !e.closest('.rejected')).map(e => {"
        " const a = light(getComputedStyle(e).color), b = light(seen(e));"
        " return (Math.max(a, b) + .05) / (Math.min(a, b) + .05); }); })()"
    )
    assert min(contrasts) >= 4.5  # WCAG AA
    assert len(contrasts) > 30


def test_the_page_fits_a_narrow_window(page):
    if find_browser() is None:
        pytest.skip("no browser: run `make browser`")
    with Page(page, size=(400, 800)) as opened:
        assert opened.evaluate("document.documentElement.scrollWidth") <= 400
        picture = opened.picture()
    assert picture.startswith(b"\x89PNG")
    assert len(picture) > 10_000


def test_the_browser_of_these_tests_notices_requests_scripts_and_errors(tmp_path):
    if find_browser() is None:
        pytest.skip("no browser: run `make browser`")
    path = tmp_path / "bad.html"
    path.write_text(
        "<img src=a.png><link rel=stylesheet href=http://example.com/a.css>"
        "<script>console.error('said'); throw 1</script>"
    )
    with Page(path) as opened:
        assert opened.requests == [path.as_uri(), (tmp_path / "a.png").as_uri(), "http://example.com/a.css"]
        assert any("said" in e for e in opened.errors)
        assert len(opened.errors) >= 3


def test_the_page_is_one_file_that_may_load_and_run_nothing():
    text = render(TRACE, Speller(replace(TRACE, texts={})))
    assert "default-src 'none'; style-src 'unsafe-inline'" in text
    assert not any(word in text for word in ("<script", "src=", "@import", "url(", "<link", "http:", "https:"))


def printed(trace, width=100):
    console = Console(file=io.StringIO(), width=width)
    show(console, trace, Speller(trace))
    return console.file.getvalue()


def test_the_terminal_shows_the_same_tokens_above_their_states():
    text = printed(TRACE, width=400)
    assert "window 8  illegal, repaired" in text
    for cells in CELLS:
        for cell in cells:
            assert " ".join(w for w in cell.split(" ")[1:-1] if w != "illegal" and w != "control").strip() in text
    lines = text.splitlines()
    above, below = next((a, b) for a, b in itertools.pairwise(lines) if "✎four" in a)
    assert below[above.index("✎four") :].startswith("block:3")


def test_the_terminal_keeps_to_its_width():
    assert max(map(len, printed(TRACE, width=60).splitlines())) <= 60


def test_ids_are_shown_where_no_texts_are_known():
    spell = Speller(replace(TRACE, texts={}))
    assert [spell(t) for t in (1, 3)] == ["⟨1⟩", "<|end|>"]
    assert "name the checkpoint" in spell.source


def test_texts_come_from_the_checkpoint_and_only_from_the_right_one(tmp_path):
    byte_level_tokenizer().save(str(tmp_path / "tokenizer.json"))
    digest_of = Speller(replace(TRACE, texts={}, table={**TRACE.table, "vocabulary": 300}))
    assert digest_of(1) == "⟨1⟩"
    with pytest.raises(
        StructuredCommitError, match="has vocabulary ([0-9a-f]{16}): the ids mean other tokens"
    ) as caught:
        Speller(TRACE, tmp_path)
    digest = str(caught.value).split("has vocabulary ")[1][:16]
    trace = replace(TRACE, texts={}, table={**TRACE.table, "vocabulary_digest": digest})
    spell = Speller(trace, tmp_path)
    letter = byte_level_tokenizer().get_vocab()["a"]
    assert (spell(letter), spell.source) == ("a", f"vocabulary of {tmp_path}")
    with pytest.raises(VocabularyError, match="nowhere is no folder"):
        Speller(trace, tmp_path / "nowhere")


def test_a_trace_that_disagrees_with_itself_says_so():
    assert "please report this trace" in printed(replace(TRACE, consistent=False))


def test_the_command_writes_the_page_beside_the_trace(tmp_path, capsys):
    write_trace(TRACE, tmp_path, "incident-1")
    assert main([str(tmp_path / "incident-1.safetensors")]) == 0
    assert str(tmp_path / "incident-1.html") in capsys.readouterr().out.replace("\n", "")
    assert (tmp_path / "incident-1.html").read_text() == render(TRACE, Speller(TRACE))


@pytest.mark.parametrize("damage", ["version", "truncated", "missing", "checkpoint", "page"])
def test_the_command_says_what_is_wrong_and_writes_no_page(tmp_path, capsys, damage):
    write_trace(TRACE, tmp_path, "incident-1")
    path, more, message = tmp_path / "incident-1.json", [], "damaged or truncated"
    if damage == "version":
        path.write_text(json.dumps({**json.loads(path.read_text()), "structured_commit_trace": 3}))
        message = "has version 3"
    elif damage == "truncated":
        (tmp_path / "incident-1.safetensors").write_bytes(b"")
    elif damage == "missing":
        path, message = tmp_path / "other.json", "there is no trace"
    elif damage == "checkpoint":
        byte_level_tokenizer().save(str(tmp_path / "tokenizer.json"))
        more, message = ["--checkpoint", str(tmp_path)], "Name the checkpoint that the server ran"
    else:
        more, message = ["--html", str(tmp_path / "no" / "page.html")], "say where with --html"
    assert main([str(path), *more]) == 1
    said = capsys.readouterr()
    assert message in said.err
    assert said.err.count("\n") == 1
    assert not list(tmp_path.glob("*.html"))


def test_a_missing_browser_is_said_with_the_next_step(page, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("scripts.browser.FOLDER", tmp_path)
    with pytest.raises(BrowserError, match="run `make browser`"), Page(page):
        pass


def test_make_replay_shows_a_trace_or_the_report():
    for trace, expected in (("a b.json", '-m scripts.incident "a b.json" --png c'), ("", "-m scripts.replay --png c")):
        command = ["make", "--dry-run", "--old-file=.venv/.ready", "replay", f"TRACE={trace}", "ARGS=--png c"]
        done = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, check=True)
        assert expected in done.stdout

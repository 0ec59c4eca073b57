"""A table is compiled once, by whichever process comes first."""

import multiprocessing

import pytest

from structured_commit import Format, Vocabulary, cache
from structured_commit.cache import cached_table

FORM = Format(name="tiny", turn="[ab]*", terminals=("<e>",))
VOCABULARY = Vocabulary(4, {0: b"a", 1: b"b"}, {"<e>": 2})


def _start_together(folder, barrier, results):
    compiled = []
    original = cache.compile_format
    cache.compile_format = lambda *args: compiled.append(1) or original(*args)
    barrier.wait(120)
    table = cached_table(FORM, VOCABULARY, folder)
    results.put((len(compiled), table.num_states))


def test_a_second_start_loads_what_the_first_compiled(tmp_path, monkeypatch):
    first = cached_table(FORM, VOCABULARY, tmp_path)
    monkeypatch.setattr(cache, "compile_format", lambda *_: pytest.fail("compiled again"))
    assert cached_table(FORM, VOCABULARY, tmp_path).info == first.info


def test_another_format_or_vocabulary_has_its_own_file(tmp_path):
    cached_table(FORM, VOCABULARY, tmp_path)
    cached_table(Format(name="tiny", turn="[ab]+", terminals=("<e>",)), VOCABULARY, tmp_path)
    cached_table(FORM, Vocabulary(5, {0: b"a", 1: b"b"}, {"<e>": 2}), tmp_path)
    assert len(list(tmp_path.glob("*.safetensors"))) == 3


def test_eight_processes_that_start_together_compile_once(tmp_path):
    context = multiprocessing.get_context("spawn")
    barrier, results = context.Barrier(8), context.Queue()
    workers = [context.Process(target=_start_together, args=(tmp_path, barrier, results)) for _ in range(8)]
    for worker in workers:
        worker.start()
    outcomes = [results.get(timeout=180) for _ in workers]
    for worker in workers:
        worker.join(30)
    assert sum(compiled for compiled, _ in outcomes) == 1
    assert len({states for _, states in outcomes}) == 1


def test_a_damaged_file_is_compiled_again(tmp_path, caplog):
    first = cached_table(FORM, VOCABULARY, tmp_path)
    path = next(tmp_path.glob("*.safetensors"))
    path.write_bytes(path.read_bytes()[:40])
    assert cached_table(FORM, VOCABULARY, tmp_path).info == first.info
    assert "compile it again" in caplog.text


def test_a_folder_that_cannot_be_used_costs_a_warning_only(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    assert cached_table(FORM, VOCABULARY, tmp_path / "file" / "below").vocab_size == 4
    assert "compiling in memory" in caplog.text

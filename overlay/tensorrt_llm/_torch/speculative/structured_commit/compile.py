"""`compile_format`: a format and a vocabulary in, a `StructureTable` out.

The automaton over bytes and control tokens is walked along every token's bytes, all states at once, and tokens that
behave alike in every state share a class. Since a token does exactly what its bytes do, the verdict on a
stream does not depend on where its token boundaries fall.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .automaton import BYTES, Automaton, build_automaton
from .errors import FormatError, VocabularyError
from .expression import REGIONS, Translated, translate
from .format import Format, resolve_format
from .table import CLOSES, ILLEGAL, IN_BLOCK, IN_HEADER, MAY_END, OPENS, TERMINAL, StructureTable, TableInfo
from .vocabulary import Vocabulary

# A special token that the format does not mention counts as text that fits no literal: no UTF-8 text holds 0xff.
_OPAQUE_TEXT = b"\xff"
_TURN_START = "\0turn"
_REGION_FLAGS = {"block": IN_BLOCK, "header": IN_HEADER}


def compile_format(
    source: str | Format,
    vocabulary: object,
    *,
    terminals: tuple[str, ...] = (),
    turn_openers: tuple[str, ...] = (),
    never: tuple[str, ...] = (),
) -> StructureTable:
    """Compile a format against a vocabulary, on the CPU.

    Args:
        source: a built-in format's name, a path to a format file (`.json`), an expression, or a `Format`.
        vocabulary: anything `Vocabulary.of` reads.
        terminals, turn_openers, never: complete an expression; unused otherwise (see `Format`).

    Returns:
        The table, on the CPU.

    Raises:
        FormatError: unknown name, or an expression that cannot be read or that no turn matches.
        VocabularyError: the vocabulary lacks a control token that the format needs.
        TableError: with this vocabulary a state of the format has no way to a legal end.
    """
    form = resolve_format(source, terminals, turn_openers, never)
    vocab = Vocabulary.of(vocabulary)
    missing = frozenset(name for name in form.optional if name not in vocab.controls)
    openers = [o for o in form.turn_openers if _opener_control(o) not in missing]
    automaton = build_automaton(_whole_expression(form, openers), form.name)
    terminal_ids = _terminal_ids(form, vocab, missing)
    _require_controls(form, automaton, vocab, missing)
    token_class, next_state = _token_classes(automaton, form, vocab, terminal_ids)
    class_terminal = torch.zeros(next_state.shape[1], dtype=torch.bool)
    class_terminal[token_class[terminal_ids].long()] = True
    state_flags = _state_flags(automaton)
    byte_table = torch.tensor(automaton.next_state, dtype=torch.int16)
    byte_table[0] = 0
    return StructureTable(
        token_class=token_class,
        next_state=next_state,
        state_flags=state_flags,
        class_flags=_class_flags(next_state, state_flags, class_terminal),
        info=TableInfo(
            format=form.name,
            format_digest=form.digest,
            vocabulary_digest=vocab.digest,
            start=_root_step(automaton, _TURN_START),
            entries=tuple(
                (vocab.controls[_opener_control(o)], _root_step(automaton, _opener_control(o))) for o in openers
            ),
            controls={n: vocab.controls[n] for n in _used_controls(form, automaton) if n in vocab.controls},
        ),
        byte_class=torch.tensor(automaton.symbol_class[:BYTES], dtype=torch.int16),
        byte_next=byte_table,
    )


def _opener_control(opener: str) -> str:
    return opener[1 : opener.index("»")]


def _whole_expression(form: Format, openers: list[str]) -> Translated:
    # One automaton for openers and turn: a prompt's tail is walked by the same table as the output.
    before = "|".join([f"«{_TURN_START}»", *openers])
    try:
        return translate(f"(?:{before})(?:{form.turn})", form.rules)
    except FormatError as error:
        raise FormatError(f"format {form.name}: {error}") from error


def _used_controls(form: Format, automaton: Automaton) -> list[str]:
    names = [n for n in automaton.controls if n != _TURN_START]
    return list(dict.fromkeys([*names, *form.terminals, *form.never]))


def _terminal_ids(form: Format, vocab: Vocabulary, missing: frozenset[str]) -> list[int]:
    names = [n for n in form.terminals if n not in missing]
    unknown = [n for n in names if n not in vocab.controls]
    if unknown or not names:
        raise VocabularyError(_missing_message(form, unknown or list(form.terminals), vocab))
    return sorted({vocab.controls[n] for n in names})


def _require_controls(form: Format, automaton: Automaton, vocab: Vocabulary, missing: frozenset[str]) -> None:
    unknown = [n for n in automaton.controls if n not in vocab.controls and n not in missing and n != _TURN_START]
    if unknown:
        raise VocabularyError(_missing_message(form, unknown, vocab))
    clash = set(form.terminals) & (set(automaton.controls) - {_opener_control(o) for o in form.turn_openers})
    if clash:
        raise FormatError(
            f"format {form.name}: {sorted(clash)[0]!r} is a terminal and also stands in the expression; a terminal "
            "is legal wherever the turn may end and is not written there"
        )


def _missing_message(form: Format, names: list[str], vocab: Vocabulary) -> str:
    known = ", ".join(sorted(vocab.controls)[:12]) or "none"
    return (
        f"format {form.name} needs the control token {names[0]!r}, which this tokenizer does not have "
        f"(it has {len(vocab.controls)}: {known}…); is this the checkpoint's own tokenizer, and the right format?"
    )


def _root_step(automaton: Automaton, control: str) -> int:
    state = automaton.step(0, BYTES + automaton.controls.index(control))
    if state == ILLEGAL:
        raise FormatError(f"no turn can follow the opener {control!r}")
    return state


class _Behaviours:
    """The distinct things a run of symbols can do: a column, the state after it from each state but the root.

    Few exist beside the many spellings, so each (column, symbol) is composed once and looked up ever after.
    """

    def __init__(self, automaton: Automaton) -> None:
        self._rows = automaton.next_state
        self._after: list[list[int | None]] = []
        self._number: dict[tuple[int, ...], int] = {}
        self.columns: list[tuple[int, ...]] = []
        self.nothing = self.number(tuple(range(1, len(self._rows))))

    def number(self, column: tuple[int, ...]) -> int:
        """The number of a column."""
        if column not in self._number:
            self._number[column] = len(self.columns)
            self.columns.append(column)
            self._after.append([None] * len(self._rows[0]))
        return self._number[column]

    def run(self, symbols: bytes | tuple[int, ...]) -> int:
        """The number of what a run of symbol classes does."""
        at = self.nothing
        for symbol in symbols:
            following = self._after[at][symbol]
            if following is None:
                column = tuple(s if s < 0 else self._rows[s][symbol] for s in self.columns[at])
                following = self._after[at][symbol] = self.number(column)
            at = following
        return at


def _token_classes(
    automaton: Automaton, form: Format, vocab: Vocabulary, terminal_ids: list[int]
) -> tuple[Tensor, Tensor]:
    """Tokens that behave alike share a class: ([V] int16, [S, C] int16), numbered by their first token."""
    behaviours = _Behaviours(automaton)
    n_states = len(automaton.next_state)
    used = set(_used_controls(form, automaton))
    byte_classes = bytes.maketrans(bytes(range(BYTES)), bytes(automaton.symbol_class[:BYTES]))
    does = [behaviours.number((ILLEGAL,) * (n_states - 1))] * vocab.size
    spellings: dict[bytes, int] = {}
    for token, text in vocab.texts.items():
        spelling = text.translate(byte_classes)
        if spelling not in spellings:
            spellings[spelling] = behaviours.run(spelling)
        does[token] = spellings[spelling]
    opaque = behaviours.run(_OPAQUE_TEXT.translate(byte_classes))
    for name, token in vocab.controls.items():
        if name not in used:
            does[token] = opaque
    for i, name in enumerate(automaton.controls):
        if name in vocab.controls:  # a missing optional one has no id: what it leads to is never reached
            does[vocab.controls[name]] = behaviours.run((automaton.symbol_class[BYTES + i],))
    ends = behaviours.number(tuple(0 if may_end else ILLEGAL for may_end in automaton.may_end[1:]))
    for token in terminal_ids:
        does[token] = ends
    numbers: dict[int, int] = {}
    classes = [numbers.setdefault(behaviour, len(numbers)) for behaviour in does]
    if len(numbers) > 32767:
        raise FormatError(f"format {form.name}: {len(numbers)} token classes do not fit int16; simplify the expression")
    next_state = torch.zeros(n_states, len(numbers), dtype=torch.int16)
    next_state[1:] = torch.tensor([behaviours.columns[b] for b in numbers], dtype=torch.int16).T
    return torch.tensor(classes, dtype=torch.int16), next_state


def _state_flags(automaton: Automaton) -> Tensor:
    flags = []
    for may_end, regions in zip(automaton.may_end, automaton.regions, strict=True):
        flag = MAY_END if may_end else 0
        for i, name in enumerate(REGIONS):
            flag |= _REGION_FLAGS[name] if regions >> i & 1 else 0
        flags.append(flag)
    flags[0] = MAY_END
    return torch.tensor(flags, dtype=torch.uint8)


def _class_flags(next_state: Tensor, state_flags: Tensor, terminal: Tensor) -> Tensor:
    """`OPENS` / `CLOSES`: every legal use of the class from a tracked state enters / leaves a block or header."""
    inside = (state_flags & (IN_BLOCK | IN_HEADER)) != 0
    legal = next_state >= 0
    legal[0] = False
    before = inside[:, None].expand_as(next_state)
    after = inside[next_state.clamp(min=0).long()] & ~terminal
    used = legal.any(dim=0)
    opens = used & ~(legal & (before | ~after)).any(dim=0)
    closes = used & ~(legal & (~before | after)).any(dim=0)
    return (terminal * TERMINAL + opens * OPENS + closes * CLOSES).to(torch.uint8)

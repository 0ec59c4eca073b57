"""From a translated expression to a small deterministic automaton over bytes and control tokens.

outlines-core turns the regular expression into an automaton in which the ends of regions are symbols too. Those
symbols are then taken out by a subset construction that remembers which regions each path is in, and the result
is minimised. A state is "in" a region only if every reading of the text so far is: where two readings differ
(`;` as data or as a separator), the state counts as outside. Nothing here knows a vocabulary.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from .errors import FormatError
from .expression import REGIONS, Translated

BYTES = 256
ILLEGAL = -1


@dataclass(frozen=True, slots=True)
class Automaton:
    """A deterministic automaton. State 0 is the root, before any symbol.

    `symbol_class[b]` for a byte b, `symbol_class[256 + i]` for `controls[i]`; `next_state[state][class]` is the
    following state or -1; `may_end[state]`; `regions[state]` has bit i set inside `REGIONS[i]`. From every state
    a state that may end can be reached.
    """

    controls: tuple[str, ...]
    symbol_class: tuple[int, ...]
    next_state: tuple[tuple[int, ...], ...]
    may_end: tuple[bool, ...]
    regions: tuple[int, ...]

    def step(self, state: int, symbol: int) -> int:
        """The state after `symbol` (a byte, or 256 + the index of a control token), or -1."""
        return self.next_state[state][self.symbol_class[symbol]]


def build_automaton(translated: Translated, name: str) -> Automaton:
    """Compile `translated`; `name` stands in error messages.

    Raises:
        FormatError: the expression is not a valid regular expression, or nothing matches it.
    """
    transitions, root = _library_transitions(translated, name)
    n_plain = BYTES + len(translated.controls)
    n_symbols = n_plain + 2 * len(REGIONS) + 1
    end_symbol = n_symbols - 1
    alive = _coaccessible(transitions, end_symbol)
    if root not in alive:
        raise FormatError(f"format {name}: no turn matches its expression")
    transitions = {
        s: {c: t for c, t in row.items() if c < n_symbols and (t in alive or c == end_symbol)}
        for s, row in transitions.items()
        if s in alive
    }
    symbol_class, representatives = _merge_symbols(transitions, n_plain)
    states = _subset_construction(transitions, root, representatives, n_plain, end_symbol)
    return _minimised(translated.controls, symbol_class, *states)


def _library_transitions(translated: Translated, name: str) -> tuple[dict[int, dict[int, int]], int]:
    from outlines_core import Index, Vocabulary  # only compiling needs it

    symbols = [chr(b) for b in range(BYTES)] + list(translated.control_symbols)
    for opening, closing in translated.region_symbols:
        symbols += [opening, closing]
    symbols.append(translated.end)
    try:
        index = Index(translated.regex, Vocabulary(len(symbols), {s: [i] for i, s in enumerate(symbols)}))
    except Exception as error:  # the library raises several kinds, all about the expression
        if "no transitions" in str(error):
            raise FormatError(
                f"format {name}: the expression has a dead state, a place from which no turn can be completed; look "
                "for a class or an alternative that nothing matches"
            ) from error
        raise FormatError(f"format {name}: the expression does not compile: {error}") from error
    return index.get_transitions(), index.get_initial_state()


def _coaccessible(transitions: dict[int, dict[int, int]], end_symbol: int) -> set[int]:
    before: dict[int, set[int]] = {}
    queue = deque()
    for state, row in transitions.items():
        if end_symbol in row:
            queue.append(state)
        for symbol, target in row.items():
            if symbol < end_symbol:
                before.setdefault(target, set()).add(state)
    alive = set(queue)
    while queue:
        for state in before.get(queue.popleft(), ()):
            if state not in alive:
                alive.add(state)
                queue.append(state)
    return alive


def _merge_symbols(transitions: dict[int, dict[int, int]], n_plain: int) -> tuple[tuple[int, ...], list[int]]:
    columns: dict[tuple[int, ...], int] = {}
    representatives: list[int] = []
    symbol_class = []
    for symbol in range(n_plain):
        column = tuple(row.get(symbol, ILLEGAL) for row in transitions.values())
        if column not in columns:
            columns[column] = len(columns)
            representatives.append(symbol)
        symbol_class.append(columns[column])
    return tuple(symbol_class), representatives


def _subset_construction(transitions, root, representatives, n_plain, end_symbol):
    closures: dict[tuple[int, int], frozenset[tuple[int, int]]] = {}

    def closure(item: tuple[int, int]) -> frozenset[tuple[int, int]]:
        if item not in closures:
            seen, stack = {item}, [item]
            while stack:
                state, bits = stack.pop()
                for symbol, target in transitions[state].items():
                    if n_plain <= symbol < end_symbol:
                        region, closing = divmod(symbol - n_plain, 2)
                        following = (target, bits & ~(1 << region) if closing else bits | 1 << region)
                        if following not in seen:
                            seen.add(following)
                            stack.append(following)
            # An item that only leads through region ends is not a reading of its own.
            closures[item] = frozenset(
                i for i in seen if any(c < n_plain or c == end_symbol for c in transitions[i[0]])
            )
        return closures[item]

    start = closure((root, 0))
    numbers = {start: 0}
    queue = deque([start])
    next_state, may_end, regions = [], [], []
    while queue:
        subset = queue.popleft()
        row = []
        for symbol in representatives:
            targets = {(transitions[s][symbol], bits) for s, bits in subset if symbol in transitions[s]}
            following = frozenset().union(*(closure(t) for t in targets)) if targets else None
            if following is not None and following not in numbers:
                numbers[following] = len(numbers)
                queue.append(following)
            row.append(ILLEGAL if following is None else numbers[following])
        next_state.append(row)
        may_end.append(any(end_symbol in transitions[s] for s, _ in subset))
        common = (1 << len(REGIONS)) - 1
        for _, bits in subset:
            common &= bits
        regions.append(common)
    return next_state, may_end, regions


def _minimised(controls, symbol_class, next_state, may_end, regions) -> Automaton:
    block = [0] * len(next_state)
    count = 0
    while True:
        signatures: dict[tuple, int] = {}
        refined = []
        for state, row in enumerate(next_state):
            signature = (
                may_end[state],
                regions[state],
                block[state],
                *(t if t < 0 else block[t] for t in row),
            )
            refined.append(signatures.setdefault(signature, len(signatures)))
        block = refined
        if len(signatures) == count:
            break
        count = len(signatures)
    member = {}
    for state, b in enumerate(block):
        member.setdefault(b, state)
    rows = [tuple(t if t < 0 else block[t] for t in next_state[member[b]]) for b in range(count)]
    classes: dict[tuple[int, ...], int] = {}
    merged = [classes.setdefault(column, len(classes)) for column in zip(*rows, strict=True)]
    return Automaton(
        controls=controls,
        symbol_class=tuple(merged[c] for c in symbol_class),
        next_state=tuple(zip(*classes, strict=True)),
        may_end=tuple(may_end[member[b]] for b in range(count)),
        regions=tuple(regions[member[b]] for b in range(count)),
    )

"""The fuzzer: random automata, windows and schedules; the stage against its definition written out again."""

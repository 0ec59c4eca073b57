"""Double of TensorRT-LLM's patched modules, window w13a: 1.3.0rc before mid July 2026 (ages A1 late, A2)."""

"""Double of TensorRT-LLM's patched modules, window w13b: 1.3.0rc from mid July 2026 (ages B to D)."""

"""Double of TensorRT-LLM's patched modules, window w12: 1.2.x late (workers of age A1, Eagle3 unified)."""

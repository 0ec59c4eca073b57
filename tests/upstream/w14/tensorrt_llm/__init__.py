"""Double of TensorRT-LLM's patched modules, window w14: 1.4.0rc (age E)."""

"""The replay of report NVIDIA/TensorRT-LLM #17437: what an interior rejection does to a tool call."""

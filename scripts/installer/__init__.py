"""The overlay installer: checks, applies, shows, exports and reverts the structural patches on a TensorRT-LLM tree.
It promises that a tree is never left half-patched and comes back to the byte. It must not import TensorRT-LLM, nor
anything of the overlay that it installs."""

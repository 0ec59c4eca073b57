"""The flight recorder: rings on the device, traces on disk."""

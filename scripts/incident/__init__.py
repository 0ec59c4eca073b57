"""Shows a flight recorder's trace: a timeline in the terminal, a page for a browser."""

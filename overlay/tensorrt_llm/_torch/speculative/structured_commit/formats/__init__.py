"""The built-in formats, one JSON file each. `structured_commit.format` reads them."""

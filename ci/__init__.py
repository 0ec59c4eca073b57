"""What a GPU machine runs; see README.md in this folder."""

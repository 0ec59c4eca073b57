"""What the doubles of all windows share: requests, caches, models that are tables, ops, loops. Nothing here is patched.

Facts: DESIGN.md §6 and the fact sheets named in each module ("A" acceptance.md, "W" workers.md, "X" executor.md).
"""

"""The benchmark: the stage against what one would use or write instead, in one run, as ratios."""

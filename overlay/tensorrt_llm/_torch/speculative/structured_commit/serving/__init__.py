"""The serving side: aligned delivery, the finish guard and counters, in the processes that answer clients."""

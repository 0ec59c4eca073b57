"""Settings of all tests. Property tests have no deadline: they must say the same on a slow machine. In CI they run the
same examples every time; elsewhere they look for new ones."""

import os

from hypothesis import HealthCheck, settings

settings.register_profile("here", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("ci", settings.get_profile("here"), derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "here")

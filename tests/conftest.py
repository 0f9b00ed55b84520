"""Hypothesis' profile for the whole suite."""

from hypothesis import HealthCheck, settings

settings.register_profile(
    "kvstore",
    deadline=None,  # shared machines: a slow example is no failure
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
settings.load_profile("kvstore")

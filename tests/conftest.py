"""Fixtures and settings of all tests."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

if TYPE_CHECKING:
    from tessera_rt.testing.worker_pool import WorkerPool

# No deadline: the machines that run the tests are shared, and a slow example is not a wrong one.
settings.register_profile("dev", deadline=None, max_examples=50, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("ci", settings.get_profile("dev"), max_examples=50, print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci" if os.environ.get("CI") else "dev"))


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What `pytest -n 2 --dist loadgroup` keeps in one process: a file, and all tests that share the ranks. Slow tests
    may take longer than the limit of the others, which is there to end what hangs."""
    for item in items:
        if item.get_closest_marker("slow") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(1200))
        ranks = "pool" in getattr(item, "fixturenames", ())
        item.add_marker(pytest.mark.xdist_group("ranks" if ranks else str(item.path)))


@pytest.fixture(scope="session")
def pool() -> Iterator[WorkerPool]:
    """The worker processes of all multi-rank tests, at most 8 ranks."""
    from tessera_rt.testing.worker_pool import WorkerPool  # tests that need no torch must not load it

    with WorkerPool(max_world=8) as workers:
        yield workers

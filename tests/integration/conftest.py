"""What modules with a `cluster` of their own have in common."""

import pytest


@pytest.fixture
def connection(cluster):
    """To the module's cluster, which is idle afterwards; whatever a test had replaced is known to it then."""
    with cluster.connect() as connection:
        yield connection
    cluster.check_idle()
    cluster.remember()

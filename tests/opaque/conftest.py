"""Every test starts and ends with a fresh dispatcher, environment and Dynamo, as tests of the framework do."""

from tests.backends.conftest import fresh_dispatch  # noqa: F401 - an autouse fixture

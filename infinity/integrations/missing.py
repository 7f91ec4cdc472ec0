"""What to say where a package that an integration is for is not installed."""

from __future__ import annotations

import importlib.util

from infinity.errors import ConfigError


def need(*packages: str, extra: str) -> None:
    """Refuse to go on without packages; nothing is imported.

    Args:
        packages: what is imported later.
        extra: what brings them.

    Raises:
        ConfigError: it says which is missing, and how to get it.
    """
    for package in packages:
        if importlib.util.find_spec(package) is None:
            raise ConfigError(
                f"infinity.integrations.{extra} needs the package {package}, which is not installed: "
                f"pip install 'infinity[{extra}]'"
            )

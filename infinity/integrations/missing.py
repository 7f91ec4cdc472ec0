"""What to say where a package that an integration is for is not installed."""

from __future__ import annotations

import importlib.util

from infinity.errors import ConfigError


def need(*packages: str, extra: str, instead: str | None = None) -> None:
    """Refuse to go on without packages; nothing is imported.

    Args:
        packages: what is imported later.
        extra: what brings them.
        instead: the package's other name, under which it may be there, with an integration of that name.

    Raises:
        ConfigError: it says which is missing, and how to get it.
    """
    for package in packages:
        if importlib.util.find_spec(package) is None:
            if instead is not None and importlib.util.find_spec(instead) is not None:
                raise ConfigError(
                    f"infinity.integrations.{package} is for scripts that import {package}, which is not installed, "
                    f"but {instead} is: import from infinity.integrations.{instead}, and {instead} in the script"
                )
            raise ConfigError(
                f"infinity.integrations.{extra} needs the package {package}, which is not installed: "
                f"pip install 'infinity[{extra}]'"
            )

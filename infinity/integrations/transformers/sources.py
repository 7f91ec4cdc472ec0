"""Where a pretrained model is: a directory, or a snapshot of a hub's repository in the local cache; and its weights."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from huggingface_hub import constants, snapshot_download
from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

from infinity.engine.persistence.tensor_reading import StoredTensor, find_tensors
from infinity.errors import ConfigError, StorageError
from infinity.io.paths import user_path

_BESIDE = ("*.json", "*.txt", "*.model", "*.spm", "*.tiktoken", "*.jinja")
"""Configurations, tokenizers and chat templates; no code, nothing pickled."""

_OTHERS = ("pytorch_model.bin", "pytorch_model.bin.index.json", "tf_model.h5", "flax_model.msgpack")


def find_directory(
    path: str | os.PathLike[str],
    *,
    revision: str | None,
    subfolder: str,
    variant: str | None,
    cache_dir: str | os.PathLike[str] | None,
    token: str | bool | None,
    local_files_only: bool,
    force_download: bool = False,
) -> Path:
    """The directory of a model.

    Args:
        path: of a directory, or else the name of a repository on the hub, ``"owner/name"``.
        revision: of the repository: a branch, a tag or a commit.
        subfolder: where in it.
        variant: of the weights; others are not downloaded.
        cache_dir: where repositories are kept.
        token: for private ones.
        local_files_only: take only what is in the cache.
        force_download: take nothing that is in the cache.

    Raises:
        ConfigError: ``path`` is neither.
        StorageError: the repository, or that revision of it, cannot be had; or an adapter is there.
    """
    given = user_path(path, "from_pretrained")
    if not given.is_dir():
        if given.exists():
            raise ConfigError(f"from_pretrained: {given} is a file; give the directory that holds config.json")
        given = _download(
            path,
            revision=revision,
            allow_patterns=[*_BESIDE, *_patterns(variant)],
            cache_dir=None if cache_dir is None else Path(cache_dir),
            token=token,
            local_files_only=local_files_only,
            force_download=force_download,
        )
    found = given / subfolder
    if not found.is_dir():
        raise StorageError(f"there is no directory {subfolder!r} in the model's", path=given)
    if (found / "adapter_config.json").is_file():
        raise StorageError(
            "an adapter is here (adapter_config.json); give the directory of its base model, and put the adapter on "
            "what is loaded with peft",
            path=found,
        )
    return found


def find_weights(directory: Path, *, variant: str | None = None) -> Mapping[str, StoredTensor]:
    """The tensors of a model, by the names that they have in its files.

    Args:
        directory: of the model.
        variant: of the weights, as in ``model.fp16.safetensors``.

    Raises:
        StorageError: there are none, they are not safetensors, or a file is missing or damaged.
    """
    names = _names(variant)
    for name in names:
        if (directory / name).is_file():
            return find_tensors(directory / name, aliases=False)
    for name in _OTHERS:
        if (directory / name).exists():
            raise StorageError(
                f"the weights are in {name}, and only safetensors are read, which need no unpickling; convert them "
                "once where you trust them: AutoModel.from_pretrained(directory).save_pretrained(other_directory), "
                "with the class of the model in place of AutoModel",
                path=directory,
            )
    raise StorageError(f"no weights are here: expected {' or '.join(names)}", path=directory)


def has_weights(directory: Path) -> bool:
    """Whether ``find_weights`` has something to look at."""
    return any((directory / name).is_file() for name in _names(None))


def _names(variant: str | None) -> tuple[str, str]:
    middle = f".{variant}" if variant else ""
    return f"model{middle}.safetensors", f"model.safetensors.index{middle}.json"


def _patterns(variant: str | None) -> list[str]:
    """Names of files of weights on the hub."""
    stem = _names(variant)[0].removesuffix(".safetensors")
    names = [f"{stem}.safetensors", f"{stem}-*-of-*.safetensors"]
    return [*names, *(f"*/{name}" for name in names)]


def _download(name: str | os.PathLike[str], **how: Any) -> Path:
    where = f"{name!r} is no directory here, and as the name of a repository on the hub"
    try:
        return Path(snapshot_download(os.fspath(name), **how))
    except HFValidationError as error:
        raise ConfigError(f"from_pretrained: {where} it is not well formed: {error}") from error
    except LocalEntryNotFoundError as error:
        raise StorageError(
            f"{where} it is not in the local cache, and the hub is not to be asked or cannot be reached; give a "
            "directory, or download it where there is a network (hf download NAME) and copy the cache",
            path=how["cache_dir"] or constants.HF_HUB_CACHE,
        ) from error
    except OSError as error:
        path = how["cache_dir"] or constants.HF_HUB_CACHE
        raise StorageError(f"{where} it cannot be had: {error}", path=path) from error

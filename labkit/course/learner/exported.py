"""Files that one version of labkit writes and another reads: checks the version, and names a field that is wrong."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

Document = TypeVar("Document", bound=BaseModel)


def taken(model: type[Document], plain: Mapping[str, Any], version: int) -> Document:
    """Plain data as a document. ValueError names the field that is wrong, or says that a later labkit wrote it."""
    written_version = plain.get("version") if isinstance(plain, Mapping) else None
    if isinstance(written_version, int) and written_version > version:
        raise ValueError(f"version: this was exported by a later labkit (version {written_version}): update labkit")
    try:
        return model.model_validate_json(json.dumps(plain), strict=True)
    except ValidationError as error:
        first, *others = error.errors()
        where = ".".join(str(part) for part in first["loc"]) or "the export"
        raise ValueError(f"{where}: {first['msg']}" + (f" (and {len(others)} more)" if others else "")) from None
    except (TypeError, RecursionError) as error:
        raise ValueError(f"the export is no plain data: {error}") from None

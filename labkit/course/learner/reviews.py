"""A review of a card, as data that can be stored and exported.

said = review.model_dump_json();  Review.model_validate_json(said) == review
reviews_of(export)               the reviews in it, or a ValueError that names the field
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field

from labkit.course.learner.exported import taken

FORMAT, VERSION = "labkit cards", 1


class Review(BaseModel):
    """A rating from 1 to 5 of a card, when it was made, and after how many seconds."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)
    uid: str = Field(min_length=16, max_length=64)
    card: str = Field(min_length=1, max_length=200)
    rating: int = Field(ge=1, le=5)
    at: AwareDatetime
    seconds: float = Field(ge=0, default=0.0)


class _Export(BaseModel):
    model_config = ConfigDict(extra="forbid")
    format: Literal["labkit cards"]
    version: int
    reviews: tuple[Review, ...]


def export_of(reviews: Sequence[Review]) -> dict[str, Any]:
    """Reviews as plain data, for json."""
    return {"format": FORMAT, "version": VERSION, "reviews": [review.model_dump(mode="json") for review in reviews]}


def reviews_of(plain: Mapping[str, Any]) -> tuple[Review, ...]:
    """The reviews that `export_of` was given. ValueError names the field that is wrong."""
    return taken(_Export, plain, VERSION).reviews

"""What clients ask for, as a class of Pydantic's."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class Weather(BaseModel):
    """The weather that is asked for. Closed: a random model would name properties for ever."""

    model_config = ConfigDict(extra="forbid")

    city: Literal["Oslo", "Rome", "Lima"]
    days: int = Field(ge=1, le=7)

"""Types of settings that more than one section has, with their bounds."""

from typing import Annotated, Literal

import msgspec

PriorityClass = Literal["interactive", "standard", "batch"]
Ms = Annotated[int, msgspec.Meta(ge=1, le=86_400_000)]
Seconds = Annotated[float, msgspec.Meta(gt=0, le=86_400)]
Bytes = Annotated[int, msgspec.Meta(ge=1024, le=1 << 40)]
Port = Annotated[int, msgspec.Meta(ge=0, le=65_535)]
Count = Annotated[int, msgspec.Meta(ge=1, le=10_000_000)]
Name = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]

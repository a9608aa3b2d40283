"""Numbers with bounds, as types of options: `Annotated[Positive | None, option("...")]`.

A value outside is a fault wherever it comes from. Upper bounds keep out what no message could carry to a replica.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

MOST = 2**31 - 1
"""The largest whole number an option takes."""

LAST_PORT = 65_535

LONGEST = 1e9
"""The longest time, in whatever unit the option's name tells; infinity and NaN are no times."""

Natural = Annotated[int, msgspec.Meta(ge=0, le=MOST)]
Positive = Annotated[int, msgspec.Meta(ge=1, le=MOST)]
TcpPort = Annotated[int, msgspec.Meta(ge=0, le=LAST_PORT)]
Share = Annotated[float, msgspec.Meta(gt=0, le=1)]
Time = Annotated[float, msgspec.Meta(ge=0, le=LONGEST)]
Timeout = Annotated[float, msgspec.Meta(gt=0, le=LONGEST)]

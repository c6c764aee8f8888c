"""Settings of the object store that services share: the section [remote]."""

from typing import Annotated

from pydantic import Field, StringConstraints

from shared.types.setting_types import Duration, Section


class RemoteSettings(Section):
    """Where transcripts are for other services, too.

    Attributes:
        url: the store, as in kvd's remote.url, but one that keeps what it has: not Mooncake; "":
            transcripts are on this server alone.
        unnamed: whether those of sessions that no client has named are there, too.
        deadline_s: most seconds that a turn waits for an answer of it, each time.
    """

    url: Annotated[str, StringConstraints(pattern=r"^$|^(s3|gs|az|file)://[^@?#]+$")] = ""
    unnamed: bool = True
    deadline_s: Duration = Field(default=2.0, gt=0, le=60)

"""The settings of the follower are kvd's, section [remote], as they are in force there."""

import json

from pydantic import ValidationError

from kvd.client.operator_client import OperatorClient
from kvd.config import RemoteSettings
from shared.types.errors import StateError

SECTION = "remote."


class OtherReleaseError(StateError):
    """kvd is of a release whose settings these are not."""

    reason = "other_release"


def remote_settings(client: OperatorClient) -> RemoteSettings:
    """Ask kvd for its settings of this section.

    Raises:
        OtherReleaseError: kvd has others.
        ReportedError: it does not answer.
    """
    found = {
        setting.key.removeprefix(SECTION): json.loads(setting.json)
        for setting in client.settings().settings
        if setting.key.startswith(SECTION)
    }
    try:
        return RemoteSettings.model_validate(found)
    except ValidationError as error:
        names = ", ".join(str(problem["loc"][0]) for problem in error.errors())
        raise OtherReleaseError(
            f"kvd has other settings of [remote] than are known here ({names})",
            "run the kvd remote follow of kvd's own release",
        ) from error

"""A reload of a running kvd: by SIGHUP, or by an operator who wants to hear what came of it."""

from kvd.config import Settings
from shared.config.reload import Changes, LiveSettings
from shared.process import systemd
from shared.process.log import get_logger
from shared.types.errors import ReportedError

log = get_logger(__name__)


class Reloader:
    """Reloads the settings, and tells the log and systemd of it."""

    def __init__(self, live: LiveSettings[Settings]) -> None:
        self._live = live

    def reload(self) -> Changes[Settings]:
        """Put the settings into force as they are now, as far as that can be done live.

        Raises:
            ReloadRefusedError: they cannot be used; nothing has changed.
        """
        systemd.notify(systemd.reloading())
        try:
            found = self._live.reload()
        except ReportedError as error:
            log.error("settings_not_reloaded", error=str(error))  # noqa: TRY400
            raise
        finally:
            systemd.notify(systemd.READY)
        log.info(
            "settings_reloaded",
            applied=list(found.applied),
            needs_restart=list(found.needs_restart),
        )
        return found

    def reload_if_possible(self) -> None:
        """Reload; what is wrong is in the log, and there is nobody else to tell."""
        try:
            self.reload()
        except ReportedError:
            return

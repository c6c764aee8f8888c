"""The follower's metrics."""

from prometheus_client.parser import text_string_to_metric_families

from kvd.following.figures import METRICS, Backlog, Figures, make_exporter, status_of

NOTHING = Backlog(0, 0.0, 0, 0)


def scrape_samples(figures, waiting=NOTHING):
    text, _ = make_exporter(figures, lambda: waiting).render("text/plain")
    return {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text.decode())
        for sample in family.samples
    }


def test_metrics_show_finished_and_waiting_work():
    """By result; a store that was never asked has no value."""
    figures = Figures()
    figures.pushes.add("pushed", amount=3)
    figures.pulls.add("absent")
    figures.drops.add("dropped")
    figures.add_bytes("sent", 5)
    figures.requests.add("put", amount=2)
    before = scrape_samples(figures, Backlog(4, 2.5, 1, 6, 5))
    assert before["kvd_remote_pushes_total", "pushed"] == 3
    assert before["kvd_remote_pulls_total", "absent"] == 1
    assert before["kvd_remote_drops_total", "dropped"] == 1
    assert before["kvd_remote_bytes_total", "sent"] == 5
    assert before["kvd_remote_requests_total", "put"] == 2
    assert before["kvd_remote_unpushed_sessions",] == 4
    assert before["kvd_remote_oldest_unpushed_seconds",] == 2.5
    assert before["kvd_remote_undropped_sessions",] == 1
    assert before["kvd_remote_wanted_sessions",] == 6
    assert before["kvd_remote_evicted_unpushed_total",] == 5
    assert before["kvd_remote_kvd_up",] == 0
    assert ("kvd_remote_store_up",) not in before
    figures.store_up = False
    assert scrape_samples(figures)["kvd_remote_store_up",] == 0


def test_the_status_line():
    """For `systemctl status`."""
    figures = Figures()
    assert status_of(figures, NOTHING) == "kvd does not answer"
    figures.kvd_up = True
    assert status_of(figures, NOTHING) == "0 sessions to push"
    figures.store_up = False
    said = status_of(figures, Backlog(1, 90.0, 0, 0))
    assert said == "1 session to push, the oldest for 1m30s, the store fails"


def test_names_have_the_prefix():
    """Each says whose it is."""
    assert all(row.name.startswith(("kvd_remote_", "process_")) for row in METRICS)

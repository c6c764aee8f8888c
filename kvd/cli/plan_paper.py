"""`kvd plan --paper`: the paper's experiments, replayed, beside the paper's numbers."""

import os

from shared.measuring.report import check_json, print_report, progress_bar


def show_paper(*, seed: int, is_quick: bool, num_workers: int, json_to: str) -> None:
    """Replay, and print the tables or the document; minutes, with is_quick seconds.

    Args:
        seed: of the sessions that are drawn.
        is_quick: a twentieth of the sessions, in a twentieth of the tiers.
        num_workers: processes; 0: as many as there are processors.
        json_to: file for the document, "-" for it alone, "" for none.
    """
    from kvd.plan.paper.reproduction import Reproduction
    from kvd.plan.paper.runs import QUICK_SCALE, Sample
    from kvd.plan.paper.views import paper_tables

    check_json(json_to)
    sample = Sample(seed, QUICK_SCALE if is_quick else 1.0)
    reproduction = Reproduction(sample)
    with progress_bar("replaying", reproduction.num_turns) as tell:
        report = reproduction.make(num_workers or os.cpu_count() or 1, tell)
    print_report(report.as_dict(), lambda _: paper_tables(report), json_to)

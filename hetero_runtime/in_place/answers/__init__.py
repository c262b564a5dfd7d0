"""Who answers the calls of a captured step: one thread, one call at a time.

compiled      sorting, kernels and the answer in one compiled loop      where the backend's calls can stand
by_backend    Python around the backend's own call                      for all others
"""

from __future__ import annotations

from hetero_runtime.in_place.answers.base import Answers, CallLine
from hetero_runtime.in_place.answers.by_backend import BackendAnswers
from hetero_runtime.in_place.base import InPlaceExperts

__all__ = ["Answers", "CallLine", "make_answers"]


def make_answers(experts: InPlaceExperts, line: CallLine) -> Answers:
    """The faster one of both. Compiles for a second or two."""
    mailbox = line.mailbox
    standing = experts.stand(mailbox.hidden, mailbox.total, top_k=mailbox.top_k)
    if standing is None:
        return BackendAnswers(experts, line)
    from hetero_runtime.in_place.answers.compiled import CompiledAnswers

    return CompiledAnswers(standing, line)

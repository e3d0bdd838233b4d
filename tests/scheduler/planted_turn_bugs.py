"""Bugs of the scheduler, continued: whose turn it is, who waits, and whom an operator keeps out."""

from typing import Any

import pytest

from jaxpaged.admission import Admission
from jaxpaged.running_rows import RunningRows
from jaxpaged.scheduled_step import ScheduledStep
from jaxpaged.scheduler import Scheduler
from jaxpaged.scheduler import Sequence as EngineSequence
from jaxpaged.step_draft import StepDraft

real_admit = Admission.admit
real_schedule = Scheduler.schedule


def tokens_go_to_running_prompts_first(patch: pytest.MonkeyPatch) -> None:
    def admit(self: Admission, draft: StepDraft, *, ahead_of: EngineSequence | None = None, **options: Any) -> None:
        if ahead_of is None:
            real_admit(self, draft, **options)

    patch.setattr(Admission, "admit", admit)


def everybody_waits_for_pages(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(RunningRows, "_may_wait", lambda self, sequence, victim, draft: True)


def spare_tokens_are_not_spent(patch: pytest.MonkeyPatch) -> None:
    def settle(self: Admission, sequence: EngineSequence) -> None:
        self._num_spare_tokens = 1_000_000

    patch.setattr(Admission, "settle", settle)


def drain_is_ignored(patch: pytest.MonkeyPatch) -> None:
    def schedule(self: Scheduler) -> ScheduledStep | None:
        self._is_draining, is_draining = False, self._is_draining
        step = real_schedule(self)
        self._is_draining = is_draining
        return step

    patch.setattr(Scheduler, "schedule", schedule)


def places_are_taken_while_draining(patch: pytest.MonkeyPatch) -> None:
    def schedule(self: Scheduler) -> ScheduledStep | None:
        real_admit, is_draining = self._admission.admit, self._is_draining
        if is_draining:
            self._is_draining = False
            self._admission.admit = lambda draft, **_: None  # type: ignore[method-assign]
        try:
            return real_schedule(self)
        finally:
            self._is_draining = is_draining
            self._admission.admit = real_admit  # type: ignore[method-assign]

    patch.setattr(Scheduler, "schedule", schedule)

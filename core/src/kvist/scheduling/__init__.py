"""Which requests run next: continuous batching, admission, and who gives way when memory is short."""

from kvist.scheduling.admission import AdmissionPolicy, ReserveToEnd, Room, Watermark
from kvist.scheduling.job import Job, State, order
from kvist.scheduling.joint import Companion, JointPlan
from kvist.scheduling.remote import Remote
from kvist.scheduling.scheduler import Scheduler
from kvist.scheduling.turn import Chunk, SchedulerStats, Turn
from kvist.scheduling.waits import Wait

__all__ = [
    "AdmissionPolicy",
    "Chunk",
    "Companion",
    "Job",
    "JointPlan",
    "Remote",
    "ReserveToEnd",
    "Room",
    "Scheduler",
    "SchedulerStats",
    "State",
    "Turn",
    "Wait",
    "Watermark",
    "order",
]

"""Rules about `scheduler.step()`: before the step it belongs after, once per micro-batch, or for another optimizer."""

from __future__ import annotations

from gpt_guard.callbacks.loop_order.events import Kind, Scheduled
from gpt_guard.callbacks.loop_order.order_cycle import Cycle, Verdict
from gpt_guard.callbacks.loop_order.order_words import about
from gpt_guard.records.render import learning_rates

# It waits for a metric: where it stands in the step makes no difference.
_ANYWHERE = "ReduceLROnPlateau"


def _calls(cycle: Cycle, *, foreign: bool = False) -> list[tuple[int, Scheduled]]:
    found = [(at, cycle.events[at].detail) for at in cycle.places(Kind.SCHEDULER)]
    return [(at, call) for at, call in found if call.foreign is foreign and call.name != _ANYWHERE]


def scheduled_first(cycle: Cycle) -> Verdict | None:
    """GG411: scheduler.step() comes before the optimizer's step, in each step.

    Either between backward and step, or at the top of the loop: then the very first call comes before any step, and
    the later ones from the same line. Once before the loop, or once an epoch, is as it should be.
    """
    calls = _calls(cycle)
    if len(calls) != 1 or not cycle.backwards:
        return None
    at, call = calls[0]
    between = at > cycle.backwards[-1]
    key = f"scheduled_first {cycle.line(at)}"
    if not between and call.stepped and key not in cycle.running:
        return None
    text = (
        f"{call.name}.step() was called before optimizer.step(): the first value of the schedule is never used, and "
        f"each step is made with the learning rate of the next one (now {learning_rates(cycle.seen.lr)})."
    )
    found = about("GG411", cycle, text, at=at, likely=["wrong_order"], cause_id=_cause(cycle, call))
    return Verdict(found, key="between" if between else key)


def scheduled_in_each(cycle: Cycle) -> Verdict | None:
    """GG405, with its lines: once per micro-batch, while the optimizer steps once for several."""
    calls = _calls(cycle)
    if len(calls) < 2 or len(calls) != len(cycle.backwards) or len({str(cycle.line(at)) for at, _ in calls}) > 1:
        return None
    ends = [*cycle.backwards[1:], len(cycle.events)]
    turns = zip(cycle.backwards, calls, ends, strict=True)
    if not all(start < at < stop for start, (at, _), stop in turns):
        return None
    at, call = calls[0]
    text = f"{call.name}.step() was called {len(calls)} times for one optimizer step: once for each micro-batch."
    fields = {"likely": ["per_micro_batch"], "cause_id": _cause(cycle, call)}
    evidence = {"scheduler": call.name, "moved": len(calls), "micro_batches": len(calls)}
    return Verdict(about("GG405", cycle, text, at=at, evidence=evidence, **fields))


def scheduled_another(cycle: Cycle) -> Verdict | None:
    """GG404, with its line: it drives an optimizer that holds the same parameters and never steps."""
    calls = [(at, call) for at, call in _calls(cycle, foreign=True) if not call.stepped]
    if not calls:
        return None
    at, call = calls[0]
    text = (
        f"{call.name} drives another optimizer than the one that this loop steps: that one holds the same parameters, "
        f"and has made no step."
    )
    return Verdict(about("GG404", cycle, text, at=at, likely=["rebuilt"], cause_id=call.name))


def _cause(cycle: Cycle, call: Scheduled) -> str:
    return f"optimizer {cycle.index}, {call.name}"

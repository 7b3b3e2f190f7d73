"""Failures after which recovery is pointless."""

from rayfcp.elastic.facts import Cause, Facts, Failure, counted


def reason_to_end(facts: Facts) -> str | None:
    """Return why the run should end rather than recover from the failure in `facts`; None if it should recover or
    nothing failed. An error of the program repeats; so does one that followed each of the last recoveries without a
    finished step."""
    failure, limits, setbacks = facts.failure, facts.limits, facts.setbacks
    if failure is None:
        return None
    if failure.cause is Cause.PROGRAM:
        return f"a program error would repeat in the same step: {failure.message}"
    if setbacks.recoveries >= limits.max_recoveries:
        return (
            f"{setbacks.recoveries} recoveries did not finish a step, elastic.max_recoveries is "
            f"{limits.max_recoveries}, and now {what_failed(failure)}; check the workers' logs, or raise it"
        )
    if failure.cause is Cause.COLLECTIVE and not failure.lost and setbacks.collectives >= limits.collective_retries:
        return (
            f"communication among {len(facts.active)} healthy devices failed {setbacks.collectives + 1} times in a "
            f"row ({failure.message}); check the network between their nodes, interfaces and firewall, and "
            "elastic.collective_timeout_s"
        )
    return None


def what_failed(failure: Failure) -> str:
    """Describe a failure."""
    devices = counted(len(failure.lost), "device")
    event = {
        Cause.DIED: f"{devices} died",
        Cause.NODE: f"{devices} lost with a node",
        Cause.HUNG: f"{devices} hung",
        Cause.COLLECTIVE: "communication among devices failed",
        Cause.PROGRAM: "the program failed",
    }[failure.cause]
    return f"{event} ({failure.message})" if failure.message else event

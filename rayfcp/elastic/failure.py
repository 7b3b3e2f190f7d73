"""Which failures it is no use to go on after."""

from rayfcp.elastic.facts import Cause, Facts, Failure, counted


def hopeless(facts: Facts) -> str | None:
    """Why the run should end rather than recover from the failure in `facts`; None if it should recover, or nothing
    failed. An error of the program itself would come again; so would one that came after each of the last
    recoveries with no step finished in between."""
    failure, limits, setbacks = facts.failure, facts.limits, facts.setbacks
    if failure is None:
        return None
    if failure.cause is Cause.PROGRAM:
        return f"an error of the program would come again in the same step: {failure.message}"
    if setbacks.recoveries >= limits.max_recoveries:
        return (
            f"{setbacks.recoveries} recoveries did not finish a step, elastic.max_recoveries is "
            f"{limits.max_recoveries}, and now {what_failed(failure)}; look at the workers' logs, or raise it"
        )
    if failure.cause is Cause.COLLECTIVE and not failure.lost and setbacks.collectives >= limits.collective_retries:
        return (
            f"the exchange between {len(facts.active)} living devices failed {setbacks.collectives + 1} times in a "
            f"row ({failure.message}); look at the network between their nodes, its interfaces and firewall, and at "
            "elastic.collective_timeout_s"
        )
    return None


def what_failed(failure: Failure) -> str:
    """In words."""
    devices = counted(len(failure.lost), "device")
    said = {
        Cause.DIED: f"{devices} died",
        Cause.NODE: f"{devices} went with a node",
        Cause.HUNG: f"{devices} hung",
        Cause.COLLECTIVE: "an exchange between devices failed",
        Cause.PROGRAM: "the program failed",
    }[failure.cause]
    return f"{said} ({failure.message})" if failure.message else said

"""What torch sees here, as one line of JSON. A process of its own: an extension whose driver is missing may end it, and
Ray hides devices from the processes that did not ask for one."""

import json
import sys


def look(kind: str) -> dict[str, object]:
    """Devices of a kind (`auto`: what is here) and the attention kernel for it."""
    import torch

    from rayfcp.execute.devices.device import device_kind
    from rayfcp.execute.kernels import pick_kernel

    error, kernel = "", None
    try:
        if kind == "npu":
            pick_kernel(kind)  # loads torch's extension
        kind = device_kind(kind)
        kernel = pick_kernel(kind).name
    except Exception as raised:  # whatever keeps the device from working is what is asked for
        error = " ".join(f"{raised}".split()) or type(raised).__name__
    module = getattr(torch, kind, None)
    count = module.device_count() if kind != "cpu" and module is not None and module.is_available() else 0
    names = sorted({module.get_device_name(number) for number in range(count)}) if module is not None else []
    return {"kind": kind, "count": count, "names": names, "kernel": kernel, "error": error}


if __name__ == "__main__":
    sys.stdout.write(json.dumps(look(sys.argv[1])) + "\n")

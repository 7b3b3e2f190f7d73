"""Devices that torch finds here, as one line of JSON, in a process of its own: an extension whose driver is missing may
end it, and Ray hides devices from processes that did not request one."""

import json
import sys


def look(kind: str) -> dict[str, object]:
    """Devices of a kind (`auto`: what is here), the attention kernel for it, and those of recurrent layers."""
    from rayfcp.execute.devices.backend import backend_of, device_kind
    from rayfcp.execute.kernels import pick_kernel
    from rayfcp.execute.kernels.convolution import pick_convolution
    from rayfcp.execute.kernels.recurrence import pick_recurrence

    error, kernel, recurrence = "", None, list[str]()
    try:
        kind = device_kind(kind)
        kernel = pick_kernel(kind).name  # loads torch's extension for the device
        recurrence = [pick_recurrence(kind).name, pick_convolution(kind).name]
    except Exception as raised:  # any reason why the device does not work is the result
        error = " ".join(f"{raised}".split()) or type(raised).__name__
    backend = backend_of(kind)
    count = backend.num_devices
    names = sorted({backend.device_name(number) for number in range(count)})
    found = {"kind": kind, "count": count, "names": names, "kernel": kernel, "error": error}
    return found | {"recurrence": recurrence}


if __name__ == "__main__":
    sys.stdout.write(json.dumps(look(sys.argv[1])) + "\n")

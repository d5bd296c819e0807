"""Records through the store; what takes several processes is in tests/multiprocess."""

import torch.distributed as dist

from planner.control import ControlPlane


def test_of_what_several_put_first_the_first_is_kept():
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # it ends with its object
    control = ControlPlane(store, "here")
    for reason in (b"the cause", b"what followed from it"):
        control.put_first("quit", reason)
    assert control.read("quit") == b"the cause"

"""Which GPUs the launcher takes this machine to have."""

from __future__ import annotations

import pytest

from graph.resources import this_machine, visible_gpus

UUIDS = ("GPU-8932f937-d72c-4106-c12f-20bd9faed9f6", "GPU-1d5f3cb2-5c21-8ab8-4a5c-0d34a1ad07bc")
MIG = "MIG-GPU-8932f937-d72c-4106-c12f-20bd9faed9f6/1/0"


@pytest.mark.parametrize(
    ("value", "gpus"),
    [
        ("", ()), (" ", ()), ("-1", ()), ("NoDevFiles", ()), ("none", ()), ("void", ()),
        ("0", ("0",)), ("10, 2", ("10", "2")), ("0,-1,1", ("0",)), ("-1,0", ()), ("0,,1", ("0",)), ("0,", ("0",)),
        ("1,1", ()), ("0,1,0", ()),
        (",".join(UUIDS), UUIDS), ("GPU-8932f937", ("GPU-8932f937",)), (MIG, (MIG,)),
    ],
)  # fmt: skip
def test_a_list_of_visible_gpus_ends_at_the_first_name_that_is_none(value, gpus):
    assert visible_gpus(value) == gpus
    assert this_machine({"CUDA_VISIBLE_DEVICES": value}).gpus == gpus


@pytest.mark.parametrize(
    ("files", "gpus"),
    [
        ((), ()),
        (("nvidiactl", "nvidia-uvm", "nvidia-modeset"), ()),
        (("nvidia0", "nvidia1", "nvidiactl"), ("0", "1")),
        (("nvidia3", "nvidiactl"), ("0",)),
    ],
)
def test_without_that_list_every_device_file_counts(tmp_path, files, gpus):
    for file in files:
        (tmp_path / file).touch()

    assert this_machine({}, devices=tmp_path).gpus == gpus

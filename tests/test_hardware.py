"""Facts about the machine."""

import torch

from saccade import env, hardware


def test_a_cpu_has_no_architecture_and_counts_as_one_multiprocessor():
    cpu = torch.device("cpu")
    assert hardware.arch_of(cpu) == 0
    assert hardware.arch_of(torch.device("meta")) == 0
    assert hardware.multiprocessors(cpu) == 1


def test_packages_are_found_without_being_imported():
    assert hardware.has_package("torch")
    assert not hardware.has_package("no_such_package_at_all")
    assert not hardware.has_package("no_such_package_at_all.inside")
    assert (
        hardware.package_version("torch") == torch.__version__.split("+")[0]
        or hardware.package_version("torch") == torch.__version__
    )
    assert hardware.package_version("no-such-package-at-all") is None


def test_variables_are_read_when_asked(monkeypatch):
    for function, name in ((env.interpreting_triton, "TRITON_INTERPRET"), (env.print_config, "SACCADE_PRINT_CONFIG")):
        monkeypatch.delenv(name, raising=False)
        assert not function()
        monkeypatch.setenv(name, "1")
        assert function()
        monkeypatch.setenv(name, "0")
        assert not function()

"""The environment variables of a process on Neuron, which count from before JAX starts. Imports neither JAX nor NumPy.

`neuron_environment` says what they are, `set_environment` sets them in this process, `worker_environments` are those
of rollout workers. What the user's own environment says about compiler flags and compile cache wins.
"""

import importlib.metadata
import importlib.util
import os
import sys
from collections.abc import Mapping
from typing import NamedTuple

from jaxtrl.hardware.cores import check_cores, check_disjoint, find_instance, format_cores, parse_cores, split_cores

DEFAULT_CACHE = "/var/tmp/neuron-compile-cache"
ROLES = ("trainer", "rollout")
# It would move every program without collectives to the CPU.
TRIVIAL_ON_CPU = "NEURON_RUN_TRIVIAL_COMPUTATION_ON_CPU"
# The value of the user has to be the one that the options mean: they say which cores are whose.
MUST_AGREE = ("NEURON_RT_VISIBLE_CORES", "NEURON_LOGICAL_NC_CONFIG", "JAX_PLATFORMS")
EXEC_TIMEOUT = 600  # seconds; one process may still be compiling while the others wait in a collective (default 30)


class Processes(NamedTuple):
    """One job of several processes, one per host, as `jax.distributed.initialize` numbers them."""

    coordinator_address: str  # host:port of process 0
    num_processes: int
    process_id: int

    def check(self) -> "Processes":
        """Itself; raises ValueError for an address without a port and for a number out of range."""
        host, _, port = self.coordinator_address.rpartition(":")
        if not host or not port.isdigit() or not 1 < int(port) < 65536:
            raise ValueError(f"coordinator_address {self.coordinator_address!r}: expected host:port of process 0")
        if not 0 <= self.process_id < self.num_processes:
            raise ValueError(
                f"process_id {self.process_id} of {self.num_processes} processes: expected 0 to num_processes - 1"
            )
        return self


def neuron_environment(
    instance: str,
    cores: range,
    *,
    role: str = "trainer",
    compile_effort: str = "low",
    compile_cache: str = "auto",
    processes: Processes | None = None,
    given: Mapping[str, str] = os.environ,
) -> dict[str, str]:
    """Variables of a process that has these cores of an instance of this type.

    `role`: "trainer" or "rollout" (its programs have no collectives); `compile_effort`, `compile_cache` as the
    options; `processes` for a job on several hosts, each with the same cores; `given`: what the environment says
    already. Raises ValueError for cores that may not be used, with those that may.
    """
    if role not in ROLES:
        raise ValueError(f"role {role!r}: expected {' or '.join(ROLES)}")
    kind = find_instance(instance)
    check_cores(instance, cores)
    flags = {"--model-type": "transformer", "--target": kind.target}
    if role == "trainer" and len(cores) > 1:
        flags["--distribution-strategy"] = "llm-training"
    variables = {"JAX_PLATFORMS": "neuron,cpu", "NEURON_RT_VISIBLE_CORES": format_cores(cores)}
    if kind.logical_cores is not None:
        variables["NEURON_LOGICAL_NC_CONFIG"] = flags["-lnc"] = str(kind.logical_cores)
    variables["NEURON_CC_FLAGS"] = _compiler_flags(given.get("NEURON_CC_FLAGS", ""), flags, compile_effort)
    variables["JAX_ENABLE_COMPILATION_CACHE"] = "false"  # JAX's own cache has crashed on Neuron
    if compile_cache.lower() in ("off", "none", "false"):
        variables["NEURON_CC_FLAGS"] += " --no-cache"
    elif compile_cache != "auto":
        variables["NEURON_COMPILE_CACHE_URL"] = compile_cache
    else:
        variables["NEURON_COMPILE_CACHE_URL"] = given.get("NEURON_COMPILE_CACHE_URL", DEFAULT_CACHE)
    return variables if processes is None else {**variables, **_process_variables(processes, len(cores))}


def _compiler_flags(given: str, flags: Mapping[str, str], effort: str) -> str:
    """What the user gives, and the rest of ours."""
    names = {word.partition("=")[0] for word in given.split()}
    if "--logical-nc-config" in names:
        names.add("-lnc")
    added = [f"{name} {value}" for name, value in flags.items() if name not in names]
    if not any(name.startswith(("-O", "--optlevel")) for name in names):
        added.append("-O2" if effort == "high" else "-O1")
    return " ".join([*([given] if given else []), *added])


def _process_variables(processes: Processes, cores: int) -> dict[str, str]:
    """Neuron's collectives meet on the port before the one of JAX's coordinator, as in AWS's examples."""
    address, count, number = processes.check()
    host, _, port = address.rpartition(":")
    return {
        "NEURON_RT_ROOT_COMM_ID": f"{host}:{int(port) - 1}",
        "NEURON_PJRT_PROCESSES_NUM_DEVICES": ",".join([str(cores)] * count),
        "NEURON_PJRT_PROCESS_INDEX": str(number),
        "NEURON_RT_EXEC_TIMEOUT": str(EXEC_TIMEOUT),
        "FI_PROVIDER": "efa",
        "FI_EFA_USE_DEVICE_RDMA": "1",
        "FI_EFA_FORK_SAFE": "1",
    }


def neuron_processes(given: Mapping[str, str] = os.environ) -> Processes | None:
    """The processes that the variables of several hosts describe; None where they are not set.

    Raises ValueError where one of them is missing or wrong.
    """
    index = given.get("NEURON_PJRT_PROCESS_INDEX")
    if index is None:
        return None
    host, _, port = given.get("NEURON_RT_ROOT_COMM_ID", "").rpartition(":")
    devices = given.get("NEURON_PJRT_PROCESSES_NUM_DEVICES", "")
    if not (host and port.isdigit() and devices and index.isdigit()):
        raise ValueError(
            "NEURON_PJRT_PROCESS_INDEX is set, so NEURON_RT_ROOT_COMM_ID (HOST:PORT) and "
            "NEURON_PJRT_PROCESSES_NUM_DEVICES (a number for each process, with commas) have to be too"
        )
    return Processes(f"{host}:{int(port) + 1}", len(devices.split(",")), int(index)).check()


def cores_of(instance: str, cores: str | int | None) -> range:
    """The set that an option means; None: all cores of the instance. Raises ValueError for one that is not allowed."""
    found = range(find_instance(instance).cores) if cores is None else parse_cores(cores)
    check_cores(instance, found)
    return found


def set_environment(
    instance: str | None,
    cores: str | int | None = None,
    *,
    compile_effort: str = "low",
    compile_cache: str = "auto",
    processes: Processes | None = None,
) -> dict[str, str]:
    """Set the variables of a trainer in this process, where `instance` is not None; returns them.

    To be called before JAX is imported. Raises ValueError with one sentence: after that, for a set of cores that is not
    allowed, for a variable of the user that says otherwise, and where JAX has no plugin for Neuron.
    """
    if instance is None:
        return {}
    variables = neuron_environment(
        instance,
        cores_of(instance, cores),
        compile_effort=compile_effort,
        compile_cache=compile_cache,
        processes=processes,
    )
    _check_given(instance, variables)
    if not has_plugin():
        raise ValueError(
            f"neuron_instance is {instance}, but JAX has no Neuron plugin here: install jaxtrl's extra `neuron` from "
            "AWS's package index, or leave neuron_instance out"
        )
    if "jax" in sys.modules and any(os.environ.get(name) != value for name, value in variables.items()):
        raise ValueError(
            "neuron_instance is set, but JAX was imported before: call jaxtrl.hardware.environment.set_environment"
            f"({instance!r}, ...) before anything that imports JAX, or start the process in the environment that "
            "`python -m jaxtrl.neuron env` prints"
        )
    os.environ.update(variables)
    return variables


def _check_given(instance: str, variables: Mapping[str, str]) -> None:
    if os.environ.get(TRIVIAL_ON_CPU, "0") not in ("", "0"):
        raise ValueError(f"{TRIVIAL_ON_CPU} moves every program without collectives to the CPU: unset it")
    for name in MUST_AGREE:
        given, wanted = os.environ.get(name), variables.get(name)
        if name == "NEURON_RT_VISIBLE_CORES" and given and wanted:
            given = format_cores(parse_cores(given))
        if given and wanted and given != wanted and not (name == "JAX_PLATFORMS" and given == "neuron"):
            raise ValueError(
                f"{name} is {given}, but the options for {instance} mean {wanted}: unset it, or change one"
            )


def has_plugin() -> bool:
    """Whether JAX will find a plugin for Neuron (nothing is loaded)."""
    if importlib.util.find_spec("libneuronxla") is not None:
        return True
    return any("neuron" in point.name for point in importlib.metadata.entry_points(group="jax_plugins"))


def worker_environments(
    instance: str,
    trainer_cores: str | int | None,
    rollout_cores: str | int,
    workers: int,
    *,
    compile_effort: str = "low",
    compile_cache: str = "auto",
) -> list[dict[str, str]]:
    """The variables of each rollout worker, to be set in its process before JAX starts there.

    `rollout_cores` are shared equally by the workers. Raises ValueError where a worker's set is not allowed, or where
    the trainer (`trainer_cores` as in `set_environment`) has one of the cores.
    """
    parts = split_cores(instance, parse_cores(rollout_cores), workers)
    check_disjoint(
        {"the trainer": cores_of(instance, trainer_cores), "the rollout workers": parse_cores(rollout_cores)}
    )
    return [
        neuron_environment(
            instance, part, role="rollout", compile_effort=compile_effort, compile_cache=compile_cache, given={}
        )
        for part in parts
    ]


def prepare_cpu_devices(count: int) -> None:
    """Where JAX has not been imported: so many virtual CPU devices, for which programs are lowered that will run on
    others."""
    if "jax" not in sys.modules:
        os.environ.setdefault("JAX_PLATFORMS", "cpu")
        flags = os.environ.get("XLA_FLAGS", "")
        if count > 1 and "host_platform_device_count" not in flags:
            os.environ["XLA_FLAGS"] = f"{flags} --xla_force_host_platform_device_count={count}".strip()

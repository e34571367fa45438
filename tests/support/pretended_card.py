"""A device that computes on the CPU, for tests without a GPU: of CUDA, or Intel's (`xpu`) or Apple's (`mps`).

Tensors on it say `cuda:0`. Operations on tensors of two devices raise. Waits of the host, launches and replays are
counted by the line of the package that causes them. Graphs are recorded operator by operator and replayed, and what a
capture does not permit raises. Kernels are torch's for CPUs: nothing is known about speed and rounding of a GPU.

The card cannot be removed: use it in a process of its own (`card_process.py`).
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import sys
import tempfile
import zlib
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

aten = torch.ops.aten
CPU = torch.device("cpu")
SOURCE = Path(__file__).with_suffix(".cpp")


def operators(names: str) -> set[Any]:
    """Return operators of torch by name, with the overload unless it is the default one."""
    pairs = (name.partition(".") for name in names.split())
    return {getattr(getattr(aten, name), overload or "default") for name, _, overload in pairs}


# the host needs a value or a size
WAITING = operators(
    "_local_scalar_dense _unique2 allclose bincount equal masked_select nonzero repeat_interleave.Tensor unique_dim"
)
# these copy indices from the host themselves
INDEXING = operators("index.Tensor _unsafe_index.Tensor index_put index_put_ _index_put_impl_")
# compositions that a GPU runs as one kernel
ONE_KERNEL = operators(
    "dropout embedding layer_norm linear log_softmax.int matmul rms_norm scaled_dot_product_attention softmax.int"
)
NO_KERNEL = operators(
    "_reshape_alias _unsafe_view alias detach lift_fresh "
    "empty.memory_format empty_like empty_strided new_empty new_empty_strided"
)
NUM_KERNELS = {aten.cumsum.default: 2, aten.sort.default: 3, aten.sort.stable: 4, aten.topk.default: 3}


class DeviceMixError(RuntimeError):
    """An operation has arguments on two devices."""


class CaptureFaultError(RuntimeError):
    """An operation is not permitted in a capture."""


@dataclass
class Counts:
    """What was counted since the last call of `Card.taken`, by line."""

    waits: Counter[str] = field(default_factory=Counter)
    launches: Counter[str] = field(default_factory=Counter)
    replays: int = 0
    captures: int = 0


class CardTensor(Tensor):
    """A tensor on the card; `host` has its numbers."""

    host: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, host: Tensor) -> CardTensor:
        tensor: CardTensor = Tensor._make_wrapper_subclass(
            cls,
            host.shape,
            strides=host.stride(),
            storage_offset=host.storage_offset(),
            dtype=host.dtype,
            device=CARD.device,
        )
        tensor.host = host
        return tensor

    def __init__(self, host: Tensor) -> None:
        pass

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return CARD.dispatch(func, args, kwargs or {})

    def __getitem__(self, index: Any) -> Any:
        return Tensor.__getitem__(self, with_tensors(index))

    def __setitem__(self, index: Any, value: Any) -> None:
        Tensor.__setitem__(self, with_tensors(index), value)

    def tolist(self) -> Any:
        return self.to(CPU).tolist()

    def data_ptr(self) -> int:
        return self.host.data_ptr()

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        copied: Tensor = on_card(self.host.clone())
        if isinstance(self, torch.nn.Parameter):
            copied = torch.nn.Parameter(copied, requires_grad=False)
        memo[id(self)] = copied
        return copied

    def numpy(self, **options: Any) -> Any:
        raise TypeError(f"cannot convert a tensor on {CARD.device} to numpy: use Tensor.cpu()")

    __array__ = numpy  # type: ignore[assignment]


def with_tensors(index: Any) -> Any:
    """Return an index with lists as tensors on the host, as torch does before it copies them."""

    def converted(part: Any) -> Any:
        return torch.tensor(list(part)) if isinstance(part, list | range) else part

    return tuple(map(converted, index)) if isinstance(index, tuple) else converted(index)


def on_card(host: Tensor) -> CardTensor:
    if CARD.device.type == "mps" and host.dtype == torch.float64:
        raise TypeError(f"there is no float64 on {CARD.device}, at {line_of_package()}")
    with torch.inference_mode(False):
        return CardTensor(host)


def host_of(tensor: Any) -> Any:
    return tensor.host if isinstance(tensor, CardTensor) else tensor


def line_of_package() -> str:
    """Return the innermost line of the package in the stack."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if "/src/draftree/" in name:
            return f"{name.rpartition('/src/draftree/')[2]}:{frame.f_lineno}"
        frame = frame.f_back
    return "elsewhere"


class Graph:
    """Operators in the order of their capture; a replay writes their results to the same addresses."""

    def __init__(self) -> None:
        self.operators: list[tuple[Any, Any, Any, Any]] = []  # each with arguments and result

    def replay(self) -> None:
        CARD.counts.replays += 1
        CARD.launch()
        with _disable_current_modes(), torch.inference_mode():
            for func, args, kwargs, result in self.operators:
                again = func(*args, **kwargs)
                if func._schema.is_mutable:
                    continue
                for place, value in zip(tree_leaves(result), tree_leaves(again), strict=True):
                    if isinstance(place, Tensor):
                        place.copy_(value)


class Launch:
    """A launch of a Triton kernel in its interpreter; an operator of a graph."""

    _schema = SimpleNamespace(is_mutable=True)

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        with _disable_current_modes(), torch.inference_mode():
            self._kernel(*args, **kwargs)


class Card(TorchDispatchMode):
    """The device: every operator of the process passes `dispatch`."""

    def __init__(self) -> None:
        super().__init__()
        self.device = torch.device("cuda", 0)
        self.counts = Counts()
        self._graph: Graph | None = None

    @property
    def is_capturing(self) -> bool:
        return self._graph is not None

    def taken(self) -> Counts:
        """Return the counts since the last call."""
        counts, self.counts = self.counts, Counts()
        return counts

    def launch(self, kernels: int = 1) -> None:
        if self._graph is None:
            self.counts.launches[line_of_package()] += kernels

    def launch_kernel(self, kernel: Any, args: Any, kwargs: Any) -> None:
        self.launch()
        call, args = Launch(kernel), tree_map(host_of, args)
        call(*args, **kwargs)
        if self._graph is not None:
            self._graph.operators.append((call, args, kwargs, None))

    def wait(self, reason: str) -> None:
        if self._graph is not None:
            raise CaptureFaultError(f"{reason} is not permitted when stream is capturing, at {line_of_package()}")
        self.counts.waits[f"{line_of_package()} ({reason})"] += 1

    @contextmanager
    def recording(self, graph: Graph, **options: Any) -> Iterator[None]:
        self.wait("begin of a capture")
        self.counts.captures += 1
        self._graph = graph
        try:
            yield
        finally:
            self._graph = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.dispatch(func, args, kwargs or {})

    def dispatch(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        device = kwargs.get("device")
        is_ours = any(isinstance(tensor, CardTensor) for tensor in tensors)
        makes_ours = device is not None and torch.device(device).type == self.device.type
        if not is_ours and not makes_ours:
            return func(*args, **kwargs)
        if func not in ONE_KERNEL and func.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd):
            with self:
                parts = func.decompose(*args, **kwargs)
            if parts is not NotImplemented:
                return parts
        if func is aten._to_copy.default:
            return self._to_copy(args[0], kwargs)
        if func is aten.copy_.default and not (isinstance(args[0], CardTensor) and isinstance(args[1], CardTensor)):
            return self._copy_between(*args, **kwargs)
        self._check_devices(func, tensors, args, device, is_ours)
        if func in WAITING:
            self.wait(func.__name__)
        return self._compute(func, args, kwargs)

    def _check_devices(self, func: Any, tensors: list[Tensor], args: Any, device: Any, is_ours: bool) -> None:
        others = [tensor for tensor in tensors if not isinstance(tensor, CardTensor)]
        if func in INDEXING and isinstance(args[0], CardTensor):
            indices = [index for index in args[1] if index is not None]
            for index in indices:
                if not isinstance(index, CardTensor):
                    self.wait("indices from the host")
                elif index.dtype in (torch.bool, torch.uint8):
                    self.wait("mask as an index")
            others = [other for other in others if all(other is not index for index in indices)]
        if device is not None and torch.device(device).type == "cpu":
            self.wait("result on the host")
        elif is_ours and any(other.dim() for other in others):
            raise DeviceMixError(f"{func} has tensors on {self.device} and on the host, at {line_of_package()}")

    def _compute(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        tensors = {
            id(leaf.host): leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, CardTensor)
        }  # in-place operators return their argument
        args, kwargs = tree_map(host_of, args), tree_map(host_of, kwargs)
        device = kwargs.get("device")
        if device is not None:
            kwargs = {name: kwargs[name] for name in kwargs if name != "pin_memory"} | {"device": CPU}
        result = func(*args, **kwargs)
        if func is aten._local_scalar_dense.default or (device is not None and torch.device(device).type == "cpu"):
            return result
        if not func.is_view and func not in NO_KERNEL:
            self.launch(NUM_KERNELS.get(func, 1))
        if self._graph is not None and not func.is_view:
            self._graph.operators.append((func, args, kwargs, result))
        return tree_map_only(Tensor, lambda host: tensors[id(host)] if id(host) in tensors else on_card(host), result)

    def _to_copy(self, source: Tensor, kwargs: dict[str, Any]) -> Tensor:
        """Copy to a device or to another type."""
        options: dict[str, Any] = {
            name: kwargs[name] for name in ("dtype", "layout", "memory_format") if name in kwargs
        }
        from_card = isinstance(source, CardTensor)
        to_card = (
            torch.device(kwargs["device"]).type == self.device.type if kwargs.get("device") is not None else from_card
        )
        if from_card and to_card:
            return self._compute(aten._to_copy.default, (source,), options)
        if from_card:
            self.wait("copy to the host")
        else:
            self._sent(source, kwargs.get("non_blocking", False))
        # a copy, even of the same type
        copied = aten._to_copy.default(host_of(source), **options)
        return on_card(copied) if to_card else copied

    def _copy_between(self, target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
        if isinstance(target, CardTensor):
            self._sent(source, non_blocking)
        else:
            self.wait("copy to the host")
        host_of(target).copy_(host_of(source))
        return target

    def _sent(self, source: Tensor, non_blocking: bool) -> None:
        """Count a copy from the host, which waits unless the memory is pinned."""
        if self._graph is not None:
            raise CaptureFaultError(f"a replay would repeat the copy from the host at {line_of_package()}")
        if not (non_blocking and source.is_pinned()):
            self.wait("copy from pageable memory")


CARD = Card()


class Stream:
    def __init__(self, device: Any = None) -> None:
        pass

    def wait_stream(self, other: Stream) -> None:
        pass


class Generator:
    def clone_state(self) -> Generator:
        return self

    def graphsafe_set_state(self, state: Generator) -> None:
        pass


def pin_memory(tensor: Tensor, device: Any = None) -> Tensor:
    copied: Any = tensor.clone()
    copied.is_in_pinned_memory = True
    return copied


def is_pinned(tensor: Tensor, device: Any = None) -> bool:
    return getattr(tensor, "is_in_pinned_memory", False)


def why_not() -> str | None:
    """Return why this machine cannot have the card, or None."""
    own = (torch.version.cuda, torch.version.hip, torch.version.xpu)
    if any(version is not None for version in own) or torch.backends.mps.is_built():
        return "this torch has a device of its own"
    return None if shutil.which("g++") else "there is no g++ for the device guard"


def compiled_guard() -> Path:
    """Compile the device guard once per user and version of torch."""
    root = Path(torch.__file__).parent
    version = f"{torch.__version__}-{zlib.crc32(SOURCE.read_bytes()):x}"
    library = Path(tempfile.gettempdir()) / f"draftree-pretended-card-{Path.home().name}-{version}.so"
    if not library.exists():
        with tempfile.TemporaryDirectory(dir=library.parent) as folder:
            built = Path(folder) / library.name
            abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}"
            flags = ["-std=c++20", "-shared", "-fPIC", abi, "-DC10_USING_CUSTOM_GENERATED_MACROS"]
            paths = [f"-I{root}/include", str(SOURCE), f"-L{root}/lib", "-lc10", "-o", str(built)]
            subprocess.run(["g++", *flags, *paths], check=True)
            built.rename(library)
    return library


def replaced_functions(device_type: str) -> dict[str, Any]:
    """Return what the module of torch for such devices has on a machine with the card."""
    common: dict[str, Any] = {"device_count": lambda: 1, "synchronize": lambda *args: CARD.wait("synchronize")}
    if device_type == "mps":
        return {**common, "recommended_max_memory": lambda: 80 << 30, "driver_allocated_memory": lambda: 40 << 30}
    stream = Stream()
    common |= {
        "_lazy_init": lambda: None,
        "current_device": lambda: 0,
        "is_available": lambda: True,
        "is_bf16_supported": lambda *args, **options: True,
        "mem_get_info": lambda *args: (40 << 30, 80 << 30),
    }
    if device_type == "xpu":
        return common
    return {
        **common,
        "CUDAGraph": Graph,
        "Stream": Stream,
        "current_stream": lambda *args: stream,
        "default_generators": (Generator(),),
        "device": nullcontext,
        "device_of": nullcontext,
        "empty_cache": lambda: None,
        "get_device_capability": lambda *args: (7, 5),  # older than our Triton kernels support
        "get_device_name": lambda *args: "pretended card",
        "get_device_properties": lambda *args: SimpleNamespace(total_memory=80 << 30, multi_processor_count=100),
        "graph": CARD.recording,
        "graph_pool_handle": object,
        "is_current_stream_capturing": lambda: CARD.is_capturing,
        "is_initialized": lambda: True,
        "set_device": lambda *args: None,
        "set_stream": lambda *args: None,
        "stream": nullcontext,
    }


def insert_card(device_type: str = "cuda", *, has_triton: bool = False) -> Card:
    """Give this process the card, for good. `has_triton`: whether it runs our Triton kernels, slowly."""
    ctypes.CDLL(str(compiled_guard()))
    torch._C._set_only_lift_cpu_tensors(True)  # torch.tensor(…, device) is a tensor of the host and a copy
    torch._C._ensureCUDADeviceGuardSet()
    torch.__future__.set_overwrite_module_params_on_conversion(True)  # parameters of modules change their class
    CARD.device = torch.device(device_type, 0)
    for name, value in replaced_functions(device_type).items():
        setattr(getattr(torch, device_type), name, value)
    for function in (pin_memory, is_pinned):
        setattr(Tensor, function.__name__, function)
    if has_triton:
        from triton_interpreter import repair

        torch.cuda.get_device_capability = lambda *args: (8, 0)
        repair(setattr, launch=CARD.launch_kernel)
    CARD.__enter__()
    return CARD

"""Work on a GPU that is done only where a flag on the GPU says so: a recording in a conditional node of a CUDA graph.
The host neither reads the flag nor waits. A recording that is left out costs a few microseconds."""

from __future__ import annotations

import ctypes
import weakref
from functools import cache
from typing import Any

import torch
from torch import Tensor

from smc.kernels.nvrtc import compiled, done

SOURCE = b"""
extern "C" __global__ void set_condition(cudaGraphConditionalHandle handle, const bool *wanted)
{
    cudaGraphSetConditional(handle, *wanted);
}
"""
OPTIONS = ["-arch=compute_80", "--std=c++17", "-rdc=true"]
"""Without relocatable code NVRTC does not declare the function that sets a condition. The driver resolves it."""


class ConditionalGraph:
    """A graph of two nodes: a kernel that reads the flag, and the recording, which runs if the flag is set."""

    def __init__(self, recording: torch.cuda.CUDAGraph, wanted_1: Tensor) -> None:
        """`recording`: made with `keep_graph`, on the current device. `wanted`: bool [1], always the same memory.
        Raises RuntimeError where the driver cannot do it, for example because it is older than CUDA 12.4, and
        ImportError without cuda-bindings."""
        from cuda.bindings import driver

        assert wanted_1.dtype == torch.bool and wanted_1.is_cuda
        # The recording's memory and the flag must outlive the graph.
        self._kept = recording, wanted_1
        context = done(driver.cuCtxGetCurrent())
        graph = done(driver.cuGraphCreate(0))
        try:
            handle = done(driver.cuGraphConditionalHandleCreate(graph, context, 0, 0))
            condition = done(driver.cuGraphAddKernelNode(graph, [], 0, _set_condition(wanted_1, int(handle))))
            node = driver.CUgraphNodeParams()
            node.type = driver.CUgraphNodeType.CU_GRAPH_NODE_TYPE_CONDITIONAL
            node.conditional.handle, node.conditional.ctx, node.conditional.size = handle, context, 1
            node.conditional.type = driver.CUgraphConditionalNodeType.CU_GRAPH_COND_TYPE_IF
            done(driver.cuGraphAddNode(graph, [condition], None, 1, node))
            (body,) = node.conditional.phGraph_out
            done(driver.cuGraphAddChildGraphNode(body, [], 0, driver.CUgraph(recording.raw_cuda_graph())))
            self._graph = done(driver.cuGraphInstantiate(graph, 0))
        finally:
            done(driver.cuGraphDestroy(graph))
        weakref.finalize(self, driver.cuGraphExecDestroy, self._graph).atexit = False

    def replay(self) -> None:
        """Queue the graph on torch's current stream."""
        from cuda.bindings import driver

        done(driver.cuGraphLaunch(self._graph, driver.CUstream(torch.cuda.current_stream().cuda_stream)))


def _set_condition(wanted_1: Tensor, handle: int) -> Any:
    """Return the parameters of the node that sets a condition."""
    from cuda.bindings import driver

    node = driver.CUDA_KERNEL_NODE_PARAMS()
    node.func = _kernel(wanted_1.device.index)
    node.gridDimX = node.gridDimY = node.gridDimZ = node.blockDimX = node.blockDimY = node.blockDimZ = 1
    # The driver copies the values when the node is added.
    node.kernelParams = (handle, wanted_1.data_ptr()), (ctypes.c_uint64, ctypes.c_void_p)
    return node


@cache
def _kernel(device: int) -> Any:
    from cuda.bindings import driver

    with torch.cuda.device(device):
        torch.cuda.current_stream()
        module = done(driver.cuModuleLoadData(compiled("set_condition", SOURCE, OPTIONS, form="PTX")))
        return done(driver.cuModuleGetFunction(module, b"set_condition"))

// Launches and layouts from Python's descriptions, which are tuples of numbers (`saccade.native.described`).
#pragma once

#include <Python.h>
#include <cstdint>
#include <vector>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/object_ptr.h>
#include "call.hpp"

namespace {

std::vector<int64_t> numbers(PyObject* sequence) {
    THPObjectPtr fast(PySequence_Fast(sequence, "a sequence of whole numbers is expected"));
    if (!fast) throw python_error();
    std::vector<int64_t> found;
    for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(fast.get()); ++i)
        found.push_back(PyLong_AsLongLong(PySequence_Fast_GET_ITEM(fast.get(), i)));
    if (PyErr_Occurred()) throw python_error();
    return found;
}

const Tensor& tensor_of(PyObject* given) {
    TORCH_CHECK_TYPE(THPVariable_Check(given), "a tensor is expected, not ", Py_TYPE(given)->tp_name);
    return THPVariable_Unpack(given);
}

Layout layout_of(PyObject* tensor) {
    const Tensor& given = tensor_of(tensor);
    return {given.sizes().vec(), given.strides().vec(), given.scalar_type()};
}

// The layout of an op's result, described by a tensor laid out like it, by (such a tensor,) if the result begins as zeros, or by (a tensor of its
// dtype, the sizes of a contiguous one).
Layout result_of(PyObject* described) {
    if (!PyTuple_Check(described)) return layout_of(described);
    if (PyTuple_GET_SIZE(described) == 1) {
        Layout found = layout_of(PyTuple_GET_ITEM(described, 0));
        found.zeros = true;
        return found;
    }
    TORCH_CHECK(PyTuple_GET_SIZE(described) == 2, "a ragged result has two parts");
    return {numbers(PyTuple_GET_ITEM(described, 1)), {}, tensor_of(PyTuple_GET_ITEM(described, 0)).scalar_type()};
}

// (slot, offset, (sizes), (strides in bytes), (box)), the contiguous dimension last
Moved moved_of(PyObject* described) {
    TORCH_CHECK(PyTuple_Check(described) && PyTuple_GET_SIZE(described) == 5, "a moved tensor has five parts");
    auto sizes = numbers(PyTuple_GET_ITEM(described, 2)), strides = numbers(PyTuple_GET_ITEM(described, 3)), box = numbers(PyTuple_GET_ITEM(described, 4));
    TORCH_CHECK(sizes.size() <= 5 && sizes.size() == strides.size() + 1 && sizes.size() == box.size(), "a moved tensor has one stride less than sizes");
    Moved moved;
    moved.at = {static_cast<int>(PyLong_AsLong(PyTuple_GET_ITEM(described, 0))), PyLong_AsLongLong(PyTuple_GET_ITEM(described, 1))};
    moved.sizes.assign(sizes.rbegin(), sizes.rend());
    moved.strides.assign(strides.rbegin(), strides.rend());
    moved.box.assign(box.rbegin(), box.rend());
    return moved;
}

// (function, (grid x, y, z), threads, shared bytes, (slots), (values), (moved tensors), blocks per sequence or 0, tokens of a tile or 0)
Launch launch_of(PyObject* described) {
    TORCH_CHECK(PyTuple_Check(described) && PyTuple_GET_SIZE(described) == 9, "a launch has nine parts");
    Launch launch;
    launch.function = PyLong_AsVoidPtr(PyTuple_GET_ITEM(described, 0));
    auto grid = numbers(PyTuple_GET_ITEM(described, 1));
    TORCH_CHECK(grid.size() == 3, "a grid has three extents");
    for (int i = 0; i < 3; ++i) launch.grid[i] = static_cast<unsigned>(grid[i]);
    launch.threads = PyLong_AsUnsignedLong(PyTuple_GET_ITEM(described, 2));
    launch.shared_bytes = PyLong_AsUnsignedLong(PyTuple_GET_ITEM(described, 3));
    auto slots = numbers(PyTuple_GET_ITEM(described, 4)), values = numbers(PyTuple_GET_ITEM(described, 5));
    TORCH_CHECK(slots.size() == values.size() && slots.size() <= Launch::MOST, "a launch has one value for each of at most 96 slots");
    for (size_t i = 0; i < slots.size(); ++i) launch.arguments.push_back({static_cast<int>(slots[i]), values[i]});
    PyObject* maps = PyTuple_GET_ITEM(described, 6);
    TORCH_CHECK(PyTuple_Check(maps) && PyTuple_GET_SIZE(maps) <= Launch::MOST_MAPS, "a launch moves at most 8 tensors");
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(maps); ++i) launch.moved.push_back(moved_of(PyTuple_GET_ITEM(maps, i)));
    TORCH_CHECK(launch.moved.empty() || driver.encode, "the driver has no tensor maps");
    launch.per_sequence = PyLong_AsLongLong(PyTuple_GET_ITEM(described, 7));
    launch.tile = PyLong_AsLongLong(PyTuple_GET_ITEM(described, 8));
    for (const Argument& argument : launch.arguments) TORCH_CHECK(argument.slot >= -1 - Ragged::COUNT, "there is no number ", -2 - argument.slot);
    return launch;
}

std::vector<Launch> launches_of(PyObject* sequence) {
    std::vector<Launch> found;
    THPObjectPtr fast(PySequence_Fast(sequence, "a sequence of launches is expected"));
    if (!fast) throw python_error();
    for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(fast.get()); ++i)
        found.push_back(launch_of(PySequence_Fast_GET_ITEM(fast.get(), i)));
    return found;
}

// ([launches], (bytes of each piece of scratch memory), (bytes for each token of q), (piece, groups, Tq, Tk) or ())
Planned planned_of(PyObject* described) {
    TORCH_CHECK(PyTuple_Check(described) && PyTuple_GET_SIZE(described) == 4, "a plan has four parts");
    Planned planned{launches_of(PyTuple_GET_ITEM(described, 0)), numbers(PyTuple_GET_ITEM(described, 1)), numbers(PyTuple_GET_ITEM(described, 2)),
                    numbers(PyTuple_GET_ITEM(described, 3))};
    const bool whole = planned.shares.size() == 4 && planned.shares[0] >= 0 && planned.shares[0] < static_cast<int64_t>(planned.scratch.size());
    TORCH_CHECK(planned.shares.empty() || whole, "shares are (piece, groups, Tq, Tk) of a piece of scratch memory");
    TORCH_CHECK(planned.per_query.empty() || planned.per_query.size() == planned.scratch.size(), "scratch and per_query are of the same pieces");
    return planned;
}

}  // namespace

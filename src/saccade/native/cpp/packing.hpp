// The real tokens of a padded batch on the host, in one pass: 2 us for 8 sentences, where numpy takes 50.
#pragma once

#include <Python.h>
#include <algorithm>
#include <vector>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>

namespace {

// A table `[rows, columns]` of int64, whose rows may be one and lie apart; its columns lie side by side.
struct Table {
    const int64_t* numbers = nullptr;
    int64_t stride = 0;

    const int64_t* row(int64_t i) const { return numbers ? numbers + i * stride : nullptr; }
};

// False if Python has to handle it: another dtype, device, shape or layout.
bool read_table(PyObject* given, int64_t rows, int64_t columns, Table& table) {
    if (given == Py_None) return true;
    if (!THPVariable_Check(given)) return false;
    const at::Tensor& tensor = THPVariable_Unpack(given);
    if (!tensor.is_cpu() || tensor.scalar_type() != at::kLong || tensor.layout() != at::kStrided || tensor.dim() != 2) return false;
    if ((tensor.size(0) != rows && tensor.size(0) != 1) || tensor.size(1) != columns || (columns > 1 && tensor.stride(1) != 1)) return false;
    table = {tensor.const_data_ptr<int64_t>(), tensor.size(0) == 1 ? 0 : tensor.stride(0)};
    return true;
}

// pack(ids, mask, types, positions, padding, counted, reads_first): (numbers, ends, longest, used) as `encoders.packing` describes them, or None for
// what is not int64 on the host.
PyObject* pack(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
    HANDLE_TH_ERRORS
    TORCH_CHECK(count == 7 && THPVariable_Check(arguments[0]), "pack takes ids, mask, types, positions, padding, counted, reads_first");
    const at::Tensor& first = THPVariable_Unpack(arguments[0]);
    if (first.dim() != 2) Py_RETURN_NONE;
    const int64_t rows = first.size(0), columns = first.size(1), padding = PyLong_AsLongLong(arguments[4]);
    const bool counted = arguments[5] == Py_True, reads_first = arguments[6] == Py_True;
    Table ids, mask, types, positions;
    if (!read_table(arguments[0], rows, columns, ids) || !read_table(arguments[1], rows, columns, mask)) Py_RETURN_NONE;
    if (!read_table(arguments[2], rows, columns, types) || !read_table(arguments[3], rows, columns, positions)) Py_RETURN_NONE;
    at::Tensor ends = at::empty({rows + 1}, at::kInt);
    int32_t* end = ends.mutable_data_ptr<int32_t>();
    int64_t tokens = 0, longest = 0;
    bool used = false;
    end[0] = 0;
    std::vector<int64_t> lasts(rows);  // columns of a row up to its last real token
    for (int64_t i = 0; i < rows; ++i) {
        const int64_t *id = ids.row(i), *real = mask.row(i);
        int64_t last = columns, here = real ? 0 : columns, hidden = 0;
        for (; real && last > 0 && !real[last - 1]; --last) hidden += id[last - 1] != padding;
        for (int64_t j = 0; real && j < last; ++j) {
            here += real[j] != 0;
            hidden += (real[j] == 0) & (id[j] != padding);
        }
        lasts[i] = last;
        used |= hidden > 0 || (reads_first && here && real && !real[0]);
        longest = std::max(longest, here);
        tokens += here;
        end[i + 1] = static_cast<int32_t>(tokens);
    }
    at::Tensor numbers = at::empty({4, tokens}, at::kLong);
    int64_t* out = numbers.mutable_data_ptr<int64_t>();
    for (int64_t i = 0; i < rows; ++i) {
        const int64_t *id = ids.row(i), *real = mask.row(i), *type = types.row(i), *position = positions.row(i);
        int64_t place = end[i], seen = 0;  // seen: tokens other than padding, whatever their mask
        for (int64_t j = 0; j < lasts[i]; ++j) {
            seen += id[j] != padding;
            if (real && !real[j]) continue;
            out[place] = id[j];
            out[tokens + place] = position ? position[j] : !counted ? j : id[j] != padding ? seen + padding : padding;
            out[2 * tokens + place] = type ? type[j] : 0;
            out[3 * tokens + place] = i * columns + j;
            ++place;
        }
    }
    return Py_BuildValue("(NNLO)", THPVariable_Wrap(numbers), THPVariable_Wrap(ends), static_cast<long long>(longest), used ? Py_True : Py_False);
    END_HANDLE_TH_ERRORS
}

// Numbers that an object with a buffer holds, such as an array of numpy; they lie one behind another.
struct Numbers {
    Py_buffer view{};

    explicit Numbers(PyObject* given) {
        if (PyObject_GetBuffer(given, &view, PyBUF_C_CONTIGUOUS) != 0) throw python_error();
    }
    ~Numbers() { PyBuffer_Release(&view); }
    Numbers(const Numbers&) = delete;
};

// fill(memory, capacity, numbers, ends): writes a packed batch into the int64 memory of the host that `encoders.graphs.Inputs` describes: four rows of
// so many numbers, zeros behind the tokens, and then the ends as int32, behind which the number of tokens is repeated.
PyObject* fill(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
    HANDLE_TH_ERRORS
    TORCH_CHECK(count == 4 && THPVariable_Check(arguments[0]), "fill takes memory, a capacity, numbers and ends");
    const at::Tensor& memory = THPVariable_Unpack(arguments[0]);
    const int64_t capacity = PyLong_AsLongLong(arguments[1]);
    const Numbers numbers(arguments[2]), ends(arguments[3]);
    TORCH_CHECK(numbers.view.itemsize == sizeof(int64_t) && ends.view.itemsize == sizeof(int32_t), "fill takes numbers of 8 bytes, and ends of 4");
    const int64_t tokens = numbers.view.len / (4 * sizeof(int64_t)), borders = ends.view.len / sizeof(int32_t);
    TORCH_CHECK(memory.is_cpu() && memory.scalar_type() == at::kLong && memory.is_contiguous(), "fill takes int64 memory of the host");
    TORCH_CHECK(tokens <= capacity && borders <= capacity + 1 && memory.numel() == 4 * capacity + (capacity + 2) / 2, "fill has no room");
    int64_t* out = memory.mutable_data_ptr<int64_t>();
    for (int64_t i = 0; i < 4; ++i) {
        const int64_t* row = static_cast<const int64_t*>(numbers.view.buf) + i * tokens;
        std::fill(std::copy(row, row + tokens, out + i * capacity), out + (i + 1) * capacity, 0);
    }
    const int32_t* border = static_cast<const int32_t*>(ends.view.buf);
    int32_t* into = reinterpret_cast<int32_t*>(out + 4 * capacity);
    std::fill(std::copy(border, border + borders, into), into + capacity + 1, static_cast<int32_t>(tokens));
    Py_RETURN_NONE;
    END_HANDLE_TH_ERRORS
}

// unpack(rows, places, tokens, B, T): the first packed rows in the padded batch `[B, T, E]`, with zeros where there is padding. Six operations, which
// take twice as long from Python.
PyObject* unpack(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
    HANDLE_TH_ERRORS
    TORCH_CHECK(count == 5 && THPVariable_Check(arguments[0]) && THPVariable_Check(arguments[1]), "unpack takes rows, places and three numbers");
    const at::Tensor &rows = THPVariable_Unpack(arguments[0]), &places = THPVariable_Unpack(arguments[1]);
    const int64_t tokens = PyLong_AsLongLong(arguments[2]), B = PyLong_AsLongLong(arguments[3]), T = PyLong_AsLongLong(arguments[4]);
    at::Tensor padded = at::zeros({B * T, rows.size(1)}, rows.options());
    padded.index_copy_(0, places.narrow(0, 0, tokens), rows.narrow(0, 0, tokens));
    return THPVariable_Wrap(padded.view({B, T, rows.size(1)}));
    END_HANDLE_TH_ERRORS
}

}  // namespace

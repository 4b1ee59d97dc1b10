// The real tokens of a padded batch on the host, in one pass: 2 us for 8 sentences, where numpy takes 50.
#pragma once

#include <Python.h>
#include <optional>
#include <ATen/ops/empty.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>

namespace {

// A table `[rows, columns]` of int64, whose rows may be one.
struct Table {
    const int64_t* numbers = nullptr;
    int64_t row = 0, column = 0;

    bool is_given() const { return numbers != nullptr; }
    int64_t at(int64_t i, int64_t j) const { return numbers[i * row + j * column]; }
};

// False for what Python has to handle: another dtype, device or shape.
bool read_table(PyObject* given, int64_t rows, int64_t columns, Table& table) {
    if (given == Py_None) return true;
    if (!THPVariable_Check(given)) return false;
    const at::Tensor& tensor = THPVariable_Unpack(given);
    if (!tensor.is_cpu() || tensor.scalar_type() != at::kLong || tensor.layout() != at::kStrided || tensor.dim() != 2) return false;
    if ((tensor.size(0) != rows && tensor.size(0) != 1) || tensor.size(1) != columns) return false;
    table = {tensor.const_data_ptr<int64_t>(), tensor.size(0) == 1 ? 0 : tensor.stride(0), tensor.stride(1)};
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
    for (int64_t i = 0; i < rows; ++i) {
        const int64_t before = tokens;
        for (int64_t j = 0; j < columns; ++j) {
            if (!mask.is_given() || mask.at(i, j)) ++tokens;
            else used |= ids.at(i, j) != padding;
        }
        used |= reads_first && tokens > before && mask.is_given() && !mask.at(i, 0);
        longest = std::max(longest, tokens - before);
        end[i + 1] = static_cast<int32_t>(tokens);
    }
    at::Tensor numbers = at::empty({4, tokens}, at::kLong);
    int64_t* out = numbers.mutable_data_ptr<int64_t>();
    int64_t place = 0;
    for (int64_t i = 0; i < rows; ++i) {
        int64_t seen = 0;  // tokens that are no padding, whatever the mask says of them
        for (int64_t j = 0; j < columns; ++j) {
            seen += ids.at(i, j) != padding;
            if (mask.is_given() && !mask.at(i, j)) continue;
            out[place] = ids.at(i, j);
            out[tokens + place] = positions.is_given() ? positions.at(i, j) : !counted ? j : ids.at(i, j) != padding ? seen + padding : padding;
            out[2 * tokens + place] = types.is_given() ? types.at(i, j) : 0;
            out[3 * tokens + place] = i * columns + j;
            ++place;
        }
    }
    return Py_BuildValue("(NNLO)", THPVariable_Wrap(numbers), THPVariable_Wrap(ends), static_cast<long long>(longest), used ? Py_True : Py_False);
    END_HANDLE_TH_ERRORS
}

}  // namespace
